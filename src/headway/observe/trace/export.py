"""What a server sends to `headway trace`: recent steps and accounts, as lines of JSON.

The first line is a TraceHead, the last a TraceEnd; an answer without it was cut off. All times are
seconds since 1970.
"""

from __future__ import annotations

import msgspec

from headway.observe.trace.account import RequestAccount

VERSION = 1
PATH = "/trace"
"""Path of the answer on the admin listener."""
MAX_SINCE_S = 86_400.0
MAX_LINE_BYTES = 4 * 2**20
"""Longer than any line that a server writes."""
MAX_TRACE_BYTES = 64 * 2**20
"""Most bytes of an answer; what is left is left out."""


class TraceHead(msgspec.Struct, frozen=True, tag="head"):
    """Begins an answer."""

    version: int
    headway: str
    model: str
    now: float
    since_s: float


class TraceStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of an engine; the counts are those after it."""

    step_id: int
    at: float
    """The end of the step."""
    elapsed_s: float
    predicted_s: float
    """By the step-time model before the step; 0 if there was no prediction."""
    num_seqs: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_blocks_used: int


class TraceSteps(msgspec.Struct, frozen=True, tag="steps"):
    """Steps of one engine, the oldest first."""

    engine: str
    steps: list[TraceStep]


class TraceRequest(msgspec.Struct, frozen=True, tag="request"):
    """One request, live or ended."""

    account: RequestAccount


class TraceEnd(msgspec.Struct, frozen=True, tag="end"):
    """Ends an answer."""

    num_steps: int
    num_requests: int
    is_complete: bool
    """False if the server no longer had all steps and requests of the time."""


TraceLine = TraceHead | TraceSteps | TraceRequest | TraceEnd
encode_line = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(TraceLine).decode
