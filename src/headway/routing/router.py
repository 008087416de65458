"""The router: assigns each request to an engine at once, and sends it late.

A request is assigned when it arrives, to the engine of least cost by the rule, and waits in that
engine's queue in the router. It is sent when the engine can begin it within about a step of
prefill. So prefixes stay together, and what is not sent yet is in fair order, can move to an engine
that has become clearly better, and is not lost with an engine.

The caller passes the time, and calls `tick` after every other call: it returns what to send now.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, islice
from math import inf
from typing import NamedTuple, Protocol

from headway.core.events import Stepped
from headway.core.request import Request
from headway.core.slo.feasibility import MARGIN, MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S
from headway.core.slo.steptime import StepCost
from headway.core.slo.targets import RemainingWork
from headway.core.terms import NO_TARGETS
from headway.core.waiting.aging import AgingTimer
from headway.routing.autoscale import DEFAULT_TTFT_S, FleetDemand, WorkRate
from headway.routing.engines import EngineLimits, RoutedEngine
from headway.routing.loads import EnginesByLoad
from headway.routing.prefixes import AssignedPrefixes, PrefixHolders, bits
from headway.routing.requests import Reason, RoutedRequest
from headway.routing.rules import Offer, PredictedTtft, Rule
from headway.routing.shares import FleetShares

MAX_CANDIDATES = 8
"""Engines looked at for their load, and as many for what they have cached."""
MAX_LOOKS = 1
"""Waiting requests that a tick looks at for a better engine, and for any engine."""
NUM_OTHERS = 3
"""Engines that a waiting request may move to: those with the least load."""
MOVE_GAIN = 0.3
"""Part of its predicted TTFT that a waiting request must save to be moved."""
AHEAD_STEPS = 1.0
"""Steps of prefill that an engine may have before a further request is sent."""
MAX_WAIT_S = 10.0
"""Wait after which a request goes first within its tenant's share."""
MIN_WORK_S = 1e-3
"""Least work of a request that no engine may have: it needs one, whatever it costs."""
FIRST_OUTPUT = 128.0
"""Output tokens expected of a request before any has ended."""
OUTPUT_FOLLOWING = 0.02
"""Smoothing of the expected output, from request to request."""


class AllowedEngines(Protocol):
    """Decides which engines may have a request; the answers may change with time."""

    @property
    def restricts(self) -> bool:
        """Whether an answer may be no: if not, none need be asked for."""
        ...

    def may_assign(self, request: Request, engine: str) -> bool:
        """Return whether a request may wait for an engine."""
        ...

    def may_send(self, request: Request, engine: str) -> bool:
        """Return whether a request may be sent to an engine now."""
        ...


class AllEngines:
    """Every engine may have every request."""

    restricts = False

    def may_assign(self, request: Request, engine: str) -> bool:
        return True

    def may_send(self, request: Request, engine: str) -> bool:
        return True


class Sending(NamedTuple):
    """A request to send to an engine now."""

    request: Request
    engine: str
    reason: Reason
    waited_s: float
    """Seconds in the router."""
    num_cached: int
    """Prompt tokens that the engine is expected to have cached."""
    predicted_ttft_s: float = 0.0
    """Predicted time from arrival to the first token; 0 if the rule predicts none."""


@dataclass(frozen=True, slots=True)
class FrontendLoad:
    """The requests of one of the frontends that share a router."""

    name: str
    num_waiting: int
    """Requests that wait in the router."""
    num_sent: int
    """Requests in engines."""
    num_engines: int
    """Engines that the frontend is connected to."""
    is_own: bool
    """Whether the frontend that reads this is the one."""


@dataclass(frozen=True, slots=True)
class NoEngineInTime:
    """No engine that may have the request is expected to meet its targets."""

    message: str
    retry_after_s: float


