"""A recording under way: a bounded queue, and the thread that writes.

Engine and router only put calls into the queue. Whatever happens to the recording, they go on: if
the queue is full or the files cannot be written, the recording ends with an entry that says so, and
a line in the log.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

import msgspec

from headway.config import RecordConfig
from headway.errors import RecordingError
from headway.record.entries import CLOSED, ClosedEntry, Header
from headway.record.parts import NO_ROOM, NoRoomError, PartWriter

logger = logging.getLogger(__name__)

MAX_QUEUED_CALLS = 8192
"""Two minutes of an engine's steps of 30 ms, each with two calls and about 20 KB with 64 running
requests."""
CLOSE_S = 2.0
"""How long a process that ends waits for the last calls to be written."""


C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class Encoder(Protocol[C_contra]):
    """Turns calls into entries, in the order in which they were made."""

    def encode(self, call: C_contra) -> msgspec.Struct: ...


class Recording(Generic[C]):
    """Takes calls from the thread that makes them and writes them in another."""

    def __init__(
        self, writer: PartWriter, encoder: Encoder[C], max_queued: int = MAX_QUEUED_CALLS
    ) -> None:
        self._max_queued = max_queued
        self._num_put = self._num_written = 0
        """Calls that were passed to the thread, and that it has written."""
        self._writer = writer
        self._encoder = encoder
        self._pending: list[C] = []
        self._queue: SimpleQueue[list[C] | ClosedEntry] = SimpleQueue()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether calls are still recorded."""
        return self._is_open

    def put(self, call: C) -> None:
        """Record a call at the next `flush`."""
        if self._is_open:
            self._pending.append(call)

    def flush(self) -> None:
        """Have the thread write the calls since the last flush; never waits."""
        if not self._is_open:
            self._pending.clear()
        elif self._num_put - self._num_written < self._max_queued:
            self._num_put += len(self._pending)
            self._queue.put(self._pending)
            self._pending = []
        else:
            reason = "the disk is too slow: too much waits to be written"
            logger.warning("the recording ends at %s: %s", self._writer.path, reason)
            self._end(reason)

    def close(self) -> None:
        """Write what waits, and end."""
        if self._is_open:
            self._queue.put(self._pending)
            self._end(CLOSED)
        self._thread.join(CLOSE_S)

    def _end(self, reason: str) -> None:
        self._is_open = False
        self._pending = []
        self._queue.put(ClosedEntry(reason))

    def _run(self) -> None:
        reason = CLOSED
        try:
            while True:
                calls = self._queue.get()
                if isinstance(calls, ClosedEntry):
                    reason = calls.reason
                    break
                if calls:
                    self._writer.write([self._encoder.encode(call) for call in calls])
                    self._num_written += len(calls)
        except NoRoomError as error:
            reason = f"{NO_ROOM}: {error}"
            logger.warning("the recording ends at %s: %s", self._writer.path, reason)
        except OSError as error:
            reason = f"cannot be written: {error.strerror}"
            logger.warning("the recording ends at %s: %s", self._writer.path, reason)
        except RecordingError as error:
            reason = str(error)
            logger.warning("the recording ends at %s: %s", self._writer.path, reason)
        except Exception:
            reason = "a bug in the recorder"
            logger.exception("the recording ends at %s", self._writer.path)
        finally:
            self._is_open = False
            self._writer.close(reason)
            while not self._queue.empty():
                self._queue.get()


def start_recording(
    config: RecordConfig,
    header: Header,
    encoder: Encoder[C],
    max_queued: int = MAX_QUEUED_CALLS,
) -> Recording[C] | None:
    """Begin a recording; None, and a line in the log, if its folder cannot be written."""
    folder = Path(config.record or "").expanduser()
    try:
        writer = PartWriter(folder, header, config.record_file_bytes, config.record_total_bytes)
    except (NoRoomError, OSError) as error:
        logger.error("nothing is recorded: %s", error)
        return None
    logger.info("recording to %s", writer.path)
    return Recording(writer, encoder, max_queued)
