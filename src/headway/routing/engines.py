"""One engine as the router sees it: its speed, its requests, and its predicted TTFT.

The router counts what it assigns and sends at once; the reports of the engine correct the rest. So
an engine that sends no reports, because it is idle, is known to be idle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

from headway.core.events import Stepped
from headway.core.slo.forecast import EngineSpeed
from headway.core.slo.steptime import StepCost
from headway.core.waiting.accounts import Accounts
from headway.core.waiting.fair import FairQueue
from headway.routing.requests import RoutedRequest

TYPICAL_PROMPT = 256
"""Prompt tokens of the request by which the load of engines is compared."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of an engine, which its requests may not exceed."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int = 512
    """Tokens of a step, until a report says otherwise."""
    has_prefix_cache: bool = True


class EngineQueue:
    """Requests that are assigned to one engine and not sent, in fair order."""

    def __init__(self, accounts: Accounts) -> None:
        self.requests = FairQueue(accounts)
        self.num_seqs = 0
        self.num_tokens = 0
        self.work_s = 0.0
        self._spot_s = 0.0
        """The part of `work_s` that is of spot requests."""
        self._tenant_s: dict[str, float] = {}
        """Seconds of work by tenant, ordinary requests only."""
        self._weights: dict[str, float] = {}
        self._weight = 0.0
        self._taken_s = 0.0
        self._left_s = 0.0
        """Seconds of work that the queue has taken, and that has left it, since it began."""

    def __len__(self) -> int:
        return len(self.requests)

    def push(self, one: RoutedRequest) -> None:
        one.queued_before_s = self._taken_s
        self._taken_s += one.work_s
        self._count(one, 1)
        self.requests.push(one.request)

    def remove(self, one: RoutedRequest) -> None:
        self.requests.remove(one.request)
        self.count_left(one)

    def count_left(self, one: RoutedRequest) -> None:
        """Count a request that was popped as no longer here."""
        self._left_s += one.work_s
        self._count(one, -1)

    def _count(self, one: RoutedRequest, sign: int) -> None:
        terms = one.request.terms
        self.num_seqs += sign * one.num_seqs
        self.num_tokens += sign * one.num_left
        self.work_s += sign * one.work_s
        if not self.num_seqs:  # without the rounding errors of the sums
            self.work_s = self._spot_s = 0.0
        elif terms.is_spot:
            self._spot_s += sign * one.work_s
        if terms.is_spot:
            return
        tenant = terms.tenant
        self._weight -= self._weights.pop(tenant, 0.0)
        left_s = self._tenant_s.pop(tenant, 0.0) + sign * one.work_s
        if left_s > 1e-12:
            self._tenant_s[tenant] = left_s
            self._weights[tenant] = terms.weight
            self._weight += terms.weight

    def ahead(self, one: RoutedRequest, is_here: bool) -> tuple[float, float, float]:
        """Return the work (seconds, tokens, sequences) that goes before a request here.

        Tenants take turns by weight, so a request waits for its tenant's earlier work and for as
        much of the others; a spot request waits for everything.
        """
        if not self.num_seqs:
            return 0.0, 0.0, 0.0
        terms = one.request.terms
        total_s = self.work_s if terms.is_spot else self.work_s - self._spot_s
        if is_here:
            total_s = min(total_s, one.queued_before_s - self._left_s)
        if total_s <= 0.0:
            return 0.0, 0.0, 0.0
        ahead_s = total_s
        if not terms.is_spot:
            own_s = self._tenant_s.get(terms.tenant, 0.0) + (0.0 if is_here else one.work_s)
            weight = self._weight + (0.0 if terms.tenant in self._weights else terms.weight)
            ahead_s = min(total_s, max(0.0, own_s * weight / terms.weight - one.work_s))
        part = ahead_s / max(self.work_s, 1e-12)
        return ahead_s, part * self.num_tokens, part * self.num_seqs


