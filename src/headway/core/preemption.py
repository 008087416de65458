"""Blocks and seats that must come from somebody: the seam where a victim is chosen and gives way.

Two occasions: a running request has outgrown its blocks and none is free, or its tenant may not
hold more; and a waiting request has a strictly stronger claim than running ones. Whom it meets is
chosen in headway.core.victim, and headway.core.seats carries it out. Before anybody has to leave,
those that left before give up what they kept (headway.core.holdings).
"""

from __future__ import annotations

from headway.core.admission import Wait
from headway.core.causes import WaitCause
from headway.core.headroom import Headroom
from headway.core.kv import KVCache
from headway.core.request import Request, RequestState
from headway.core.seats import Seats
from headway.core.victim import Rules, choose_own_victim, choose_victim, choose_victims

RUNNING = RequestState.RUNNING


class Preemption:
    """Takes from the weaker what the stronger need."""

    def __init__(self, kv: KVCache, seats: Seats, rules: Rules, headroom: Headroom) -> None:
        self._kv = kv
        self._seats = seats
        self._holdings = seats.holdings
        self._rules = rules
        self._headroom = headroom
        self._outgrown: list[Request] = []
        self.cause: WaitCause | None = None
        """What the last preemption of this pass was for; None if there was none."""

    def begin_pass(self) -> None:
        self.cause = None
        self._headroom.narrow()

    def note_growth(self, request: Request) -> None:
        """Its next tokens may need another block."""
        self._outgrown.append(request)

    def find_growing(self) -> list[Request]:
        """Running requests whose tokens have outgrown their blocks."""
        noted = dict.fromkeys(self._outgrown)
        return [one for one in noted if one.state is RUNNING and self._kv.num_missing(one)]

    def grow(self, now: float) -> None:
        """Blocks for new tokens, before any request is put into the plan: so a victim never is."""
        self._outgrown = growing = self.find_growing()
        num_missing = sum(map(self._kv.num_missing, growing))
        has_shares = any(one.terms.max_kv_share < 1.0 for one in growing)
        if has_shares or num_missing > self._kv.pool.num_free:
            # Those that may take from others go before those that others may take from, so that
            # nobody takes in vain.
            growing.sort(key=self._rules.eviction_key)
        for request in growing:
            self._grow(request, now)

    def make_room(self, request: Request, wait: Wait, weaker: list[Request], now: float) -> bool:
        """For a waiting request that does not fit. False if nobody was asked to leave."""
        keepers = self._keepers(request)
        victims = choose_victims(request, wait, weaker, keepers, self._kv, self._rules)
        if not victims:
            return False
        num_free = self._kv.pool.num_free
        for victim in victims:
            self._seats.preempt(victim, now)
        # Room for tokens that were not computed yet is free at once.
        num_blocks = wait.num_blocks - (self._kv.pool.num_free - num_free)
        spared = frozenset(wait.match.block_ids)
        self._holdings.squeeze(num_blocks, [*keepers, *victims], spared)
        for victim in victims:
            is_own = victim.terms.tenant == request.terms.tenant
            cause = wait.cause
            if cause is WaitCause.KV_QUOTA and not is_own:
                cause = WaitCause.RUNNING_LIMIT if wait.num_seats else WaitCause.KV_BLOCKS
            self._tell_of(victim, request, cause, now)
        return True

    def squeeze_for(self, request: Request, wait: Wait) -> bool:
        """Blocks for a waiting request from those preempted before it, if they have enough."""
        if wait.cause is not WaitCause.KV_BLOCKS:
            return False
        spared = frozenset(wait.match.block_ids)
        return self._holdings.squeeze(wait.num_blocks, self._keepers(request), spared)

    def _keepers(self, claimant: Request) -> list[Request]:
        """The preempted requests whose blocks the claimant may take: the weaker ones, weakest
        first. The strongest that runs, or anybody if nobody runs, may take from all: so somebody
        always goes on."""
        running, eviction_key = self._seats.running, self._rules.eviction_key
        keepers = [one for one in self._holdings.keepers if one is not claimant]
        if keepers and running and claimant is not min(running, key=eviction_key):
            limit = eviction_key(claimant)
            keepers = [one for one in keepers if eviction_key(one) > limit]
        return sorted(keepers, key=eviction_key, reverse=True)

    def _grow(self, request: Request, now: float) -> None:
        """By preempting if it must. If it finds no victim it sits this step out, unless it was
        itself the one to go."""
        kv, running = self._kv, self._seats.running
        while request.state is RUNNING and kv.num_missing(request):
            if kv.is_at_share(request):
                victim = choose_own_victim(request, running, kv, self._rules)
                cause = WaitCause.KV_QUOTA
            elif kv.pool.num_free > 0:
                self._seats.extend(request, now)
                continue
            elif self._holdings.squeeze(1, self._keepers(request)):
                continue
            else:
                victim = choose_victim(request, running, kv, self._rules)
                cause = WaitCause.KV_BLOCKS
            if victim is None:
                return
            self._seats.preempt(victim, now)
            if cause is WaitCause.KV_BLOCKS:
                self._headroom.widen()
                if victim is not request and not kv.pool.num_free:
                    self._holdings.squeeze(1, [victim])
            self._tell_of(victim, request, cause, now)

    def _tell_of(self, victim: Request, by: Request, cause: WaitCause, now: float) -> None:
        # What a tenant takes from itself concerns nobody else.
        if cause is not WaitCause.KV_QUOTA:
            self.cause = cause
        self._seats.tell_of(victim, by, cause, now)
