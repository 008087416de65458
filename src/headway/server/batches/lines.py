"""Lines of an input file: one request each, checked before the first of them runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec

from headway.errors import InvalidRequestError
from headway.server.batches.records import LineError
from headway.server.http.errors import ApiError, translate

MAX_LINES = 50_000
MAX_ERRORS = 100
"""Errors of a file that are listed; there may be more."""
MAX_CUSTOM_ID_CHARS = 256
ENVELOPE_BYTES = 64 * 1024
"""Most bytes of a line beside the body of its request."""
CHECK_SLICE_S = 0.01
"""How long lines are checked before streams get their turn."""


class _LineFields(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decode = msgspec.json.Decoder(_LineFields).decode


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch."""

    number: int
    """From 1, with empty lines counted."""
    custom_id: str
    body: bytes

    def digest(self, batch_id: str) -> str:
        """Return the name of this request, which is the same after a restart."""
        text = f"{batch_id}:{self.number}".encode()
        return blake2b(text, digest_size=16, person=b"headway batch").hexdigest()


def parse_line(text: bytes, number: int, url: str) -> Line:
    """Return a line as a request; raise InvalidRequestError with the field that is wrong."""
    try:
        fields = _decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the line cannot be read: {error}") from error
    if not 0 < len(fields.custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise InvalidRequestError(
            f"custom_id must have 1 to {MAX_CUSTOM_ID_CHARS} characters", "custom_id"
        )
    if fields.method != "POST":
        raise InvalidRequestError(f"method must be POST, got {fields.method[:20]!r}", "method")
    if fields.url != url:
        raise InvalidRequestError(
            f"url must be {url}, the endpoint of the batch, got {fields.url[:100]!r}", "url"
        )
    return Line(number, fields.custom_id, bytes(fields.body))


class LineReader:
    """Reads the lines of a file one after another, from any place; all calls block."""

    def __init__(self, path: Path, max_line_bytes: int) -> None:
        self._path = path
        self._max_line_bytes = max_line_bytes
        self._offset = 0
        self._number = 0

    def read(self, max_lines: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Return the next lines that are not empty, with their numbers; none at the end.

        A line that is too long is returned in part, longer than `max_line_bytes`.
        """
        found: list[tuple[int, bytes]] = []
        num_bytes = 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while len(found) < max_lines and num_bytes < max_bytes:
                text = file.readline(self._max_line_bytes + 1)
                if not text:
                    break
                self._offset += len(text)
                num_bytes += len(text)
                self._number += 1
                if text.strip():
                    found.append((self._number, text))
        return found


class FileCheck:
    """Checks all lines of an input file, some at a time."""

    def __init__(
        self, path: Path, url: str, max_line_bytes: int, check_body: Callable[[bytes], None]
    ) -> None:
        """`check_body` raises InvalidRequestError or ApiError for a body that is wrong."""
        self.num_lines = 0
        self.errors: list[LineError] = []
        self._reader = LineReader(path, max_line_bytes)
        self._url = url
        self._max_line_bytes = max_line_bytes
        self._check_body = check_body
        self._numbers: dict[str, int] = {}
        """Line of each custom_id."""

    def check_some(self) -> bool:
        """Check lines for a moment; return whether the file is done. Blocks."""
        until = time.monotonic() + CHECK_SLICE_S
        while time.monotonic() < until:
            try:
                lines = self._reader.read(1, 1)
            except FileNotFoundError:
                self._refuse("invalid_file", "the input file was deleted")
                return True
            if not lines:
                if not self.num_lines:
                    self._refuse("empty_file", "the input file has no requests")
                return True
            if self._check(*lines[0]):
                return True
        return False

    def _check(self, number: int, text: bytes) -> bool:
        """Check one line; return whether no further line needs a check."""
        self.num_lines += 1
        if self.num_lines > MAX_LINES:
            self._refuse("too_many_lines", f"a batch has at most {MAX_LINES} requests; split it")
            return True
        if len(text) > self._max_line_bytes:
            message = f"the line has more than {self._max_line_bytes} bytes (max_body_bytes)"
            self._refuse("line_too_long", message, number)
            return True  # the next read would begin inside this line
        try:
            line = parse_line(text, number, self._url)
        except InvalidRequestError as error:
            self._refuse("invalid_request", str(error), number, error.param)
        else:
            first = self._numbers.setdefault(line.custom_id, number)
            if first != number:
                message = f"line {first} has the same custom_id; make each unique"
                self._refuse("duplicate_custom_id", message, number, "custom_id")
            try:
                self._check_body(line.body)
            except (ApiError, InvalidRequestError) as error:
                answer = translate(error)
                param = f"body.{answer.param}" if answer.param else "body"
                self._refuse(answer.code or "invalid_request", answer.message, number, param)
        return len(self.errors) >= MAX_ERRORS

    def _refuse(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        self.errors.append(LineError(code=code, message=message, line=line, param=param))
