"""Preemption: free blocks and sequences for one request by preempting others.

The requester is a running request that needs a block when none is free or its tenant is at its KV
quota, or a waiting request that goes before running requests. headway.core.running.victim chooses
the victims and headway.core.running.running_set preempts them. Kept blocks of preempted requests
(headway.core.kv.offload) are freed before a running request is preempted.
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
    """Frees blocks and sequences for requests, by preemption if necessary."""

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
        """Cause of the last preemption in this pass; None without a preemption."""

    def begin_pass(self) -> None:
        """Start a scheduling pass: forget the last cause, narrow the headroom."""
        self.cause = None
        self._headroom.decay()

    def track_growth(self, request: Request) -> None:
        """Record that the next tokens of a request may need another block."""
        self._grown.append(request)

    def find_growing(self) -> list[Request]:
        """Return the running requests that need another block now."""
        requests = dict.fromkeys(self._grown)
        return [one for one in requests if one.state is RUNNING and self._kv.num_missing(one)]

    def grow_tables(self, now: float) -> None:
        """Allocate blocks for new tokens of running requests.

        Called before any request is scheduled, so that a victim is never in the plan.
        """
        if not self._grown:
            return
        self._grown = growing = self.find_growing()
        num_missing = sum(map(self._kv.num_missing, growing))
        has_quotas = any(request.terms.max_kv_share < 1.0 for request in growing)
        if has_quotas or num_missing > self._kv.pool.num_free:
            # Lowest eviction key first: a request must not get a block and then be preempted.
            growing.sort(key=self._rules.eviction_key)
        for request in growing:
            self._grow_table(request, now)

    def preempt_for(
        self, request: Request, wait: Wait, preemptible: list[Request], now: float
    ) -> bool:
        """Preempt running requests for a waiting one; return False if that is not enough."""
        preempted = self._reclaimable_from(request)
        victims = choose_victims(request, wait, preemptible, preempted, self._kv, self._rules)
        if not victims:
            return False
        num_free_before = self._kv.pool.num_free
        for victim in victims:
            self._running_set.preempt(victim, now)
        # A preemption frees the blocks without computed tokens at once.
        num_blocks = wait.num_blocks - (self._kv.pool.num_free - num_free_before)
        pinned = frozenset(wait.match.block_ids)
        self._offload.free_blocks(num_blocks, [*preempted, *victims], pinned)
        for victim in victims:
            is_same_tenant = victim.terms.tenant == request.terms.tenant
            cause = wait.cause
            if cause is WaitCause.KV_QUOTA and not is_same_tenant:
                cause = WaitCause.RUNNING_LIMIT if wait.num_seqs else WaitCause.KV_BLOCKS
            self._record_preemption(victim, request, cause, now)
        return True

    def free_kept_blocks_for(self, request: Request, wait: Wait) -> bool:
        """Free kept blocks for a waiting request; return False if there are too few."""
        if wait.cause is not WaitCause.KV_BLOCKS:
            return False
        pinned = frozenset(wait.match.block_ids)
        return self._offload.free_blocks(wait.num_blocks, self._reclaimable_from(request), pinned)

    def _reclaimable_from(self, requester: Request) -> list[Request]:
        """Return preempted requests whose kept blocks may be freed, highest eviction key first.

        Their eviction keys are higher than that of the requester. The running request with the
        lowest key, or any requester if no request runs, may free the kept blocks of all, so that
        at least one request makes progress.
        """
        running, eviction_key = self._running_set.running, self._rules.eviction_key
        preempted = [one for one in self._offload.preempted_with_blocks if one is not requester]
        if preempted and running and requester is not min(running, key=eviction_key):
            key = eviction_key(requester)
            preempted = [one for one in preempted if eviction_key(one) > key]
        return sorted(preempted, key=eviction_key, reverse=True)

    def _grow_table(self, request: Request, now: float) -> None:
        """Allocate the missing blocks of a request, by preemption if necessary.

        The request may itself be the victim. Without a victim the request skips this step.
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
        # A preemption for a KV quota frees no block for other tenants.
        if cause is not WaitCause.KV_QUOTA:
            self.cause = cause
        self._running_set.emit_preempted(victim, by, cause, now)
