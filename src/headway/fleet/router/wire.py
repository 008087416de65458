"""The messages between frontends and a router, and their bounds.

A frontend begins with Join. From then on it sends Told: all that has happened since the last, in
order. The router answers each with Decided, which says how far it has heard. So a frontend knows
how late the router is. Times are ages, because clocks of two machines have nothing in common.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated

import msgspec

from headway.core.events import Stepped
from headway.core.params import MAX_SAMPLES
from headway.core.terms import NO_TERMS, Terms
from headway.errors import InvalidRequestError
from headway.fleet.network.checks import check_id, check_name, check_terms
from headway.fleet.network.wire import MAX_COMMAND_BYTES, Closed, WireError, decode_message
from headway.routing import FrontendLoad, Reason
from headway.tenancy import Quotas

ROUTER_VERSION = 3
MAX_FRONTENDS = 64
MAX_JOIN_BYTES = 4096
MAX_ITEMS = 16_384
MAX_FRAME_TOKENS = 2**20
"""Prompt tokens of one message, unless a single request has more."""
MAX_ASKED = 4096
"""Requests of one frontend that wait in the router."""
MAX_ASKED_TOKENS = 8 * 1024**2
MAX_TOKENS = 2**24
_MAX_ENGINES = 1024
MAX_AGE_S = 7 * 86400.0
MAX_PRIORITY = 2**31 - 1
_MAX_INT = 2**31
Names = Annotated[list[str], msgspec.Meta(max_length=_MAX_ENGINES)]
TokenIds = Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)]


class Join(msgspec.Struct, tag="join", frozen=True, forbid_unknown_fields=True):
    """The first message of a frontend."""

    version: int
    frontend: str
    instance: str
    """Random id of the frontend process: its earlier connection, if any, is over."""


class EngineFound(msgspec.Struct, tag="engine", frozen=True):
    """The frontend can use an engine."""

    name: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    has_prefix_cache: bool


class EngineGone(msgspec.Struct, tag="gone", frozen=True):
    """The frontend cannot use an engine; what it had there is lost, or runs on if it drains."""

    name: str
    is_draining: bool = False


class EngineStepped(msgspec.Struct, tag="stepped", frozen=True):
    """A step of an engine has ended."""

    name: str
    stepped: Stepped


class EngineIdled(msgspec.Struct, tag="idled", frozen=True):
    """No request is left in an engine."""

    name: str
    num_blocks_used: int


class RouterRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a router must know of a request."""

    id: str
    token_ids: TokenIds
    """The prompt, and output of an earlier attempt."""
    max_tokens: int
    num_samples: int = 1
    priority: int = 0
    age_s: float = 0.0
    terms: Terms = NO_TERMS
    is_scored: bool = False
    """Whether it wants log-probabilities of its prompt, and so reads no prefix cache."""


class Arrive(msgspec.Struct, tag="arrive", frozen=True, omit_defaults=True):
    """A request wants an engine; the answer is SendTo or RefuseLate, at any time."""

    request: RouterRequest
    is_resent: bool = False
    only: Names | None = None
    """Engines that may have the request; None for all of the frontend."""


class Restore(msgspec.Struct, tag="restore", frozen=True, omit_defaults=True):
    """A request is in an engine, by a decision that this router did not make."""

    request: RouterRequest
    engine: str
    num_cached: int | None = None
    """Prompt tokens that the engine found; None before it has admitted the request."""
    has_first_token: bool = False


class Admission(msgspec.Struct, tag="admit", frozen=True):
    """An engine has admitted a request."""

    request_id: str
    num_cached: int


class FirstToken(msgspec.Struct, tag="first", frozen=True):
    """The prefill of a request is complete."""

    request_id: str


class End(msgspec.Struct, tag="end", frozen=True):
    """A request has ended, is not wanted any more, or was sent by a decision of its frontend."""

    request_id: str
    output_ids: TokenIds = []


class OpenLease(msgspec.Struct, tag="lease", frozen=True):
    """A request wants part of its tenant's quotas; the answer is LeaseOpened or LeaseRefused."""

    number: int
    tenant: str
    quotas: Quotas
    num_requests: int
    num_prompt_tokens: int


class RestoreLease(msgspec.Struct, tag="restore_lease", frozen=True):
    """A request that was accepted before has not ended."""

    number: int
    tenant: str
    quotas: Quotas
    num_requests: int


class UsedQuota(msgspec.Struct, tag="used", frozen=True):
    """What requests of a tenant have used at a frontend lately."""

    tenant: str
    quotas: Quotas
    num_requests: float
    num_tokens: float


class ChargeLease(msgspec.Struct, tag="charge", frozen=True):
    """A request has used tokens; a negative number is given back."""

    number: int
    num_tokens: int


class CloseLease(msgspec.Struct, tag="close_lease", frozen=True):
    """A request has ended."""

    number: int


LeaseItem = OpenLease | RestoreLease | UsedQuota | ChargeLease | CloseLease
FromFrontend = (
    EngineFound
    | EngineGone
    | EngineStepped
    | EngineIdled
    | Arrive
    | Restore
    | Admission
    | FirstToken
    | End
    | LeaseItem
)


class Told(msgspec.Struct, tag="told", frozen=True):
    """What happened at a frontend, in order."""

    number: int
    items: Annotated[list[FromFrontend], msgspec.Meta(max_length=MAX_ITEMS)] = []


class SendTo(msgspec.Struct, tag="send", frozen=True):
    """Send a request to an engine now."""

    request_id: str
    engine: str
    reason: Reason
    waited_s: float
    num_cached: int
    predicted_ttft_s: float = 0.0


class RefuseLate(msgspec.Struct, tag="late", frozen=True):
    """No engine is expected to meet the targets of a request."""

    request_id: str
    message: str
    retry_after_s: float


class ReportSteps(msgspec.Struct, tag="report", frozen=True):
    """The engines whose steps this frontend tells; other frontends tell those of the others."""

    engines: Names


class FrontendsShown(msgspec.Struct, tag="frontends", frozen=True):
    """All frontends of the router, for people."""

    frontends: Annotated[list[FrontendLoad], msgspec.Meta(max_length=MAX_FRONTENDS)]


class LeaseOpened(msgspec.Struct, tag="lease_opened", frozen=True):
    """A request is within the quotas of its tenant."""

    number: int


class LeaseRefused(msgspec.Struct, tag="lease_refused", frozen=True):
    """A request is over a quota of its tenant."""

    number: int
    message: str
    retry_after_s: int
    quota: str


ToFrontend = SendTo | RefuseLate | ReportSteps | FrontendsShown | LeaseOpened | LeaseRefused


class Decided(msgspec.Struct, tag="decided", frozen=True):
    """Decisions of the router, which has heard all up to a message."""

    heard: int
    items: Annotated[list[ToFrontend], msgspec.Meta(max_length=MAX_ITEMS)] = []


FrontendFrame = Join | Told
RouterFrame = Decided | Closed

encode = msgspec.msgpack.Encoder().encode
_told = msgspec.msgpack.Decoder(Told)
_join = msgspec.msgpack.Decoder(Join)
_router_frame = msgspec.msgpack.Decoder(RouterFrame)


def decode_join(frame: bytes) -> Join:
    """Return the first message of a frontend; raise WireError if it is not one."""
    if len(frame) > MAX_JOIN_BYTES:
        raise WireError(f"a Join of {len(frame)} bytes")
    return decode_message(_join, frame)


def decode_told(frame: bytes) -> Told:
    """Return a later message of a frontend, checked; raise WireError if it is not one."""
    told = decode_message(_told, frame)
    try:
        for item in told.items:
            _check_item(item)
    except InvalidRequestError as error:
        raise WireError(str(error)) from error
    return told


def decode_router_frame(frame: bytes) -> RouterFrame:
    """Return a message of a router; raise WireError if it is not one."""
    message = decode_message(_router_frame, frame)
    for item in message.items if isinstance(message, Decided) else ():
        seconds = getattr(item, "retry_after_s", 0.0) + getattr(item, "waited_s", 0.0)
        seconds += getattr(item, "predicted_ttft_s", 0.0)
        if not 0.0 <= seconds <= MAX_AGE_S:
            raise WireError("a decision is not valid")
    return message


def encode_told(told: Told) -> bytes:
    """Return the frame of a message to a router; raise WireError if no router would read it."""
    frame = encode(told)
    if len(frame) > MAX_COMMAND_BYTES:
        raise WireError(f"a message of {len(frame)} bytes; a router reads {MAX_COMMAND_BYTES}")
    return frame


def _check_item(item: FromFrontend) -> None:
    match item:
        case Arrive() | Restore():
            _check_request(item.request)
            for name in (item.only or ()) if isinstance(item, Arrive) else (item.engine,):
                check_name(name)
        case Admission() | FirstToken() | End():
            check_id(item.request_id)
        case EngineFound():
            check_name(item.name)
            facts = (item.num_blocks, item.block_size, item.max_num_seqs)
            if not all(0 < fact < _MAX_INT for fact in facts):
                raise InvalidRequestError("the facts of an engine are impossible")
        case EngineStepped():
            check_name(item.name)
            _check_step(item.stepped)
        case EngineGone() | EngineIdled():
            check_name(item.name)
        case OpenLease() | RestoreLease() | UsedQuota():
            check_name(item.tenant)
            _check_quotas(item)
        case ChargeLease() | CloseLease():
            pass


def _check_request(request: RouterRequest) -> None:
    check_id(request.id)
    check_terms(request.terms)
    is_valid = (
        len(request.token_ids) > 0
        and "#" not in request.id
        and 0 < request.max_tokens < _MAX_INT
        and 0 < request.num_samples <= MAX_SAMPLES
        and abs(request.priority) <= MAX_PRIORITY
        and isfinite(request.age_s)
        and 0.0 <= request.age_s <= MAX_AGE_S
    )
    # The hash of a block takes 8 bytes of each token.
    if not is_valid or not all(0 <= one < _MAX_INT for one in request.token_ids):
        raise InvalidRequestError("a request is not valid")


def _check_quotas(item: OpenLease | RestoreLease | UsedQuota) -> None:
    quotas = item.quotas
    limits = quotas.requests_per_minute, quotas.tokens_per_minute, quotas.concurrent_requests
    amounts = [item.num_requests]
    if isinstance(item, OpenLease):
        amounts.append(item.num_prompt_tokens)
    elif isinstance(item, UsedQuota):
        amounts.append(item.num_tokens)
    is_valid = all(limit is None or 0 < limit < 2**53 for limit in limits)
    # What was used may be in debt: the output of a request is not known before.
    if not is_valid or not all(-1.0 <= amount < 2**53 for amount in amounts):
        raise InvalidRequestError("a quota is not valid")


def _check_step(stepped: Stepped) -> None:
    counts = (
        stepped.num_tokens,
        stepped.token_budget,
        stepped.num_scheduled,
        stepped.num_running,
        stepped.num_waiting,
        stepped.num_blocks_used,
    )
    seconds = [stepped.elapsed_s]
    if stepped.forecast is not None:
        cost = stepped.forecast.speed.cost
        seconds += [cost.constant_s, cost.per_decode_s, cost.per_prefill_token_s]
        seconds += [cost.per_context_token_s, cost.per_attended_s]
    is_valid = all(0 <= one < _MAX_INT for one in counts)
    if not is_valid or not all(isfinite(one) and 0.0 <= one < _MAX_INT for one in seconds):
        raise InvalidRequestError("a step is not valid")
