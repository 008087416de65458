"""Objects that the handlers share; `create_context` makes them once for every router."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from headway.engine.client.async_engine import AsyncEngine
from headway.errors import NeverFitsError
from headway.observe.ledger.ledger import Ledger
from headway.observe.metrics.metrics import Metrics
from headway.observe.requests.steps import RecentSteps
from headway.observe.spans.context import RequestTrace
from headway.observe.spans.recorder import SpanRecorder
from headway.observe.spans.spans import Attribute
from headway.server.admission import AdmissionController, Reservation
from headway.server.background import BackgroundResponses
from headway.server.batches.store import BatchStore
from headway.server.grammars import GrammarChecks
from headway.server.http.errors import UNAVAILABLE, ApiError, ErrorResponse
from headway.server.live import LiveGenerations
from headway.server.prompt_log import PromptLog
from headway.server.schema.request import GenerationRequest
from headway.server.streams import ResumableStreams
from headway.tenancy import TenantRecord
from headway.text import ChatTemplate
from headway.text.tools.dialect import ChatDialect, read_dialect

T = TypeVar("T")

MAX_INLINE_SIZE = 4096
"""Longest input that the event loop handles itself; longer input would delay streams."""


def _new_id() -> str:
    """Return 128 random bits: whoever knows the id of a stream of its tenant can read it."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The engine, its settings and observers, and sources of ids and time."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    chat_template: ChatTemplate
    metrics: Metrics
    admission: AdmissionController
    started_at: int
    slow_reader_timeout_s: float = 30.0
    tool_call_parser: str = "auto"
    reasoning_field: str = "reasoning_content"
    """Name of the field of a message that has the reasoning."""
    new_id: Callable[[], str] = _new_id
    time_of_day: Callable[[], float] = time.time
    ledger: Ledger | None = None
    batches: BatchStore | None = None
    background: BackgroundResponses = field(default_factory=BackgroundResponses)
    streams: ResumableStreams = field(default_factory=ResumableStreams)
    live: LiveGenerations = field(default_factory=LiveGenerations)
    steps: RecentSteps = field(default_factory=RecentSteps)
    spans: SpanRecorder | None = None
    prompt_log: PromptLog | None = None
    grammars: GrammarChecks = field(init=False)
    dialect: ChatDialect = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grammars", GrammarChecks(self.engine))
        dialect = read_dialect(self.chat_template, self.engine.tokenizer, self.tool_call_parser)
        object.__setattr__(self, "dialect", dialect)

    def model_name(self, requested: str | None) -> str:
        """Return the model name for the answer; raise ApiError (404) for an unknown name."""
        if requested is None:
            return self.model_names[0]
        if requested not in self.model_names:
            message = f"the model {requested[:200]!r} does not exist; GET /v1/models lists models"
            raise ApiError(
                ErrorResponse(404, message, "invalid_request_error", "model_not_found", "model")
            )
        return requested

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return token ids; raise NeverFitsError first if the text is certainly too long."""
        tokenizer, limit = self.engine.tokenizer, self.engine.info.capacity.max_model_len
        if (least := tokenizer.min_num_tokens(text)) > limit:
            raise NeverFitsError(
                f"the prompt has at least {least} tokens; max_model_len is {limit}", "prompt"
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def status(self) -> str:
        """Return whether requests should be sent here, as one word."""
        if self.admission.is_closed or self.admission.is_paused:
            return "draining"
        if self.engine.has_given_up:
            return "failed"
        if self.engine.is_ready:
            return "ready"
        return "stalled" if self.engine.is_up else "loading"

    def set_client_id(self, request_id: str, client_id: str, revision: int = 0) -> None:
        """Have the ledger, if there is one, write the client's own id of a request."""
        if self.ledger is not None:
            self.ledger.set_client_id(request_id, client_id, revision)

    def admit(
        self, request: Request, is_repeat: bool = False
    ) -> AbstractContextManager[Reservation]:
        """Reserve a position in the queue until the engine has the request, or refuse it.

        A repeated request, whose answer is kept, counts as a request but takes no lease.
        """
        length = request.headers.get("content-length", "")
        num_bytes = int(length) if length.isdecimal() and len(length) < 16 else None
        return self.admit_body(request.state.record, num_bytes, is_repeat)

    def admit_body(
        self, record: TenantRecord, num_bytes: int | None, is_repeat: bool = False
    ) -> AbstractContextManager[Reservation]:
        """Do the same for a body of a tenant, of known or unknown length."""
        if not self.engine.takes_requests:
            raise ApiError(UNAVAILABLE)
        meter = record.meter
        if is_repeat and meter is not None:
            meter.count_repeat()
            meter = None
        tenant, is_spot = record.tenant.name, record.terms.is_spot
        return self.admission.admit(tenant, num_bytes, meter, record.gateway, is_spot)

    def begun_span(
        self, request_id: str, caller: Caller, asked: Mapping[str, Attribute]
    ) -> AbstractContextManager[None]:
        """Have the request that is sent within this context get spans, if the server makes any."""
        if self.spans is None:
            return nullcontext()
        return self.spans.begun(request_id, caller.trace, asked)

    def open_lease(self, request: Request, reservation: Reservation) -> None:
        """Have a repeated request take a lease after all, because its answer is gone."""
        meter = request.state.record.meter
        if reservation.lease is None and meter is not None:
            reservation.lease = meter.open_lease()


@dataclass(frozen=True, slots=True)
class Caller:
    """For whom a request is answered, and by which ids it is known."""

    record: TenantRecord
    client_id: str = ""
    """The id in the X-Request-Id header of the answer."""
    request_id: str = ""
    """The id of the request without its prefix; empty for a new one."""
    trace: RequestTrace | None = None
    """The trace that the request belongs to, on a server that makes spans."""

    @classmethod
    def of(cls, request: Request) -> Caller:
        state = request.state
        return cls(
            state.record, getattr(state, "request_id", ""), trace=getattr(state, "trace", None)
        )

    def check_permissions(self, body: GenerationRequest) -> None:
        """Refuse fields of a body that the tier of the tenant does not allow."""
        body.check_permissions(self.record.permissions, self.record.terms.tier)


async def read_body(request: Request) -> bytes:
    """Return the body, which must be declared as JSON.

    A page of another site can send any other content type here without a preflight request.
    `request.body()` would hold the body in memory for as long as the answer streams.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the content type must be application/json, got {kind[:100]!r}"
        raise ApiError(
            ErrorResponse(415, message, "invalid_request_error", "unsupported_media_type")
        )
    return b"".join([piece async for piece in request.stream()])


async def run_off_loop(size: int, work: Callable[[], T]) -> T:
    """Do the work here if its input is small, otherwise in a thread."""
    return work() if size <= MAX_INLINE_SIZE else await asyncio.to_thread(work)
