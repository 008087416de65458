"""The output files of a batch: one line per finished request, on disk before it counts.

Lines are appended and synced in groups. A server that is killed may leave part of a line at the end
of a file: `recover` cuts it off, and the request runs again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.server.batches.folder import FLAGS
from headway.server.batches.lines import Line
from headway.server.batches.store import write_all
from headway.server.http.encoding import to_json
from headway.server.http.errors import ErrorResponse

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Pause after a write that failed, as on a full disk."""
EXPIRED = "batch_expired"


class _ResultFields(msgspec.Struct):
    custom_id: str


_decode = msgspec.json.Decoder(_ResultFields).decode


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a request: a line of the output file, or of the error file."""

    custom_id: str
    is_error: bool
    text: bytes

    @classmethod
    def answered(cls, line: Line, name: str, body: bytes) -> Result:
        """Return the answer to a request."""
        return cls(line.custom_id, False, _encode(line, name, _response(name, 200, body)))

    @classmethod
    def refused(cls, line: Line, name: str, answer: ErrorResponse) -> Result:
        """Return an answer that is an error."""
        response = _response(name, answer.status, to_json(answer.body()))
        return cls(line.custom_id, True, _encode(line, name, response))

    @classmethod
    def expired(cls, line: Line, name: str) -> Result:
        """Return the outcome of a request for which there was no time."""
        message = "This request could not be executed before the completion window expired."
        error = {"code": EXPIRED, "message": message}
        return cls(line.custom_id, True, _encode(line, name, None, error))


def _response(name: str, status: int, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": name, "body": msgspec.Raw(body)}


def _encode(
    line: Line, name: str, response: dict[str, Any] | None, error: dict[str, str] | None = None
) -> bytes:
    fields = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
    return to_json(fields) + b"\n"


class ResultLog:
    """Appends results to the two files of a batch, and knows which requests are done."""

    def __init__(self, output: Path, errors: Path, count_done: Callable[[bool, int], None]) -> None:
        """`count_done(is_error, number)` is called, in any thread, for results on disk."""
        self.done: set[str] = set()
        """The custom_id of every request with a result on disk."""
        self.num_completed = 0
        self.num_failed = 0
        self._count_done = count_done
        self._paths = {False: output, True: errors}
        self._sizes = {False: 0, True: 0}
        self._pending: list[tuple[Result, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the output file and of the error file."""
        return self._sizes[False], self._sizes[True]

    def recover(self) -> None:
        """Read what is on disk, and cut off what is not whole; blocks."""
        for is_error, path in self._paths.items():
            file = os.open(path, FLAGS, 0o600)
            try:
                num_bytes = 0
                with os.fdopen(os.dup(file), "rb") as lines:
                    for text in lines:
                        custom_id = _read(text)
                        # A repeated line would be one that was written and not counted.
                        if custom_id is None or custom_id in self.done:
                            break
                        self._count(custom_id, is_error)
                        num_bytes += len(text)
                if os.fstat(file).st_size > num_bytes:
                    logger.warning("%s: cut off after %d bytes", path.name, num_bytes)
                    os.ftruncate(file, num_bytes)
                os.fsync(file)
                self._sizes[is_error] = num_bytes
            finally:
                os.close(file)

    async def add(self, result: Result) -> None:
        """Append a result; return when it is on disk."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((result, written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_pending())
        # Whoever waits may be cancelled; the result is written nevertheless.
        await asyncio.shield(written)

    async def flush(self) -> None:
        """Wait until every result that was added is on disk."""
        while self._writer is not None:
            await asyncio.shield(self._writer)

    def append(self, results: list[Result]) -> None:
        """Append results to their files and sync them; blocks, and raises OSError."""
        for is_error, path in self._paths.items():
            own = [one for one in results if one.is_error == is_error]
            if own:
                self._append(path, is_error, b"".join([one.text for one in own]))
                for one in own:
                    self._count(one.custom_id, is_error)
                self._count_done(is_error, len(own))

    async def _write_pending(self) -> None:
        try:
            while self._pending:
                group, self._pending = self._pending, []
                left = [result for result, _ in group]
                while left:
                    try:
                        await asyncio.to_thread(self.append, left)
                    except OSError as error:
                        logger.error("results of a batch cannot be written: %s", error)
                        await asyncio.sleep(RETRY_S)
                    left = [one for one in left if one.custom_id not in self.done]
                for _, written in group:
                    if not written.done():
                        written.set_result(None)
        finally:
            self._writer = None

    def _append(self, path: Path, is_error: bool, content: bytes) -> None:
        size = self._sizes[is_error]
        file = os.open(path, FLAGS, 0o600)
        try:
            # A write that failed before may have left part of a line.
            os.ftruncate(file, size)
            os.lseek(file, size, os.SEEK_SET)
            write_all(file, content)
            os.fdatasync(file)
        finally:
            os.close(file)
        self._sizes[is_error] = size + len(content)

    def _count(self, custom_id: str, is_error: bool) -> None:
        self.done.add(custom_id)
        if is_error:
            self.num_failed += 1
        else:
            self.num_completed += 1


def _read(text: bytes) -> str | None:
    """Return the custom_id of a whole line; None for any other."""
    if not text.endswith(b"\n"):
        return None
    try:
        return _decode(text).custom_id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
