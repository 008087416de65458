"""Cancels work whose client has left.

Starlette does not cancel a plain handler when its client disconnects, and its streaming response
uses cancel scopes in which cleanup code cannot await. Both kinds of answer therefore use plain
tasks here: work is cancelled once, and may then await whatever its cleanup needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of `work`; if the client leaves first, cancel it.

    Raises ClientDisconnect in that case. The request body must have been read to its end.
    """
    task = asyncio.create_task(work)
    listener = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass
