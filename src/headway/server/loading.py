"""Loads in a thread, while the event loop answers probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Loading(Generic[T]):
    """Work in a thread that a shutdown need not wait for."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    async def run(self) -> T:
        """Do the work and return its result; if cancelled, the thread is left running."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # pyright: ignore[reportArgumentType]

        def work() -> None:
            result, failure = None, None
            try:
                result = self._work()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task awaits it
                loop.call_soon_threadsafe(finish, result, failure)

        # Not a pool thread: the interpreter waits for pool threads when it exits.
        self._thread = threading.Thread(target=work, name="loading", daemon=True)
        self._thread.start()
        return await future

    def exit_if_running(self, code: int) -> None:
        """End the process now if the work still runs.

        A download has threads of its own, and the interpreter would wait for each of them.
        """
        if self.is_running:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
