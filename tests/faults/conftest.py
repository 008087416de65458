"""One fake server for the whole folder, and proof that none of its tests has brought it down."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from benchmarks.faults.cases import Target
from benchmarks.support.servers import RunningServer

FAKE_MAX_BODY_BYTES = 100_000


@pytest.fixture(scope="session")
def target(fake_server: RunningServer) -> Iterator[Target]:
    server = psutil.Process(fake_server.process.pid)
    engines = {child.pid for child in server.children(recursive=True)}
    yield Target("127.0.0.1", fake_server.port, FAKE_MAX_BODY_BYTES)
    assert fake_server.process.poll() is None, fake_server.log
    assert {child.pid for child in server.children(recursive=True)} == engines
    assert "Traceback" not in fake_server.log
