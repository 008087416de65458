"""Victim choice: which running requests to preempt.

Pure functions over the running requests; the running set applies the choice. A request that was
preempted `max_preemptions` times is immune. Admission gave an immune request room for its whole
output, so it cannot block other requests forever. No spot request is immune to an ordinary one, or
immune spot requests could fill the machine.
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
    """The eviction key, the limit of preemptions per request, and which requests are spot."""

    eviction_key: Callable[[Request], EvictionKey]
    """Key of a running request; the highest is preempted first."""
    max_preemptions: int
    is_spot: Callable[[Request], bool] = lambda request: False

    def is_preemptible(self, request: Request, requester: Request) -> bool:
        if request.num_preemptions < self.max_preemptions:
            return True
        return self.is_spot(request) and not self.is_spot(requester)


def choose_victim(
    requester: Request, running: Sequence[Request], kv: KVCache, rules: VictimRules
) -> Request | None:
    """Return the victim that frees a block for `requester`, which is running.

    Candidates are tried from the highest eviction key down to the requester. A request whose
    preemption frees no block is not chosen. The request with the lowest key is never a victim.
    """
    by_key = sorted(running, key=rules.eviction_key)
    for request in reversed(by_key[1:]):
        if rules.is_preemptible(request, requester) and kv.num_freeable([request]) > 0:
            return request
        if request is requester:
            return None
    return None


def choose_tenant_victim(
    requester: Request, running: Sequence[Request], kv: KVCache, rules: VictimRules
) -> Request | None:
    """Return the victim among requests of a tenant that is at its KV quota.

    The rules are those of `choose_victim`, applied to the tenant of the requester.
    """
    tenant = requester.terms.tenant
    of_tenant = [request for request in running if request.terms.tenant == tenant]
    by_key = sorted(of_tenant, key=rules.eviction_key)
    for request in reversed(by_key[1:]):
        if rules.is_preemptible(request, requester) and kv.num_released_blocks([request]) > 0:
            return request
        if request is requester:
            return None
    return None


def choose_victims(
    requester: Request,
    wait: Wait,
    preemptible: Sequence[Request],
    preempted: Sequence[Request],
    kv: KVCache,
    rules: VictimRules,
) -> Sequence[Request]:
    """Return the victims, highest eviction key first, that make the requester fit.

    Return none if preempting all of `preemptible` is not enough: the preemptions would only lose
    work. Kept blocks of the `preempted` requests count as available.
    """
    tenant = requester.terms.tenant
    # Blocks that the requester matched stay in use when a victim frees them.
    pinned = frozenset(wait.match.block_ids)

    def is_enough(victims: Sequence[Request]) -> bool:
        if sum([request.params.n for request in victims]) < wait.num_seqs:
            return False
        if kv.num_freeable([*victims, *preempted], pinned) < wait.num_blocks:
            return False
        of_tenant = [request for request in victims if request.terms.tenant == tenant]
        return (
            wait.num_quota_blocks == 0
            or kv.num_released_blocks(of_tenant, pinned) >= wait.num_quota_blocks
        )

    candidates = [one for one in preemptible if rules.is_preemptible(one, requester)]
    candidates.sort(key=rules.eviction_key, reverse=True)
    if not is_enough(candidates):
        return ()
    counts = range(len(candidates))
    num_needed = bisect_left(counts, True, key=lambda num: is_enough(candidates[:num]))
    victims = candidates[:num_needed]
    # A victim with few blocks is not needed if a later victim frees enough.
    for request in reversed(victims):
        others = [other for other in victims if other is not request]
        if is_enough(others):
            victims = others
    return victims


def find_preemptible(
    key: SortKey, running: Sequence[Request], effective_key: Callable[[Request], SortKey]
) -> list[Request]:
    """Return the running requests that a request with this key may preempt.

    These are requests of higher rank, and requests of the same tenant and rank with a higher
    priority number.
    """
    start = bisect_right(running, key.rank, key=lambda request: effective_key(request).rank)
    of_tenant = [request for request in running[:start] if request.terms.tenant == key.tenant]

    def has_lower_priority(request: Request) -> bool:
        other = effective_key(request)
        return other.rank == key.rank and key.tenant_priority < other.tenant_priority

    return [*filter(has_lower_priority, of_tenant), *running[start:]]
