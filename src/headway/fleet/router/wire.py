"""The frames between frontends and a router, and their bounds.

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
from headway.errors import InvalidRequestError, WireError
from headway.fleet.network.checks import check_id, check_name, check_terms
from headway.fleet.network.wire import MAX_COMMAND_BYTES, Closed, decode_message
from headway.fleet.router.messages import (
    MAX_AGE_S,
    MAX_PRIORITY,
    Admission,
    Arrive,
    ChargeLease,
    CloseLease,
    End,
    EngineFound,
    EngineGone,
    EngineIdled,
    EngineStepped,
    FirstToken,
    FromFrontend,
    OpenLease,
    Restore,
    RestoreLease,
    RouterRequest,
    ToFrontend,
    UsedQuota,
)

ROUTER_VERSION = 3
MAX_JOIN_BYTES = 4096
MAX_ITEMS = 16_384
MAX_FRAME_TOKENS = 2**20
"""Prompt tokens of one message, unless a single request has more."""
_MAX_INT = 2**31


class Join(msgspec.Struct, tag="join", frozen=True, forbid_unknown_fields=True):
    """The first message of a frontend."""

    version: int
    frontend: str
    instance: str
    """Random id of the frontend process: its earlier connection, if any, is over."""


class Told(msgspec.Struct, tag="told", frozen=True):
    """What happened at a frontend, in order."""

    number: int
    items: Annotated[list[FromFrontend], msgspec.Meta(max_length=MAX_ITEMS)] = []


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
