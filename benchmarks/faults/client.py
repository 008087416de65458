"""Posts bodies over persistent connections as fast as the server accepts them."""

from __future__ import annotations

import http.client
import time
from types import TracebackType

from benchmarks.faults.cases import Target
from benchmarks.faults.exchange import Answer

TIMEOUT_S = 120.0
"""Long prompts are computed in small chunks beside a stream with a TPOT target."""


class Poster:
    """One connection, reopened when the server closes it; not thread-safe."""

    def __init__(self, target: Target) -> None:
        self._connection = http.client.HTTPConnection(target.host, target.port, timeout=TIMEOUT_S)

    def __enter__(self) -> Poster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def post(self, path: str, body: bytes) -> Answer:
        started_at = time.monotonic()
        try:
            try:
                response = self._send(path, body)
            except (http.client.RemoteDisconnected, ConnectionError):
                # The server may have closed an idle connection; it must not close a new one.
                self._connection.close()
                response = self._send(path, body)
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            return Answer(f"{error!r}", "", b"", time.monotonic() - started_at)
        kind = response.getheader("Content-Type", "")
        return Answer(response.status, kind, content, time.monotonic() - started_at)

    def _send(self, path: str, body: bytes) -> http.client.HTTPResponse:
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        return self._connection.getresponse()
