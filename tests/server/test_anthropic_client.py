"""Anthropic's official client against the real model.

The checks are those of benchmarks/clients, which runs more clients and with keys.
"""

from __future__ import annotations

import httpx
import pytest

from benchmarks.clients.uses import with_anthropic as uses
from benchmarks.clients.uses.checks import Check, Server
from benchmarks.support.servers import RunningServer

pytestmark = pytest.mark.model

CHECKS: tuple[Check, ...] = (
    uses.whole_and_streamed,
    uses.tool_loop,
    uses.tool_named_and_streamed,
    uses.parsed,
    uses.counted_tokens,
    uses.errors,
)


@pytest.fixture
def server(model_server: RunningServer) -> Server:
    models = httpx.get(f"{model_server.url}/v1/models").json()["data"]
    return Server(model_server.url, models[0]["id"], "none")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_official_client(server: Server, check: Check) -> None:
    check(server)