class Router:
    """Assigns requests to engines, keeps those not sent yet, and says when to send them."""

    def __init__(
        self,
        rule: Rule | None = None,
        allowed: AllowedEngines | None = None,
        ahead_steps: float = AHEAD_STEPS,
        move_gain: float = MOVE_GAIN,
    ) -> None:
        """With `ahead_steps` of infinity, requests are sent while an engine has room for them."""
        self._rule = PredictedTtft() if rule is None else rule
        self.allowed: AllowedEngines = AllEngines() if allowed is None else allowed
        self._ahead_steps = ahead_steps
        self._move_gain = move_gain
        self.shares = FleetShares()
        self.frontends: Sequence[FrontendLoad] = ()
        """All frontends that share a router process; none if it is not shared."""
        self._prefixes = AssignedPrefixes()
        self._engines: dict[str, RoutedEngine] = {}
        self._by_number: dict[int, RoutedEngine] = {}
        self._by_load = EnginesByLoad()
        self._block_sizes: Counter[int] = Counter()
        self._requests: dict[str, RoutedRequest] = {}
        self._waiting: OrderedDict[str, RoutedRequest] = OrderedDict()
        """Requests not sent, the next to look at first."""
        self._unassigned: dict[str, RoutedRequest] = {}
        """Waiting requests that no engine may have now."""
        self._ready: dict[str, None] = {}
        """Engines that may be able to begin a request."""
        self._orders = count(1)
        self._arrivals = count(1)
        self._num_output = FIRST_OUTPUT
        self._work = WorkRate()
        self._cost = StepCost()
        """Cost of the engine that last reported, for requests that have no engine."""
        self._aging = AgingTimer(MAX_WAIT_S, lambda request: request.id in self._waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that are not sent."""
        return len(self._waiting)

    @property
    def engines(self) -> Iterable[RoutedEngine]:
        return self._engines.values()

    def engine_of(self, request_id: str) -> str | None:
        """Return the engine that a request is assigned or was sent to."""
        one = self._requests.get(request_id)
        return None if one is None or one.engine is None else one.engine.name

    def is_sent(self, request_id: str) -> bool:
        one = self._requests.get(request_id)
        return one is not None and one.is_sent

    # ------------------------------------------------------------------ engines

    def engine_joined(self, name: str, limits: EngineLimits, cost: StepCost | None = None) -> None:
        """Add an engine; what waits may move to it."""
        if name in self._engines:
            raise ValueError(f"engine {name} has joined already")
        number = next(n for n in count() if n not in self._by_number)
        accounts, on_load = self.shares.accounts, self._by_load.change
        engine = RoutedEngine(number, name, limits, cost or StepCost(), accounts, on_load)
        self._engines[name] = self._by_number[number] = engine
        self._block_sizes[limits.block_size] += 1
        self._prefixes.add_engine(number, limits.num_blocks if limits.has_prefix_cache else 0)

    def engine_lost(self, name: str, now: float) -> list[str]:
        """Remove an engine; return the requests that were not sent and have another engine now.

        Requests that were sent are forgotten: they arrive again, as resent.
        """
        engine = self._engines.pop(name)
        del self._by_number[engine.number]
        self._ready.pop(name, None)
        for one in list(engine.sent.values()):
            del self._requests[one.id]
            self.shares.close(one.request)
        waiting = self._take_queue(engine)
        self._prefixes.remove_engine(engine.number)
        self._by_load.remove(engine)
        self._block_sizes = +(self._block_sizes - Counter([engine.limits.block_size]))
        for one in waiting:
            self._assign(one, now)
        return [one.id for one in waiting if one.engine is not None]

    def engine_draining(self, name: str, now: float) -> None:
        """Give an engine no further requests; those that wait for it go to others."""
        engine = self._engines[name]
        engine.is_draining = True
        for one in self._take_queue(engine):
            self._assign(one, now)

    def observe(self, name: str, stepped: Stepped, now: float) -> None:
        """Take over an engine's state after a step; call it before the step's other events."""
        engine = self._engines[name]
        engine.observe(stepped, now)
        self._cost = engine.cost
        engine.suspend_stuck()
        if len(engine.queue):
            self._ready[name] = None

    def idle(self, name: str, num_blocks_used: int) -> None:
        """Record that no request is left in an engine."""
        engine = self._engines[name]
        engine.idle(num_blocks_used)
        if len(engine.queue):
            self._ready[name] = None

    def _take_queue(self, engine: RoutedEngine) -> list[RoutedRequest]:
        """Remove and return the requests that wait for an engine."""
        taken = [self._requests[request.id] for request in engine.queue.requests]
        taken.sort(key=lambda one: one.request.arrival_order)
        for one in taken:
            self._withdraw(one)
        return taken

    # ----------------------------------------------------------------- requests

    def arrive(
        self, request: Request, now: float, is_resent: bool = False
    ) -> str | NoEngineInTime | None:
        """Assign a request; return its engine, a refusal, or None if no engine may have it now.

        A resent request is not charged again, goes first within its tenant's share, and is not
        refused.
        """
        if request.id in self._requests:
            raise ValueError(f"request {request.id} has arrived already")
        one = RoutedRequest(request, now, is_resent)
        request.arrival_order = next(self._arrivals)
        request.state_since = now
        request.is_aged = is_resent
        if not is_resent and request.terms.targets != NO_TARGETS:
            refusal = self._judge(one, now)
            if refusal is not None:
                return refusal
        self._requests[one.id] = self._waiting[one.id] = one
        self.shares.open(request)
        self.shares.begin_wait(request)
        self._aging.add(request, len(self._waiting))
        self._assign(one, now)
        if not is_resent:
            self._work.add(self._work_s(one), now)
        return None if one.engine is None else one.engine.name

    def restore(self, request: Request, engine_name: str, now: float) -> None:
        """Record a request that an engine has already, by a decision that was not made here."""
        if request.id in self._requests:
            raise ValueError(f"request {request.id} has arrived already")
        engine = self._engines[engine_name]
        one = RoutedRequest(request, now, engine=engine, order=next(self._orders), is_sent=True)
        request.arrival_order = next(self._arrivals)
        self._requests[one.id] = one
        self.shares.open(request)
        if engine.limits.has_prefix_cache:
            chain = one.matchable(engine.limits.block_size)
            one.num_cached = engine.limits.block_size * self._prefixes.match(chain).num_blocks(
                engine.number
            )
            known = self._prefixes.note(
                engine.number, one.hashes(engine.limits.block_size), one.order
            )
            one.known_orders = known[: one.num_cached // engine.limits.block_size]
        one.num_left = request.num_tokens - one.num_cached
        one.work_s = engine.work_s(one, one.num_cached)
        engine.send(one)
        self._charge(one, engine)

    def reassign(self, request_id: str, now: float) -> None:
        """Choose the engine of a request anew, if it is not sent."""
        one = self._requests.get(request_id)
        if one is not None and not one.is_sent and one.engine is not None:
            self._withdraw(one)
            self._assign(one, now)

    def forget(self, request_id: str) -> None:
        """Forget a request whose engine was lost: it arrives again, as resent."""
        one = self._requests.get(request_id)
        if one is None or not one.is_sent or one.engine is None:
            self.finished(request_id)
            return
        del self._requests[request_id]
        one.engine.remove(one)
        self.shares.close(one.request)
        self._ready[one.engine.name] = None

    def admitted(self, request_id: str, num_cached_tokens: int) -> None:
        """Correct what is known of an engine's cache by what it found there, at first admission."""
        one = self._requests.get(request_id)
        if one is None or one.engine is None or not one.is_sent or one.is_admitted:
            return
        one.is_admitted, engine = True, one.engine
        self._correct_prefixes(engine, one, num_cached_tokens // engine.limits.block_size)
        engine.admit(one, num_cached_tokens)
        engine.suspend_stuck()
        self._ready[engine.name] = None

    def first_token(self, request_id: str) -> None:
        """Record that the prefill of a request is complete."""
        one = self._requests.get(request_id)
        if one is not None and one.engine is not None and one.is_sent:
            one.engine.start_decode(one)
            self._ready[one.engine.name] = None

    def finished(self, request_id: str, output_ids: Sequence[int] = ()) -> None:
        """Remove a request that has ended in its engine, with the output of its first sample."""
        one = self._requests.pop(request_id, None)
        if one is None:
            return
        if not one.is_sent:
            self._drop_waiting(one)
            return
        engine = one.engine
        if engine is None:
            raise RuntimeError(f"request {request_id} was sent to no engine")
        self._settle(one, engine, len(output_ids))
        if one.has_first_token and engine.limits.has_prefix_cache:
            # The last token was sampled and never computed: no block ends in it.
            chain = one.extended(list(output_ids[:-1]), engine.limits.block_size)
            self._prefixes.note(engine.number, chain, next(self._orders))
        elif engine.limits.has_prefix_cache:
            self._retract(one, engine)
        engine.remove(one)
        engine.suspend_stuck()
        self.shares.close(one.request)
        self._ready[engine.name] = None

    def cancel(self, request_id: str) -> None:
        """Remove a request that is not wanted any more, sent or not."""
        self.finished(request_id)

    def _drop_waiting(self, one: RoutedRequest) -> None:
        if one.engine is not None:
            self._withdraw(one)
        self._unassigned.pop(one.id, None)
        del self._waiting[one.id]
        self.shares.end_wait(one.request)
        self.shares.close(one.request)

    def _correct_prefixes(self, engine: RoutedEngine, one: RoutedRequest, num_found: int) -> None:
        """After a miss, drop what the engine must have evicted before the missed block.

        Blocks of a request that is still in prefill are not a miss: they are yet to be computed.
        """
        if num_found >= len(one.known_orders):
            return
        missed_order = one.known_orders[num_found]
        oldest = min((other.order for other in engine.prefilling.values()), default=one.order)
        if missed_order < oldest:
            self._prefixes.drop_older(engine.number, missed_order)

    def _settle(self, one: RoutedRequest, engine: RoutedEngine, num_output: int) -> None:
        """Charge what a request has cost beyond what was expected, or refund the rest.

        A prefill that was cut off is charged as far as it came.
        """
        request = one.request
        if not one.is_resent:
            left = 0.0 if one.has_first_token else one.num_left / max(1, one.num_uncached)
            spent_s = one.work_s * max(0.0, 1.0 - left) + self._decode_s(one, engine, num_output)
            self.shares.charge(request, spent_s - one.charged_s)
        if num_output:
            self._num_output += OUTPUT_FOLLOWING * (num_output - self._num_output)

    def _decode_s(self, one: RoutedRequest, engine: RoutedEngine, num_output: float) -> float:
        return one.num_seqs * num_output * engine.cost.decode_s(one.request.num_tokens)

    def _work_s(self, one: RoutedRequest) -> float:
        """Return the seconds of work that a request is expected to be."""
        num_output = self._expected_output(one.request)
        if one.engine is not None:
            return one.work_s + self._decode_s(one, one.engine, num_output)
        num_tokens = one.request.num_tokens
        decode_s = one.num_seqs * num_output * self._cost.decode_s(num_tokens)
        return self._cost.prefill_s(num_tokens) + decode_s

    def demand(self, now: float) -> FleetDemand:
        """Return the work that arrives here and waits, by which a fleet is scaled."""
        engines = self._engines.values()
        backlog_s = sum(engine.prefill_backlog_s for engine in engines)
        for one in self._unassigned.values():
            backlog_s += max(self._cost.prefill_s(one.request.num_tokens), MIN_WORK_S)
        targets = [one.request.terms.targets.ttft_s for one in self._waiting.values()]
        ttft_s = min((one for one in targets if one is not None), default=DEFAULT_TTFT_S)
        speeds = [engine.speed for engine in engines]
        speed = sum(speeds) / len(speeds) if speeds else 1.0
        return FleetDemand(self._work.rate(now), backlog_s, ttft_s, speed)

    def _expected_output(self, request: Request) -> float:
        return min(self._num_output, request.params.max_tokens or self._num_output)

    # --------------------------------------------------------------- assignment

    def _assign(self, one: RoutedRequest, now: float) -> None:
        """Have a waiting request wait for the engine that the rule chooses."""
        offers = self._offers(one, now)
        if offers:
            self._place(one, self._rule.choose(one, offers), offers, now)
        else:
            self._unassigned[one.id] = one

    def _place(
        self,
        one: RoutedRequest,
        offer: Offer,
        offers: Sequence[Offer],
        now: float,
        has_moved: bool = False,
    ) -> None:
        engine, request = offer.engine, one.request
        one.predicted_ttft_s = now - one.arrived_at + offer.ttft_s if offer.ttft_s else 0.0
        most_cached = max(other.num_cached for other in offers)
        if one.is_resent:
            one.reason = Reason.FAILOVER
        elif has_moved:
            one.reason = Reason.MOVED
        else:
            is_prefix = 0 < most_cached <= offer.num_cached
            one.reason = Reason.PREFIX if is_prefix else Reason.LOAD
        one.engine, one.num_cached, one.order = engine, offer.num_cached, next(self._orders)
        one.num_left = request.num_tokens - offer.num_cached
        one.work_s = engine.work_s(one, offer.num_cached)
        if engine.limits.has_prefix_cache:
            chain = one.hashes(engine.limits.block_size)
            known = self._prefixes.note(engine.number, chain, one.order)
            one.known_orders = known[: offer.num_cached // engine.limits.block_size]
        if request.terms.targets != NO_TARGETS:
            work = self._remaining_work(one)
            request.start_by = work.planned_start_at(engine.cost, engine.step_s)
        self._unassigned.pop(one.id, None)
        engine.queue.push(one)
        engine.update_load()
        self._ready[engine.name] = None

    def _withdraw(self, one: RoutedRequest) -> None:
        """Take a request out of its engine's queue, as if it had never been assigned."""
        engine = one.engine
        if engine is None:
            raise RuntimeError(f"request {one.id} waits for no engine")
        engine.queue.remove(one)
        engine.update_load()
        if engine.limits.has_prefix_cache:
            self._retract(one, engine)
        one.engine = None
        self._ready[engine.name] = None

    def _retract(self, one: RoutedRequest, engine: RoutedEngine) -> None:
        """Forget the blocks that an engine would have computed for a request alone."""
        chain = one.hashes(engine.limits.block_size)
        self._prefixes.retract(engine.number, chain[len(one.known_orders) :], one.order)

    def _offers(self, one: RoutedRequest, now: float) -> list[Offer]:
        """Return the engines that may have a request: the likely ones, or all."""
        holders = self._holders(one)
        is_small = len(self._engines) <= 2 * MAX_CANDIDATES
        if not (is_small or self._rule.needs_all):
            offers = self._make_offers(one, self._likely(holders), holders, now)
            if offers:
                return offers
        return self._make_offers(one, self._engines.values(), holders, now)

    def _holders(self, one: RoutedRequest) -> dict[int, PrefixHolders]:
        """Return the engines that have the start of a prompt, by block size."""
        return {size: self._prefixes.match(one.matchable(size)) for size in self._block_sizes}

    def _likely(self, holders: dict[int, PrefixHolders]) -> list[RoutedEngine]:
        """Return the engines with the least load, and those with the most of the prefix."""
        by_load = list(islice(self._by_load, 4 * MAX_CANDIDATES))
        chosen = {engine.number: engine for engine in by_load[:MAX_CANDIDATES]}
        for match in holders.values():
            num_left = MAX_CANDIDATES
            for level in match.levels:
                if num_left <= 0:
                    break
                light = [one for one in by_load if level.mask >> one.number & 1]
                found = light[:num_left] or [
                    self._by_number[number] for number in islice(bits(level.mask), num_left)
                ]
                num_left -= len(found)
                chosen.update((engine.number, engine) for engine in found)
        return list(chosen.values())

    def _make_offers(
        self,
        one: RoutedRequest,
        engines: Iterable[RoutedEngine],
        holders: dict[int, PrefixHolders],
        now: float,
    ) -> list[Offer]:
        offers: list[Offer] = []
        num_output = self._expected_output(one.request)
        for engine in engines:
            if engine.is_draining or not self.allowed.may_assign(one.request, engine.name):
                continue
            size = engine.limits.block_size
            num_cached = size * holders[size].num_blocks(engine.number)
            if self._rule.needs_ttft:
                ttft_s = engine.ttft_s(one, num_cached, num_output, now)
                work_s = engine.work_s(one, num_cached) + self._decode_s(one, engine, num_output)
                offers.append(Offer(engine, num_cached, ttft_s, work_s))
            else:
                offers.append(Offer(engine, num_cached))
        return offers

    # ------------------------------------------------------------------- targets

    def _remaining_work(self, one: RoutedRequest) -> RemainingWork:
        request = one.request
        return RemainingWork(
            request.arrived_at,
            request.terms.targets,
            one.num_left or request.num_tokens,
            0,
            int(self._expected_output(request)),
            request.num_tokens,
            num_samples=one.num_seqs,
        )

    def _judge(self, one: RoutedRequest, now: float) -> NoEngineInTime | None:
        """Return a refusal if no engine is expected to meet the targets of a request."""
        if not self._rule.needs_ttft:
            return None
        work = self._remaining_work(one)
        holders = self._holders(one)
        late_s = inf
        for offer in self._make_offers(one, self._engines.values(), holders, now):
            late_s = min(late_s, self._late_s(work, offer, now))
            if late_s <= 0.0:
                return None
        if late_s == inf:
            return None
        text = f"no engine is expected to meet the targets; the best is {late_s:.1f} s late"
        return NoEngineInTime(text, min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, late_s)))

    def _late_s(self, work: RemainingWork, offer: Offer, now: float) -> float:
        """Return by how much an engine is expected to miss the targets of a request."""
        engine = offer.engine
        if not engine.cost.is_known:
            return 0.0
        first_at = now + offer.ttft_s / (1.0 - MARGIN)
        late_s = first_at - work.next_due_at
        if work.targets.deadline_s is not None:
            last_s = work.num_output_left * engine.step_s
            late_s = max(late_s, first_at + last_s - (work.arrived_at + work.targets.deadline_s))
        return late_s

    # ------------------------------------------------------------------- sending

    def tick(self, now: float) -> list[Sending]:
        """Return the requests to send now; each is returned once."""
        if self._waiting:
            for request in self._aging.pop_expired(now):
                self._age(self._requests[request.id])
            self._look(now)
        sendings: list[Sending] = []
        if not self._ready:
            return sendings
        ready, self._ready = self._ready, {}
        for name in ready:
            engine = self._engines.get(name)
            if engine is not None and len(engine.queue):
                self._send_from(engine, sendings, now)
        return sendings

    def _send_from(self, engine: RoutedEngine, sendings: list[Sending], now: float) -> None:
        """Send what an engine can begin, in fair order."""
        queue = engine.queue
        while (request := queue.requests.peek()) is not None:
            one = self._requests[request.id]
            num_ahead = self._num_ahead(engine, one)
            if not engine.can_begin(one, num_ahead, self._ahead_steps):
                return
            if not self.allowed.may_send(request, engine.name):
                self._ready[engine.name] = None
                return
            # The head by `peek` may differ from that by `pop`, which looks at prefix hits too.
            queue.requests.remove(request)
            queue.count_left(one)
            engine.send(one)
            self._charge(one, engine)
            one.is_sent = True
            del self._waiting[one.id]
            self.shares.end_wait(request)
            waited_s = now - one.arrived_at
            sendings.append(
                Sending(
                    request,
                    engine.name,
                    one.reason,
                    waited_s,
                    one.num_cached,
                    one.predicted_ttft_s,
                )
            )

    def _num_ahead(self, engine: RoutedEngine, one: RoutedRequest) -> int:
        """Return the prefill tokens sent that the engine computes before a request.

        A tenant with less service goes before the prompts of others, in the engine too. A request
        with targets, and one whose stream has paused, is for the engine to order.
        """
        if one.is_resent or one.request.start_by < inf:
            return 0
        counter, terms = self.shares.counter(one.request), one.request.terms
        num_tokens = 0
        for other in engine.prefilling.values():
            others = other.request.terms
            is_own = others.tenant == terms.tenant and others.is_spot == terms.is_spot
            if others.is_spot == terms.is_spot:
                is_later = self.shares.counter(other.request) > counter
            else:
                is_later = others.is_spot
            if is_own or not (is_later or other.is_stuck):
                num_tokens += other.num_left
        return num_tokens

    def _charge(self, one: RoutedRequest, engine: RoutedEngine) -> None:
        if not one.is_resent:
            output_s = self._decode_s(one, engine, self._expected_output(one.request))
            one.charged_s = one.work_s + output_s
            self.shares.charge(one.request, one.charged_s)

    def _age(self, one: RoutedRequest) -> None:
        """Have a request go first within its tenant's share."""
        if one.engine is None:
            one.request.is_aged = True
            return
        one.engine.queue.requests.remove(one.request)
        one.request.is_aged = True
        one.engine.queue.requests.push(one.request)

    def _look(self, now: float) -> None:
        """Look for a better engine for a few waiting requests, by turns."""
        for one in list(islice(self._unassigned.values(), MAX_LOOKS)):
            del self._unassigned[one.id]
            self._assign(one, now)
        if not (self._rule.needs_ttft and self._waiting):
            return
        for one in list(islice(self._waiting.values(), MAX_LOOKS)):
            self._waiting.move_to_end(one.id)
            if one.engine is not None:
                self._move(one, one.engine, now)

    def _move(self, one: RoutedRequest, engine: RoutedEngine, now: float) -> None:
        """Move a waiting request to an engine that is clearly better, if there is one.

        Only the engines with the least load are looked at. Of the delay of others there, only what
        the request would compute again counts against a move: they may wait for the rest.
        """
        num_output, num_most = self._expected_output(one.request), one.request.num_tokens - 1
        limit_s = inf
        if self.allowed.may_assign(one.request, engine.name):
            here_s = engine.ttft_s(one, one.num_cached, num_output, now)
            limit_s = (1.0 - self._move_gain) * here_s
        others = [
            other
            for other in islice(self._by_load, NUM_OTHERS)
            # As if all were cached there: most engines are ruled out without a look at prefixes.
            if other is not engine and other.ttft_s(one, num_most, num_output, now) < limit_s
        ]
        offers = self._make_offers(one, others, self._holders(one), now) if others else []
        better = [offer for offer in offers if self._move_cost_s(one, offer) < limit_s]
        if better:
            self._withdraw(one)
            self._place(one, self._rule.choose(one, better), better, now, has_moved=True)

    def _move_cost_s(self, one: RoutedRequest, offer: Offer) -> float:
        """Return the TTFT after a move, plus the delay of others by what is computed again.

        One that is yet to come counts too.
        """
        num_again = max(0, one.num_cached - offer.num_cached)
        again_s = offer.engine.cost.prefill_s(num_again, offer.num_cached)
        return offer.ttft_s + again_s * (offer.engine.num_delayed(one) + 1)

    # --------------------------------------------------------------------- checks

    def check(self) -> None:
        """Check that every request is in one place, and that the counts add up."""
        self._prefixes.check()
        for engine in self._engines.values():
            engine.check()
        queued = {r.id for engine in self._engines.values() for r in engine.queue.requests}
        sent = {name for engine in self._engines.values() for name in engine.sent}
        if queued & sent or queued & self._unassigned.keys() or sent & self._unassigned.keys():
            raise AssertionError("a request is in two places")
        if queued | sent | self._unassigned.keys() != self._requests.keys():
            raise AssertionError("a request is in no place")
        if queued | self._unassigned.keys() != self._waiting.keys():
            raise AssertionError("a request that is not sent does not wait")
