"""What the handlers share. Made once by `create_app` and passed to every router."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headway.engine.async_engine import AsyncEngine
from headway.observe.metrics import Metrics
from headway.server.errors import UNAVAILABLE, ApiError, ErrorAnswer
from headway.text import ChatTemplate

T = TypeVar("T")

MAX_INLINE_SIZE = 4096
"""Input up to this size is worked on in the event loop; longer input would hold up streams."""


def _new_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Services:
    """The engine and what belongs to it, and where ids and the time of day come from."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    chat_template: ChatTemplate
    metrics: Metrics
    started_at: int
    new_id: Callable[[], str] = _new_id
    time_of_day: Callable[[], float] = time.time

    def model_name(self, asked: str | None) -> str:
        """The name to answer under: the one asked for, if the model goes by it."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            message = f"the model {asked[:200]!r} does not exist"
            raise ApiError(
                ErrorAnswer(404, message, "invalid_request_error", "model_not_found", "model")
            )
        return asked

    def check_ready(self) -> None:
        if not self.engine.is_ready:
            raise ApiError(UNAVAILABLE)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Do the work here if its input is small, in a thread if it could take long."""
    return work() if size <= MAX_INLINE_SIZE else await asyncio.to_thread(work)
