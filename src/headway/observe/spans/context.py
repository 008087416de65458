"""W3C trace context: the trace that a request belongs to, from and for a traceparent header."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_HEADER_CHARS = 128
MAX_STATE_CHARS = 512
_SAMPLED = 1
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?")
DrawBytes = Callable[[int], bytes]


@dataclass(slots=True)
class RequestTrace:
    """The span of one request, and its place in a trace."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""
    """The span of the client; empty if the trace begins here."""
    is_sampled: bool = True
    """Whether the client wants spans of this trace to be kept."""
    state: str = ""
    """The client's tracestate."""
    is_recorded: bool = False
    """Whether a request takes this place; then its answer names the span."""

    @property
    def header(self) -> str:
        """The traceparent for whoever continues the trace after this span."""
        flags = _SAMPLED if self.is_sampled else 0
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{flags:02x}"


def begin_trace(draw: DrawBytes = os.urandom) -> RequestTrace:
    """Return a span that begins a trace of its own."""
    return RequestTrace(draw(16), draw(8))


def continue_trace(parent: str, state: str = "", draw: DrawBytes = os.urandom) -> RequestTrace:
    """Return a span below that of a traceparent header, or of its own trace if it is invalid."""
    match = _FORM.fullmatch(parent) if len(parent) <= MAX_HEADER_CHARS else None
    if match is None:
        return begin_trace(draw)
    version, trace_id, parent_id, flags, rest = match.groups()
    is_known = version != "ff" and not (version == "00" and rest)
    if not is_known or not int(trace_id, 16) or not int(parent_id, 16):
        return begin_trace(draw)
    is_usable = len(state) <= MAX_STATE_CHARS and state.isascii() and state.isprintable()
    return RequestTrace(
        bytes.fromhex(trace_id),
        draw(8),
        bytes.fromhex(parent_id),
        bool(int(flags, 16) & _SAMPLED),
        state if is_usable else "",
    )
