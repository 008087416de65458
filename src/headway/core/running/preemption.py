"""Preemption: free blocks and seats for stronger requests by preempting weaker ones.

Two occasions: a running request needs one more block and none is free, or its tenant is at its KV
quota; and a waiting request has a strictly stronger claim than running ones.
headway.core.running.victim chooses the victims, headway.core.running.running_set preempts them.
Blocks that preempted requests keep (headway.core.kv.offload) are freed before another running
request is preempted.
"""

from __future__ import annotations

from headway.core.causes import WaitCause
from headway.core.kv.cache import KVCache
from headway.core.request import Request, RequestState
from headway.core.running.admission import Wait
from headway.core.running.headroom import Headroom
from headway.core.running.running_set import RunningSet
from headway.core.running.victim import (
    VictimRules,
    choose_tenant_victim,
    choose_victim,
    choose_victims,
)

RUNNING = RequestState.RUNNING


class Preemption:
    """Frees blocks and seats for requests, by preemption if need be."""

    def __init__(
        self, kv: KVCache, running_set: RunningSet, rules: VictimRules, headroom: Headroom
    ) -> None:
        self._kv = kv
        self._running_set = running_set
        self._offload = running_set.offload
        self._rules = rules
        self._headroom = headroom
        self._grown: list[Request] = []
        self.cause: WaitCause | None = None
        """Cause of the last preemption in this pass; None without one."""

    def begin_pass(self) -> None:
        self.cause = None
        self._headroom.decay()

    def track_growth(self, request: Request) -> None:
        """Note that a request's next tokens may need another block."""
        self._grown.append(request)

    def find_growing(self) -> list[Request]:
        """Return the running requests that need another block now."""
        noted = dict.fromkeys(self._grown)
        return [one for one in noted if one.state is RUNNING and self._kv.num_missing(one)]

    def grow_tables(self, now: float) -> None:
        """Allocate blocks for new tokens.

        This comes before any request is put into the plan, so a victim never is in it.
        """
        self._grown = growing = self.find_growing()
        num_missing = sum(map(self._kv.num_missing, growing))
        has_shares = any(one.terms.max_kv_share < 1.0 for one in growing)
        if has_shares or num_missing > self._kv.pool.num_free:
            # Strongest first: a request must not get a block and then be preempted for another.
            growing.sort(key=self._rules.eviction_key)
        for request in growing:
            self._grow_table(request, now)

    def preempt_for(
        self, request: Request, wait: Wait, preemptible: list[Request], now: float
    ) -> bool:
        """Preempt weaker requests for a waiting one; False if that would not make it fit."""
        keeping = self._reclaimable_from(request)
        victims = choose_victims(request, wait, preemptible, keeping, self._kv, self._rules)
        if not victims:
            return False
        num_free = self._kv.pool.num_free
        for victim in victims:
            self._running_set.preempt(victim, now)
        # Blocks without computed tokens were freed by the preemptions themselves.
        num_blocks = wait.num_blocks - (self._kv.pool.num_free - num_free)
        pinned = frozenset(wait.match.block_ids)
        self._offload.free_blocks(num_blocks, [*keeping, *victims], pinned)
        for victim in victims:
            is_own = victim.terms.tenant == request.terms.tenant
            cause = wait.cause
            if cause is WaitCause.KV_QUOTA and not is_own:
                cause = WaitCause.RUNNING_LIMIT if wait.num_seqs else WaitCause.KV_BLOCKS
            self._record_preemption(victim, request, cause, now)
        return True

    def free_kept_blocks_for(self, request: Request, wait: Wait) -> bool:
        """Free kept blocks of preempted requests for a waiting one; False if too few."""
        if wait.cause is not WaitCause.KV_BLOCKS:
            return False
        pinned = frozenset(wait.match.block_ids)
        return self._offload.free_blocks(wait.num_blocks, self._reclaimable_from(request), pinned)

    def _reclaimable_from(self, requester: Request) -> list[Request]:
        """Return the preempted requests whose kept blocks the claimant may take, weakest first.

        These are the weaker ones. The strongest running request, or any claimant if none runs,
        may take from all of them, so that some request always makes progress.
        """
        running, eviction_key = self._running_set.running, self._rules.eviction_key
        keeping = [one for one in self._offload.preempted_with_blocks if one is not requester]
        if keeping and running and requester is not min(running, key=eviction_key):
            limit = eviction_key(requester)
            keeping = [one for one in keeping if eviction_key(one) > limit]
        return sorted(keeping, key=eviction_key, reverse=True)

    def _grow_table(self, request: Request, now: float) -> None:
        """Allocate the missing blocks of a request, by preemption if need be.

        The request may itself be the victim. Without a victim it skips this step.
        """
        kv, running = self._kv, self._running_set.running
        while request.state is RUNNING and kv.num_missing(request):
            if kv.is_at_kv_quota(request):
                victim = choose_tenant_victim(request, running, kv, self._rules)
                cause = WaitCause.KV_QUOTA
            elif kv.pool.num_free > 0:
                self._running_set.extend(request, now)
                continue
            elif self._offload.free_blocks(1, self._reclaimable_from(request)):
                continue
            else:
                victim = choose_victim(request, running, kv, self._rules)
                cause = WaitCause.KV_BLOCKS
            if victim is None:
                return
            self._running_set.preempt(victim, now)
            if cause is WaitCause.KV_BLOCKS:
                self._headroom.widen()
                if victim is not request and not kv.pool.num_free:
                    self._offload.free_blocks(1, [victim])
            self._record_preemption(victim, request, cause, now)

    def _record_preemption(
        self, victim: Request, by: Request, cause: WaitCause, now: float
    ) -> None:
        # A preemption within a tenant's quota frees no block for others.
        if cause is not WaitCause.KV_QUOTA:
            self.cause = cause
        self._running_set.emit_preempted(victim, by, cause, now)
