"""What frontends and a router tell each other.

Each is a msgspec Struct; on PyPy, where there is no msgspec, a dataclass with the same fields, so
that the simulator runs there. wire.py sends them.
"""

from __future__ import annotations

from typing import Annotated

from headway.core.events import Stepped
from headway.core.terms import NO_TERMS, Terms
from headway.fleet.router.structs import Meta, Struct
from headway.routing import FrontendLoad, Reason
from headway.tenancy import Quotas

MAX_FRONTENDS = 64
MAX_ASKED = 4096
"""Requests of one frontend that wait in the router."""
MAX_ASKED_TOKENS = 8 * 1024**2
MAX_TOKENS = 2**24
_MAX_ENGINES = 1024
MAX_AGE_S = 7 * 86400.0
MAX_PRIORITY = 2**31 - 1
Names = Annotated[list[str], Meta(max_length=_MAX_ENGINES)]
TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKENS)]


class EngineFound(Struct, tag="engine", frozen=True):
    """The frontend can use an engine."""

    name: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    has_prefix_cache: bool


class EngineGone(Struct, tag="gone", frozen=True):
    """The frontend cannot use an engine; what it had there is lost, or runs on if it drains."""

    name: str
    is_draining: bool = False


class EngineStepped(Struct, tag="stepped", frozen=True):
    """A step of an engine has ended."""

    name: str
    stepped: Stepped


class EngineIdled(Struct, tag="idled", frozen=True):
    """No request is left in an engine."""

    name: str
    num_blocks_used: int


class RouterRequest(Struct, frozen=True, omit_defaults=True):
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


class Arrive(Struct, tag="arrive", frozen=True, omit_defaults=True):
    """A request wants an engine; the answer is SendTo or RefuseLate, at any time."""

    request: RouterRequest
    is_resent: bool = False
    only: Names | None = None
    """Engines that may have the request; None for all of the frontend."""


class Restore(Struct, tag="restore", frozen=True, omit_defaults=True):
    """A request is in an engine, by a decision that this router did not make."""

    request: RouterRequest
    engine: str
    num_cached: int | None = None
    """Prompt tokens that the engine found; None before it has admitted the request."""
    has_first_token: bool = False


class Admission(Struct, tag="admit", frozen=True):
    """An engine has admitted a request."""

    request_id: str
    num_cached: int


class FirstToken(Struct, tag="first", frozen=True):
    """The prefill of a request is complete."""

    request_id: str


class End(Struct, tag="end", frozen=True):
    """A request has ended, is not wanted any more, or was sent by a decision of its frontend."""

    request_id: str
    output_ids: TokenIds


class OpenLease(Struct, tag="lease", frozen=True):
    """A request wants part of its tenant's quotas; the answer is LeaseOpened or LeaseRefused."""

    number: int
    tenant: str
    quotas: Quotas
    num_requests: int
    num_prompt_tokens: int


class RestoreLease(Struct, tag="restore_lease", frozen=True):
    """A request that was accepted before has not ended."""

    number: int
    tenant: str
    quotas: Quotas
    num_requests: int


class UsedQuota(Struct, tag="used", frozen=True):
    """What requests of a tenant have used at a frontend lately."""

    tenant: str
    quotas: Quotas
    num_requests: float
    num_tokens: float


class ChargeLease(Struct, tag="charge", frozen=True):
    """A request has used tokens; a negative number is given back."""

    number: int
    num_tokens: int


class CloseLease(Struct, tag="close_lease", frozen=True):
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


class SendTo(Struct, tag="send", frozen=True):
    """Send a request to an engine now."""

    request_id: str
    engine: str
    reason: Reason
    waited_s: float
    num_cached: int
    predicted_ttft_s: float = 0.0


class RefuseLate(Struct, tag="late", frozen=True):
    """No engine is expected to meet the targets of a request."""

    request_id: str
    message: str
    retry_after_s: float


class ReportSteps(Struct, tag="report", frozen=True):
    """The engines whose steps this frontend tells; other frontends tell those of the others."""

    engines: Names


class FrontendsShown(Struct, tag="frontends", frozen=True):
    """All frontends of the router, for people."""

    frontends: Annotated[list[FrontendLoad], Meta(max_length=MAX_FRONTENDS)]


class LeaseOpened(Struct, tag="lease_opened", frozen=True):
    """A request is within the quotas of its tenant."""

    number: int


class LeaseRefused(Struct, tag="lease_refused", frozen=True):
    """A request is over a quota of its tenant."""

    number: int
    message: str
    retry_after_s: int
    quota: str


ToFrontend = SendTo | RefuseLate | ReportSteps | FrontendsShown | LeaseOpened | LeaseRefused
