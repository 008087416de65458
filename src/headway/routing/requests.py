"""One request in the router, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from headway.core.kv.prefix import BlockHash, extend_chain
from headway.core.request import Request

if TYPE_CHECKING:
    from headway.routing.engines import RoutedEngine


MAX_PASSES = 2
"""Steps within which an engine admits a request that it can begin: the one that runs, and the
next."""


class Reason(StrEnum):
    """Why a request went to its engine."""

    PREFIX = "prefix"
    """No other engine that was looked at has more of its prompt."""
    LOAD = "load"
    """No engine has the prompt, or one with less of it answers earlier."""
    MOVED = "moved"
    """Another engine became clearly better while the request waited."""
    FAILOVER = "failover"
    """The request lost its engine."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request with its engine and what it is expected to cost there."""

    request: Request
    arrived_at: float
    is_resent: bool = False
    """Whether an engine that was lost had the request: its tenant has paid for it."""
    engine: RoutedEngine | None = None
    reason: Reason = Reason.LOAD
    predicted_ttft_s: float = 0.0
    """Time from arrival to the first token, as predicted at the last assignment."""
    num_cached: int = 0
    """Prompt tokens that the engine is expected to have cached, or has found at admission."""
    num_left: int = 0
    """Prompt tokens that the engine has yet to compute."""
    work_s: float = 0.0
    """Seconds of prefill in the engine, by its cost at assignment or admission."""
    order: int = 0
    """Number of the assignment; the prefixes of the engine are noted under it."""
    known_orders: list[int] = field(default_factory=list)
    """Orders under which the cached blocks were noted before, the first block first."""
    queued_before_s: float = 0.0
    """Seconds of work that the engine's queue had ever taken, before this request."""
    is_sent: bool = False
    is_admitted: bool = False
    num_passes: int = 0
    """Steps that the engine has ended since the request was sent, without admitting it."""
    has_first_token: bool = False
    charged_s: float = 0.0
    _hashes: dict[int, list[BlockHash]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_uncached(self) -> int:
        return self.request.num_tokens - self.num_cached

    @property
    def is_stuck(self) -> bool:
        """Whether the engine has had the chance to admit the request and has not."""
        return not self.is_admitted and self.num_passes > MAX_PASSES

    @property
    def num_seqs(self) -> int:
        return self.request.params.n

    def hashes(self, block_size: int) -> list[BlockHash]:
        """Return the hashes of the full blocks of the tokens known."""
        chain = self._hashes.setdefault(block_size, [])
        request = self.request
        extend_chain(chain, request.token_ids, block_size, request.terms.prefix_salt)
        return chain

    def matchable(self, block_size: int) -> list[BlockHash]:
        """Return the hashes that can be a prefix hit; some tokens are always computed."""
        return self.hashes(block_size)[: self.request.max_cached_tokens // block_size]

    def extended(self, token_ids: list[int], block_size: int) -> list[BlockHash]:
        """Return the hashes of the full blocks of the tokens known and of further output."""
        chain = list(self.hashes(block_size))
        request = self.request
        all_ids = [*request.token_ids, *token_ids]
        extend_chain(chain, all_ids, block_size, request.terms.prefix_salt)
        return chain
