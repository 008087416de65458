"""Apps over scripted engines, in the process of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headway.text import Tokenizer
from tests.support.local_engine import make_local

Local = Callable[..., Awaitable[SimpleNamespace]]


@pytest.fixture
async def local(tokenizer: Tokenizer) -> AsyncIterator[Local]:
    """Makes apps over scripted engines; each has a `client`. All are closed after the test."""
    async with AsyncExitStack() as stack:

        async def make(*args: Any, **options: Any) -> SimpleNamespace:
            made = await make_local(tokenizer, *args, **options)
            transport = httpx.ASGITransport(made.app)
            client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
            made.client = await stack.enter_async_context(client)
            stack.push_async_callback(made.engine.close)
            return made

        yield make