class RoutedEngine:
    """What the router knows of one engine."""

    def __init__(
        self,
        number: int,
        name: str,
        limits: EngineLimits,
        cost: StepCost,
        accounts: Accounts,
        on_load: Callable[[RoutedEngine], None],
    ) -> None:
        """Start without requests; `on_load` is called when `load_s` has changed."""
        self._on_load = on_load
        self.number = number
        self.name = name
        self.limits = limits
        self.cost = cost
        self.queue = EngineQueue(accounts)
        self.is_draining = False
        self.sent: dict[str, RoutedRequest] = {}
        """Requests that the engine has, in the order in which they were sent."""
        self.prefilling: dict[str, RoutedRequest] = {}
        """Those without a first token."""
        self.num_seqs = 0
        """Sequences of the requests sent."""
        self.num_decodes = 0
        self.num_other_seqs = 0
        """Sequences of other frontends, as of the last report."""
        self._speed: EngineSpeed | None = None
        self._is_stale = True
        """Whether what predictions are made of must be computed anew."""
        self._load_s = 0.0
        self._budget = limits.token_budget
        self._room = 1
        """Prefill tokens of a step, beside the decodes."""
        self._overhead_s = 0.0
        """Seconds of a step without prefill."""
        self._num_prefill_tokens = 0
        self._prefill_s = 0.0
        self._num_context = 0
        """Prompt tokens of the requests that decode."""
        self._num_blocks_used = 0
        self._num_new_blocks = 0
        """Blocks of requests sent and not admitted yet."""
        self._new_blocks: dict[str, int] = {}
        self._step_s = 0.0
        self._stepped_at = 0.0
        self._suspended: set[str] = set()
        """Tenants that are passed over."""
        self.update_load()

    @property
    def num_requests_seqs(self) -> int:
        """Sequences here: sent, assigned, and of other frontends."""
        return self.num_seqs + self.num_other_seqs + self.queue.num_seqs

    @property
    def speed(self) -> float:
        """Seconds of work that the engine does per second."""
        return 1.0 if self._speed is None else self._speed.full_speed

    @property
    def kv_usage(self) -> float:
        """Part of the KV blocks that requests own or will own."""
        return (self._num_blocks_used + self._num_new_blocks) / max(1, self.limits.num_blocks)

    # ------------------------------------------------------------------ changes

    def observe(self, stepped: Stepped, now: float) -> None:
        """Take over the state after a step; call it before the step's other events."""
        if stepped.forecast is not None:
            self._speed = stepped.forecast.speed
            self.cost = self._speed.cost
        self._budget = stepped.token_budget
        self._step_s, self._stepped_at = stepped.elapsed_s, now
        self._num_blocks_used = stepped.num_blocks_used
        if self.prefilling:
            num_decodes = self.num_decodes + self.num_other_seqs
            self._progress(stepped.num_tokens - min(num_decodes, stepped.num_scheduled))
            for one in self.prefilling.values():
                one.num_passes += 1
        num_known = stepped.num_running + stepped.num_waiting
        self.num_other_seqs = max(0, num_known - self.num_seqs)
        self.update_load()

    def idle(self, num_blocks_used: int) -> None:
        """Record that no frontend has requests in the engine."""
        self.num_other_seqs = 0
        self._num_blocks_used = num_blocks_used
        self.update_load()

    def _progress(self, num_tokens: int) -> None:
        """Count prefill tokens of a step, for the requests in the order of sending."""
        for one in self.prefilling.values():
            if num_tokens <= 0:
                return
            num_done = min(num_tokens, one.num_left)
            num_tokens -= num_done
            self._set_left(one, one.num_left - num_done)

    def _set_left(self, one: RoutedRequest, num_left: int) -> None:
        self._prefill_s -= self._left_s(one)
        self._num_prefill_tokens += num_left - one.num_left
        one.num_left = num_left
        self._prefill_s += self._left_s(one)
        if not self._num_prefill_tokens:
            self._prefill_s = 0.0

    def _left_s(self, one: RoutedRequest) -> float:
        """Return the seconds of prefill left, by the cost when the work was last computed."""
        return one.work_s * one.num_left / max(1, one.num_uncached)

    def send(self, one: RoutedRequest) -> None:
        """Count a request as sent."""
        self.sent[one.id] = self.prefilling[one.id] = one
        self.num_seqs += one.num_seqs
        self._num_prefill_tokens += one.num_left
        self._prefill_s += self._left_s(one)
        self._new_blocks[one.id] = num_blocks = self.num_new_blocks(one)
        self._num_new_blocks += num_blocks
        self.update_load()

    def admit(self, one: RoutedRequest, num_cached: int) -> None:
        """Correct the work of a request that the engine has admitted."""
        self._num_new_blocks -= self._new_blocks.pop(one.id, 0)
        if one.id in self.prefilling:
            self._prefill_s -= self._left_s(one)
            self._num_prefill_tokens -= one.num_left
            num_done = one.num_uncached - one.num_left
            one.num_cached, one.work_s = num_cached, self.work_s(one, num_cached)
            one.num_left = max(0, one.num_uncached - num_done)
            self._num_prefill_tokens += one.num_left
            self._prefill_s += self._left_s(one)
        self.update_load()

    def start_decode(self, one: RoutedRequest) -> None:
        """Count a request that has its first token as decoding."""
        if self.prefilling.pop(one.id, None) is not None:
            self._set_left(one, 0)
            one.has_first_token = True
            self.num_decodes += one.num_seqs
            self._num_context += one.num_seqs * one.request.num_tokens
            self.update_load()

    def remove(self, one: RoutedRequest) -> None:
        """Count a request that was sent as ended."""
        del self.sent[one.id]
        self._num_new_blocks -= self._new_blocks.pop(one.id, 0)
        self.num_seqs -= one.num_seqs
        if self.prefilling.pop(one.id, None) is not None:
            self._set_left(one, 0)
        else:
            self.num_decodes -= one.num_seqs
            self._num_context -= one.num_seqs * one.request.num_tokens
        self.update_load()

    def suspend_stuck(self) -> None:
        """Pass over the tenants at their KV quota here, and no others.

        A tenant without a quota is never suspended: it waits for what others hold.
        """
        if not (self.prefilling or self._suspended):
            return
        stuck = {
            one.request.terms.tenant
            for one in self.prefilling.values()
            if one.is_stuck and one.request.terms.max_kv_share < 1.0
        }
        for tenant in self._suspended - stuck:
            self.queue.requests.resume(tenant)
        for tenant in stuck - self._suspended:
            self.queue.requests.suspend(tenant)
        self._suspended = stuck

    def num_new_blocks(self, one: RoutedRequest) -> int:
        """Return the KV blocks that a request adds when it is admitted."""
        return -(-one.num_uncached // self.limits.block_size)

    def update_load(self) -> None:
        """Have what predictions are made of computed anew, when it is asked for."""
        self._is_stale = True
        self._on_load(self)

    def _refresh(self) -> None:
        """Compute what predictions are made of."""
        self._is_stale = False
        cost, num_decodes = self.cost, self.num_decodes + self.num_other_seqs
        self._room = max(self._budget // 4, self._budget - num_decodes, 1)
        self._overhead_s = (
            cost.constant_s
            + cost.per_decode_s * num_decodes
            + cost.per_context_token_s * self._num_context
        )
        num_tokens = self._num_prefill_tokens + self.queue.num_tokens + TYPICAL_PROMPT
        num_steps = 1 + num_tokens // self._room
        self._load_s = (
            num_steps * self._overhead_s
            + self._prefill_s
            + self.queue.work_s
            + cost.per_prefill_token_s * TYPICAL_PROMPT
        )

    # -------------------------------------------------------------- predictions

    @property
    def load_s(self) -> float:
        """Seconds until a typical request would have its first token."""
        if self._is_stale:
            self._refresh()
        return self._load_s

    @property
    def step_s(self) -> float:
        """Seconds of a step like the last, at least of one without prefill."""
        if self._is_stale:
            self._refresh()
        return max(self._step_s, self._overhead_s)

    @property
    def prefill_backlog_s(self) -> float:
        """Seconds of prefill that wait here, sent or not."""
        return self.queue.work_s + self._prefill_s

    def work_s(self, one: RoutedRequest, num_cached: int) -> float:
        """Return the seconds of prefill of a request with so many cached tokens."""
        return self.cost.prefill_s(one.request.num_tokens - num_cached, num_cached)

    def ttft_s(self, one: RoutedRequest, num_cached: int, num_output: float, now: float) -> float:
        """Return the predicted seconds from now to the first token of a request.

        The prefills sent and those that go before it in the queue come first, in steps that the
        decodes take part of. `num_output` is how many tokens requests are expected to have: a
        request that finds every sequence taken waits for others to end.
        """
        if self._is_stale:
            self._refresh()
        ahead_s, ahead_tokens, ahead_seqs = self.queue.ahead(one, one.engine is self)
        num_own = one.request.num_tokens - num_cached
        num_tokens = self._num_prefill_tokens + ahead_tokens + num_own
        overhead_s = self._overhead_s
        seconds = (
            ceil(num_tokens / self._room) * overhead_s
            + self._prefill_s
            + ahead_s
            + self.cost.prefill_s(num_own, num_cached)
        )
        num_busy = self.num_seqs + self.num_other_seqs
        if num_busy:
            seconds += min(self._step_s, max(0.0, self._stepped_at + self._step_s - now))
        num_over = num_busy + ahead_seqs + one.num_seqs - self.limits.max_num_seqs
        if num_over > 0:
            num_decodes = max(1, self.num_decodes + self.num_other_seqs)
            seconds += num_over * num_output * self.step_s / num_decodes
        return seconds

    def num_delayed(self, one: RoutedRequest) -> int:
        """Return how many first tokens one more request delays, each other tenant counted once.

        So a flood of one tenant does not keep the requests of others away. Beside an ordinary
        request spot ones do not count, because they yield; a spot one delays no ordinary ones.
        """
        tenant, is_spot = one.request.terms.tenant, one.request.terms.is_spot
        queued, num_own = self.queue.requests.tenants_beside(one.request)
        sent = [other.request.terms for other in self.prefilling.values()]
        tenants = [terms.tenant for terms in sent if terms.is_spot == is_spot]
        others = {other for other in tenants if other != tenant and other not in queued}
        return tenants.count(tenant) + num_own + len(others) + len(queued) - (tenant in queued)

    def can_begin(self, one: RoutedRequest, num_ahead: int, max_ahead_steps: float) -> bool:
        """Return whether the engine can begin a request within about a step of prefill.

        `num_ahead` are tokens sent that go before it. An engine that has no request of ours takes
        one whatever it last reported.
        """
        if not self.sent:
            return True
        if self._is_stale:
            self._refresh()
        num_seqs = self.num_seqs + self.num_other_seqs + one.num_seqs
        if num_seqs > self.limits.max_num_seqs:
            num_seqs -= sum(other.num_seqs for other in self.prefilling.values() if other.is_stuck)
            if num_seqs > self.limits.max_num_seqs:
                return False
        num_blocks = self._num_blocks_used + self._num_new_blocks + self.num_new_blocks(one)
        if num_blocks > self.limits.num_blocks:
            return False
        return num_ahead < max_ahead_steps * self._room

    def check(self) -> None:
        if self.num_seqs != sum(one.num_seqs for one in self.sent.values()):
            raise AssertionError(f"{self.name} miscounts its sequences")
        if self._num_prefill_tokens != sum(one.num_left for one in self.prefilling.values()):
            raise AssertionError(f"{self.name} miscounts its prefill tokens")
        if self._num_new_blocks != sum(self._new_blocks.values()):
            raise AssertionError(f"{self.name} miscounts its new blocks")
        decoding = [one for one in self.sent.values() if one.id not in self.prefilling]
        if self.num_decodes != sum(one.num_seqs for one in decoding):
            raise AssertionError(f"{self.name} miscounts its decodes")
