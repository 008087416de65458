"""A well-behaved client that measures whether other clients delay it.

The bystander runs in its own process. In the process of the other clients, their threads would
delay it, and the delay would look like the server's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.faults.cases import COMPLETIONS, Target
from benchmarks.faults.exchange import TIMEOUT_S

NUM_TOKENS = 200
TPOT_MS = 40
"""TPOT target of the bystander: 25 tokens per second, faster than people read. On a slow machine,
three times the mean gap of its first stream."""
_BODY = {"prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "ignore_eos": True}
_BUSY_PAUSE_S = 0.2


@dataclass(slots=True)
class Watch:
    """Measurements of the bystander during one phase."""

    worst_gap_s: float = 0.0
    sum_gaps_s: float = 0.0
    num_gaps: int = 0
    num_streams: int = 0
    num_busy: int = 0
    failures: list[str] = field(default_factory=list[str])

    @property
    def mean_gap_s(self) -> float:
        return self.sum_gaps_s / self.num_gaps if self.num_gaps else 0.0


class Bystander:
    """Handle of the bystander process, for the process that sends the bad inputs."""

    def __init__(self, target: Target) -> None:
        command = [sys.executable, "-m", __name__, target.host, str(target.port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    @contextlib.contextmanager
    def measure(self) -> Iterator[Watch]:
        """Measure the time of the with block separately."""
        self._next_watch()
        watch = Watch()
        yield watch
        seen = self._next_watch()
        for name in seen.__slots__:
            setattr(watch, name, getattr(seen, name))

    def _next_watch(self) -> Watch:
        """Return the measurements since the last call."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the bystander has no pipes")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Watch(**json.loads(self._process.stdout.readline()))


class _Streamer:
    """Streams about two hundred tokens, again and again, until its input ends.

    A gap is the time between two events of one stream. The wait for the first event is not a gap,
    because the request may be waiting in the queue.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._body = {**_BODY, "stream": True, "temperature": 0}
        self._watch = Watch()
        self._is_over = threading.Event()

    def serve(self) -> None:
        """Stream until the end of standard input; answer each line with the measurements."""
        thread = threading.Thread(target=self._run)
        thread.start()
        with contextlib.suppress(KeyboardInterrupt):
            for _ in sys.stdin:
                watch, self._watch = self._watch, Watch()
                print(json.dumps(dataclasses.asdict(watch)), flush=True)
        self._is_over.set()
        thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                status = self._stream()
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._watch.failures.append(f"{error!r}")
                self._is_over.wait(_BUSY_PAUSE_S)
                continue
            watch = self._watch
            watch.num_streams += status == 200
            if status == 200 and "tpot_ms" not in self._body:
                self._body["tpot_ms"] = max(TPOT_MS, round(3000 * watch.mean_gap_s))
            if status in (429, 503):
                watch.num_busy += 1
                self._is_over.wait(_BUSY_PAUSE_S)
            elif status != 200:
                watch.failures.append(f"got {status}")

    def _stream(self) -> int:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", COMPLETIONS, json.dumps(self._body), headers)
            response = connection.getresponse()
            if response.status == 200:
                self._read(response)
            return response.status
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        last_at, last_line = None, b""
        while not self._is_over.is_set() and (line := response.readline()):
            if not line.startswith(b"data: "):
                continue
            now, last_line = time.monotonic(), line
            if last_at is not None:
                # `serve` may have replaced the watch since the last event.
                watch = self._watch
                watch.num_gaps += 1
                watch.sum_gaps_s += now - last_at
                watch.worst_gap_s = max(watch.worst_gap_s, now - last_at)
            last_at = now
            if b'"error"' in line:
                raise ValueError(f"the stream failed: {line[:200]!r}")
        if not self._is_over.is_set() and last_line.strip() != b"data: [DONE]":
            raise ValueError(f"the stream broke off: {last_line[:200]!r}")


if __name__ == "__main__":
    _Streamer(sys.argv[1], int(sys.argv[2])).serve()
