"""A strict parser of multipart/form-data bodies that arrive in pieces of any size.

No part is held in memory: its data is returned as it comes. The number of parts, and the headers of
a part, are bounded. What HTML forms and HTTP clients do not send (text around the parts, encodings,
nested parts) is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from headway.errors import InvalidRequestError
from headway.server.http.errors import ApiError, ErrorResponse

MAX_PARTS = 16
MAX_PART_HEADER_BYTES = 4096
"""All headers of one part together."""
MAX_NAME_CHARS = 64
MAX_FILENAME_CHARS = 255
_TYPE = re.compile(
    r'multipart/form-data[ \t]*;[ \t]*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE
)
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAM = re.compile(r';[ \t]*([A-Za-z*]{1,16})=(?:"((?:[^"\\]|\\.)*)"|([^\s;"\\]+))')
_ENCODINGS = ("binary", "8bit", "7bit")


@dataclass(frozen=True, slots=True)
class PartBegin:
    """The start of a part; `filename` is None for a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    """Some of the data of the part that began last."""

    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnd:
    """The end of the part that began last."""


PartEvent = PartBegin | PartData | PartEnd


def boundary_of(content_type: str) -> bytes:
    """Return the boundary that a Content-Type names; refuse any other type."""
    match = _TYPE.fullmatch(content_type.strip())
    if match is None:
        message = f"the content type must be multipart/form-data, got {content_type[:100]!r}"
        raise ApiError(
            ErrorResponse(415, message, "invalid_request_error", "unsupported_media_type")
        )
    boundary = match[1] or match[2]
    if _BOUNDARY.fullmatch(boundary) is None:
        raise InvalidRequestError("the boundary in the content type is not valid")
    return boundary.encode("ascii")


class MultipartParser:
    """Turns the pieces of a body into events; raises InvalidRequestError if the body is wrong."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"\r\n--" + boundary
        # As if a line had ended before: the first delimiter then looks like the others.
        self._buffer = bytearray(b"\r\n")
        self._step = self._read_start
        self._num_parts = 0
        self._is_ended = False

    def feed(self, data: bytes) -> list[PartEvent]:
        """Return the events that a piece of the body completes."""
        self._buffer += data
        events: list[PartEvent] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> None:
        """Refuse a body that ended before its last delimiter."""
        if not self._is_ended:
            raise InvalidRequestError("the form ends before its last boundary")

    # Each returns whether the next step can be tried: false if more of the body is needed.

    def _read_start(self, _events: list[PartEvent]) -> bool:
        if len(self._buffer) < len(self._delimiter):
            return False
        if not self._buffer.startswith(self._delimiter):
            raise InvalidRequestError("the form does not begin with its boundary")
        del self._buffer[: len(self._delimiter)]
        self._step = self._read_after_delimiter
        return True

    def _read_after_delimiter(self, _events: list[PartEvent]) -> bool:
        if len(self._buffer) < 2:
            return False
        after = bytes(self._buffer[:2])
        del self._buffer[:2]
        if after == b"--":
            self._is_ended = True
            self._step = self._read_end
        elif after == b"\r\n":
            self._num_parts += 1
            if self._num_parts > MAX_PARTS:
                raise InvalidRequestError(f"the form has more than {MAX_PARTS} parts")
            self._step = self._read_headers
        else:
            raise InvalidRequestError("a boundary of the form is followed by other text")
        return True

    def _read_headers(self, events: list[PartEvent]) -> bool:
        end = self._buffer.find(b"\r\n\r\n", 0, MAX_PART_HEADER_BYTES + 4)
        if end < 0:
            if len(self._buffer) >= MAX_PART_HEADER_BYTES + 4:
                raise InvalidRequestError("the headers of a part of the form are too large")
            return False
        events.append(_part_of(bytes(self._buffer[:end])))
        # The end of the headers stays as the start of a delimiter: a part may be empty.
        del self._buffer[: end + 2]
        self._step = self._read_first_data
        return True

    def _read_first_data(self, events: list[PartEvent]) -> bool:
        """Read the end of the headers, which may be the start of a delimiter."""
        if self._buffer[: len(self._delimiter)] == self._delimiter:
            del self._buffer[: len(self._delimiter)]
            events.append(PartEnd())
            self._step = self._read_after_delimiter
            return True
        if self._delimiter.startswith(bytes(self._buffer)):
            return False
        del self._buffer[:2]
        self._step = self._read_data
        return True

    def _read_data(self, events: list[PartEvent]) -> bool:
        end = self._buffer.find(self._delimiter)
        if end >= 0:
            if end:
                events.append(PartData(bytes(self._buffer[:end])))
            events.append(PartEnd())
            del self._buffer[: end + len(self._delimiter)]
            self._step = self._read_after_delimiter
            return True
        # The end of the buffer may be the start of a delimiter.
        num_data = len(self._buffer) - len(self._delimiter) + 1
        if num_data > 0:
            events.append(PartData(bytes(self._buffer[:num_data])))
            del self._buffer[:num_data]
        return False

    def _read_end(self, _events: list[PartEvent]) -> bool:
        if not b"\r\n".startswith(bytes(self._buffer[:3])):
            raise InvalidRequestError("the form has text after its last boundary")
        return False


def _part_of(headers: bytes) -> PartBegin:
    try:
        lines = headers.decode("utf-8").split("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidRequestError("the headers of a part of the form are not UTF-8") from error
    found: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or name in found or not value.isprintable():
            raise InvalidRequestError(f"a part of the form has a wrong header: {line[:100]!r}")
        found[name] = value.strip()
    if found.get("content-transfer-encoding", "binary").lower() not in _ENCODINGS:
        raise InvalidRequestError("a part of the form is encoded; send it as it is")
    return _disposition(found.get("content-disposition", ""))


def _disposition(text: str) -> PartBegin:
    kind, _, _ = text.partition(";")
    wrong = InvalidRequestError(
        f"a part of the form needs Content-Disposition: form-data; name=..., got {text[:100]!r}"
    )
    params: dict[str, str] = {}
    place = len(kind)
    while match := _PARAM.match(text, place):
        name = match[1].lower()
        if name in params:
            raise wrong
        quoted = match[2]
        params[name] = match[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        place = match.end()
    if kind.strip().lower() != "form-data" or place != len(text) or not params.get("name"):
        raise wrong
    filename = params.get("filename")
    if extended := params.get("filename*"):
        charset, _, encoded = extended.partition("''")
        if charset.lower() != "utf-8":
            raise wrong
        filename = unquote(encoded)
    if len(params["name"]) > MAX_NAME_CHARS or len(filename or "") > MAX_FILENAME_CHARS:
        raise InvalidRequestError("a name in the form is too long")
    if filename is not None and not filename.isprintable():
        raise InvalidRequestError("the file name has characters that cannot be shown")
    return PartBegin(params["name"], filename)
