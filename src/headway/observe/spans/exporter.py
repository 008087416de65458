"""The thread that sends spans to an OTLP receiver over HTTP; `put` never blocks.

A receiver that does not answer is asked again, with growing pauses, while requests wait in a
bounded queue. Requests beyond the bound, and those that a receiver refuses, are dropped and
counted.
"""

from __future__ import annotations

import http.client
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headway.observe.spans.spans import Attribute, EndedRequest

logger = logging.getLogger(__name__)

MAX_QUEUED = 2048
MAX_BATCH = 128
"""Most requests of one export."""
INTERVAL_S = 1.0
"""Time in which requests are collected for an export."""
TIMEOUT_S = 5.0
FIRST_RETRY_S = 1.0
MAX_RETRY_S = 30.0
STOP_S = 3.0
"""How long the end of the server waits for the last export."""
MAX_ANSWER_BYTES = 64 * 1024
_RETRY_STATUS = frozenset({429, 502, 503, 504})
_OK = 200
Encode = Callable[[Sequence[EndedRequest], Mapping[str, Attribute]], bytes]


class _ReceiverDown(Exception):
    """The receiver cannot be reached, or asks for a later attempt."""


class _ExportRefused(Exception):
    """The receiver will not take this export, however often it is sent."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where spans are sent, and what is said about this process."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    resource: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])

    def post(self, body: bytes) -> bytes:
        """Send an export; return the body of the answer."""
        parts = urlsplit(self.url)
        is_secure = parts.scheme == "https"
        make = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
        path = parts.path if parts.path.strip("/") else "/v1/traces"
        connection = make(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/x-protobuf", **self.headers}
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _ReceiverDown(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status == _OK:
            return content
        kind = _ReceiverDown if answer.status in _RETRY_STATUS else _ExportRefused
        raise kind(f"it answered {answer.status}")


class SpanExporter:
    """Owns the queue of ended requests, and the thread that sends them."""

    def __init__(
        self, receiver: Receiver, encode: Encode, num_rejected: Callable[[bytes], int]
    ) -> None:
        self.num_dropped = 0
        """Requests whose spans were not sent."""
        self._receiver = receiver
        self._encode = encode
        self._num_rejected = num_rejected
        self._queue: deque[EndedRequest] = deque()
        self._is_stopping = threading.Event()
        self._retry_s = 0.0
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    @property
    def is_failing(self) -> bool:
        """Whether the last export failed."""
        return self._retry_s > 0.0

    def start(self) -> None:
        self._thread.start()

    def put(self, ended: EndedRequest) -> None:
        """Add a request; never blocks."""
        if len(self._queue) >= MAX_QUEUED:
            self.num_dropped += 1
            return
        self._queue.append(ended)

    def stop(self) -> None:
        """Send what is there, once, within a bounded time."""
        self._is_stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        self.num_dropped += len(self._queue)
        if self.num_dropped:
            logger.warning("spans of %d requests were not sent", self.num_dropped)

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        deadline = None
        while True:
            is_last = self._is_stopping.wait(self._retry_s or INTERVAL_S)
            if is_last and deadline is None:
                deadline = time.monotonic() + STOP_S
            try:
                self._send_all()
            except Exception:
                # An unexpected error must not end the thread silently.
                logger.exception("spans cannot be sent")
                self._drop_batch()
            is_late = deadline is not None and time.monotonic() > deadline
            if is_last and (not self._queue or self.is_failing or is_late):
                return

    def _send_all(self) -> None:
        while self._queue:
            batch = self._batch()
            try:
                answer = self._receiver.post(self._encode(batch, self._receiver.resource))
            except _ReceiverDown as error:
                self._back_off(error)
                return
            except _ExportRefused as error:
                self._warn(f"spans were refused: {error}")
                self._drop_batch()
            else:
                self._remove(len(batch))
                self._retry_s = 0.0
                if rejected := self._num_rejected(answer):
                    self._warn(f"the receiver did not take {rejected} spans")

    def _batch(self) -> list[EndedRequest]:
        # Only this thread removes from the left.
        return [self._queue[number] for number in range(min(MAX_BATCH, len(self._queue)))]

    def _drop_batch(self) -> None:
        self.num_dropped += self._remove(MAX_BATCH)

    def _remove(self, count: int) -> int:
        count = min(count, len(self._queue))
        for _ in range(count):
            self._queue.popleft()
        return count

    def _back_off(self, error: Exception) -> None:
        if not self.is_failing:
            logger.warning("spans cannot be sent now: %s", error)
        self._retry_s = min(2 * self._retry_s or FIRST_RETRY_S, MAX_RETRY_S)

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            logger.warning("%s; further warnings of this kind are left out", message)
        self._has_warned = True
