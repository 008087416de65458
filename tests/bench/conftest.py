"""Endpoints that follow a script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from headway.bench.load.http import parse_url
from headway.bench.load.openai import Target
from tests.bench.endpoint import Endpoint, Script

Serve = Callable[[Script], Awaitable[Endpoint]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def start(script: Script) -> Endpoint:
            endpoint = Endpoint(script)
            await endpoint.start()
            stack.push_async_callback(endpoint.close)
            return endpoint

        yield start


@pytest.fixture
def target_of() -> Callable[..., Target]:
    return lambda url, **options: Target(parse_url(url), "m", **options)
