"""Work that nobody waits for any more ends at once.

Starlette does not cancel a plain handler when its client goes away, and its streaming response
uses cancel scopes in which a cleanup may no longer wait for anything. Both kinds of answer
therefore listen here, with plain tasks: work is cancelled once and then has all the time it needs
to clean up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_disconnected(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `work` returns. If the client leaves first, work is cancelled: ClientDisconnect.

    The request body must have been read to its end.
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
    """Until the connection is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
