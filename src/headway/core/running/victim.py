"""Whom to preempt. Pure choices over the running requests; the scheduler carries them out.

A request that has been preempted `max_preemptions` times is immune; admission gave it room for its
whole output, so it cannot block anyone for ever.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.core.kv.cache import KVCache
from headway.core.request import Request
from headway.core.running.admission import Wait
from headway.core.waiting.sort_key import EvictionKey, SortKey


@dataclass(frozen=True, slots=True)
class VictimRules:
    """What the choice goes by."""

    eviction_key: Callable[[Request], EvictionKey]
    """The greatest is the first to go."""
    max_preemptions: int

    def is_preemptible(self, request: Request) -> bool:
        return request.num_preemptions < self.max_preemptions


def choose_victim(
    requester: Request, running: Sequence[Request], kv: KVCache, rules: VictimRules
) -> Request | None:
    """The request to preempt so that `requester`, itself running, can have one more block.

    The weakest goes first, down to the claimant itself. A preemption that frees no usable block
    does not happen. The strongest of all is never a victim, not even its own.
    """
    strongest_first = sorted(running, key=rules.eviction_key)
    for request in reversed(strongest_first[1:]):
        if rules.is_preemptible(request) and kv.num_freeable([request]) > 0:
            return request
        if request is requester:
            return None
    return None


def choose_tenant_victim(
    requester: Request, running: Sequence[Request], kv: KVCache, rules: VictimRules
) -> Request | None:
    """The same among the requests of the claimant's tenant, if it may not hold more blocks."""
    tenant = requester.terms.tenant
    own = sorted((one for one in running if one.terms.tenant == tenant), key=rules.eviction_key)
    for request in reversed(own[1:]):
        if rules.is_preemptible(request) and kv.num_released_blocks([request]) > 0:
            return request
        if request is requester:
            return None
    return None


def choose_victims(
    requester: Request,
    wait: Wait,
    preemptible: Sequence[Request],
    keeping: Sequence[Request],
    kv: KVCache,
    rules: VictimRules,
) -> Sequence[Request]:
    """Those of `preemptible`, weakest first, whose leaving ends the claimant's `wait`; none if all
    together would not: a preemption without a gain only throws work away. The kept blocks of the
    preempted requests `keeping` count as available."""
    tenant = requester.terms.tenant
    # Blocks the claimant matched stay in use when a victim lets go of them.
    pinned = frozenset(wait.match.block_ids)

    def is_enough(victims: Sequence[Request]) -> bool:
        if sum([request.params.n for request in victims]) < wait.num_seqs:
            return False
        if kv.num_freeable([*victims, *keeping], pinned) < wait.num_blocks:
            return False
        own = [request for request in victims if request.terms.tenant == tenant]
        return (
            wait.num_quota_blocks == 0
            or kv.num_released_blocks(own, pinned) >= wait.num_quota_blocks
        )

    candidates = sorted(
        filter(rules.is_preemptible, preemptible), key=rules.eviction_key, reverse=True
    )
    if not is_enough(candidates):
        return ()
    counts = range(len(candidates))
    num_needed = bisect_left(counts, True, key=lambda num: is_enough(candidates[:num]))
    victims = candidates[:num_needed]
    # A weak request that holds little may have been passed on the way to one that holds enough.
    for request in reversed(victims):
        others = [other for other in victims if other is not request]
        if is_enough(others):
            victims = others
    return victims


def find_preemptible(
    key: SortKey, running: Sequence[Request], effective_key: Callable[[Request], SortKey]
) -> list[Request]:
    """Return the running requests that a request with this key may preempt.

    Those of higher rank, and those of its tenant and rank with a higher priority number.
    """
    start = bisect_right(running, key.rank, key=lambda request: effective_key(request).rank)
    own = [request for request in running[:start] if request.terms.tenant == key.tenant]

    def has_lower_priority(request: Request) -> bool:
        other = effective_key(request)
        return other.rank == key.rank and key.tenant_priority < other.tenant_priority

    return [*filter(has_lower_priority, own), *running[start:]]
