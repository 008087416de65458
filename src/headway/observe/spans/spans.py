"""The spans of a request, from its account: the request, and its waits, prefill and decode.

Attributes follow the OpenTelemetry conventions for generative AI (semantic-conventions-genai, in
development) where those have a name; Headway's own begin with `headway.`. No span has a text of a
prompt or an output.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headway.observe.spans.context import DrawBytes, RequestTrace
from headway.observe.trace.account import RequestAccount
from headway.observe.trace.pieces import Piece, pieces_of

PROVIDER = "headway"
OPERATIONS = {"cmpl-": "text_completion", "embd-": "embeddings"}
"""Operation by the beginning of a request's id; of all others: chat."""
FAILED = frozenset({"error", "timeout"})
Attribute = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that ended, its place in a trace, and what its client asked for."""

    account: RequestAccount
    trace: RequestTrace
    asked: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One span; times are nanoseconds since 1970."""

    name: str
    span_id: bytes
    parent_id: bytes
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    error: str = ""
    """Why the request failed; empty if it did not."""
    is_server: bool = False


def operation_of(request_id: str) -> str:
    """Return the name of the operation that a request is."""
    found = (name for start, name in OPERATIONS.items() if request_id.startswith(start))
    return next(found, "chat")


def spans_of(ended: EndedRequest, draw: DrawBytes = os.urandom) -> Iterator[RequestSpan]:
    """Return the span of a request, then those of its pieces."""
    account, trace = ended.account, ended.trace
    reason = account.finish_reason
    operation, model = operation_of(account.id), ended.asked.get("gen_ai.request.model", "")
    yield RequestSpan(
        f"{operation} {model}".rstrip(),
        trace.span_id,
        trace.parent_id,
        *_times(account, 0.0, account.duration_s),
        {"gen_ai.operation.name": operation, **ended.asked, **_attributes(account)},
        error=reason if reason in FAILED else "",
        is_server=True,
    )
    for piece in pieces_of(account):
        times = _times(account, piece.start_s, piece.end_s)
        yield RequestSpan(piece.kind, draw(8), trace.span_id, *times, _piece_attributes(piece))


def _times(account: RequestAccount, start_s: float, end_s: float) -> tuple[int, int]:
    # Apart: the sum of both as a float would be exact to a quarter of a microsecond only.
    arrived_ns = round(account.arrived_at * 1e6) * 1000
    return arrived_ns + round(start_s * 1e9), arrived_ns + round(end_s * 1e9)


def _attributes(account: RequestAccount) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.response.id": account.id,
        "gen_ai.response.finish_reasons": [account.finish_reason],
        "gen_ai.usage.input_tokens": account.num_prompt_tokens,
        "gen_ai.usage.output_tokens": account.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": account.num_cached_tokens,
        "headway.tenant": account.tenant,
        "headway.tier": account.tier,
        "headway.client_id": account.client_id,
        "headway.queue_s": account.queue_s,
        "headway.preemptions": account.num_preemptions,
    }
    if account.first_token_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = account.first_token_s
    if account.finish_reason in FAILED:
        found["error.type"] = account.finish_reason
    return found | {f"headway.wait.{one.cause}_s": one.seconds for one in account.causes}


def _piece_attributes(piece: Piece) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {"headway.part": piece.part} if piece.part else {}
    found |= {f"headway.wait.{one.cause}_s": one.seconds for one in piece.causes}
    begun = piece.interruption
    if begun is not None:
        found["headway.interruption"] = begun.kind
    if begun is not None and begun.by:
        found |= {"headway.preempted_by": begun.by, "headway.preemption.cause": begun.cause}
    return found
