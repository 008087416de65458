"""A fleet on a virtual clock: real engine cores and a real router, without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from typing import Any

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import (
    Admitted,
    Event,
    Finished,
    Refused,
    Stepped,
    TokensEmitted,
)
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.terms import NO_TERMS, Terms
from headway.routing import EngineLimits, NoEngineInTime, Router
from headway.sim.forecasts import FeasibleEngines
from headway.sim.steps import STOP_TOKEN, TOKEN, CannedExecutor, StepTimes, TimedExecutor

_Entry = tuple[float, int, Callable[..., None], tuple[Any, ...]]
"""Time, number, and what happens."""
TOLD = (TokensEmitted, Finished, Admitted, Refused)
"""Events that a router, or the client of a request, is told of."""
DELAY_S = 0.001
"""Time that a message takes between router and engine, on a network."""


@dataclass(slots=True, eq=False)
class FleetRecord:
    """One request of a fleet from its arrival to its end."""

    id: str
    token_ids: list[int]
    num_output: int
    terms: Terms = NO_TERMS
    arrived_at: float = 0.0
    engine: str = ""
    num_cached: int = 0
    predicted_cached: int = 0
    waited_s: float = 0.0
    """Seconds in the router."""
    first_token_at: float | None = None
    finished_at: float | None = None
    refusal_reason: str = ""
    """As in the event Refused; empty if it was not refused."""
    frontend: int = 0
    priority: int = 0
    max_tokens: int = 0
    """Most output tokens that the client asked for; 0: as many as there are."""
    output_ids: Sequence[int] = ()
    """Output tokens, where later prompts have them; else all are alike."""
    num_emitted: int = 0
    is_decoding: bool = False
    """Whether the engine that has the request has emitted a token of it."""
    num_resent: int = 0
    """How often the engine of the request was killed."""
    num_preemptions: int = 0
    number: int | None = None
    """Position among the requests of a recording."""

    @property
    def is_refused(self) -> bool:
        return bool(self.refusal_reason)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    def make_request(self) -> Request:
        """Return a new request with this prompt, and the output so far."""
        return Request(
            id=self.id,
            token_ids=[*self.token_ids, *self.output_until(self.num_emitted)],
            num_prompt_tokens=len(self.token_ids),
            params=_params_of(self.max_tokens or self.num_output),
            seed=0,
            arrived_at=self.arrived_at,
            priority=self.priority,
            terms=self.terms,
        )

    def output_until(self, end: int) -> Sequence[int]:
        """Return the first output tokens."""
        return self.output_ids[:end] if self.output_ids else [TOKEN] * end


@lru_cache(maxsize=4096)
def _params_of(max_tokens: int) -> SamplingParams:
    """Return the same value for the same length: to make and check one takes time."""
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_TOKEN,))


class _Engine:
    """An engine core of the fleet, and the requests on their way to it."""

    def __init__(
        self,
        name: str,
        core: EngineCore,
        executor: TimedExecutor,
        canned: CannedExecutor,
        events: list[Event],
    ) -> None:
        self.name = name
        self.core = core
        self.executor = executor
        self.canned = canned
        self.joining: list[FleetRecord] = []
        self.is_stepping = False
        self.events = events
        """What the core has emitted since the last report."""
        self.is_draining = False
        self.has_left = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the engines of a fleet are made with."""

    scheduler: SchedulerConfig
    capacity: Capacity
    enable_prefix_caching: bool = True

    @property
    def scheduling_policy(self) -> str:
        return self.scheduler.scheduling_policy

    @property
    def has_prefix_cache(self) -> bool:
        return self.enable_prefix_caching


class VirtualFleet:
    """Engines of unequal speed, and frontends with a router each; a message takes `delay_s`.

    The fleet sets which engines a router may choose: by their forecasts.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        profiles: Sequence[StepTimes],
        spec: EngineSpec,
        seed: int = 0,
        delay_s: float = DELAY_S,
    ) -> None:
        self.routers = routers
        """Routers of the frontends."""
        self.clock = VirtualClock()
        self.records: dict[str, FleetRecord] = {}
        self.on_finish: Callable[[FleetRecord], None] = lambda _record: None
        self.on_refuse: Callable[[FleetRecord], None] = lambda _record: None
        self.on_event: Callable[[FleetRecord, Event], None] = lambda _record, _event: None
        """Called with every event of a request."""
        self.on_tick: Callable[[], None] = lambda: None
        """Called after the routers were asked what to send."""
        self.on_leave: Callable[[], None] = lambda: None
        """Called when an engine was killed, or has left."""
        self._engines: dict[str, _Engine] = {}
        self._agenda: list[_Entry] = []
        """What is to happen, as a heap."""
        self._messages: deque[_Entry] = deque()
        """Messages on their way; all take the same time, so they arrive in order."""
        self._numbers, self._engine_numbers = count(), count()
        self._forecasts = [FeasibleEngines(spec) for _ in routers]
        """What each frontend knows of the engines' forecasts."""
        for router, forecasts in zip(routers, self._forecasts, strict=True):
            router.allowed = forecasts
        self._spec = spec
        self._seed = seed
        self._delay_s = delay_s
        for profile in profiles:
            self.add_engine(profile)

    def add_engine(self, profile: StepTimes) -> None:
        """Add an engine with these step times, now."""
        number, capacity = next(self._engine_numbers), self._spec.capacity
        config = self._spec.scheduler
        canned = CannedExecutor(capacity)
        executor = TimedExecutor(canned, profile, 1000 * self._seed + number)
        events: list[Event] = []
        scheduler = Scheduler(config, capacity, self._spec.enable_prefix_caching)
        core = EngineCore(scheduler, executor, self.clock, events.extend)
        name = f"engine-{number}"
        self._engines[name] = _Engine(name, core, executor, canned, events)
        limits = EngineLimits(
            capacity.num_blocks,
            capacity.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
        )
        for router, forecasts in zip(self.routers, self._forecasts, strict=True):
            forecasts.engine_joined(name)
            router.engine_joined(name, limits)

    @property
    def num_engines(self) -> int:
        """Engines that take requests."""
        return len(self.live_engines)

    @property
    def num_present(self) -> int:
        """Engines that take requests or have some left."""
        return len(self._engines)

    def drain_engine(self) -> None:
        """Have the newest engine get no further requests; it leaves when it has none."""
        engine = next(one for one in reversed(self._engines.values()) if not one.is_draining)
        engine.is_draining = True
        for router, forecasts in zip(self.routers, self._forecasts, strict=True):
            forecasts.engine_draining(engine.name)
            router.engine_draining(engine.name, self.clock.now())
        self._leave_if_idle(engine)

    def _leave_if_idle(self, engine: _Engine) -> None:
        """Remove a drained engine once no request was sent to it that has not ended."""
        if not engine.is_draining or engine.has_left:
            return
        views = [one for router in self.routers for one in router.engines]
        if any(one.sent for one in views if one.name == engine.name):
            return
        self._remove(engine)

    def _remove(self, engine: _Engine) -> None:
        engine.has_left = True
        del self._engines[engine.name]
        for router, forecasts in zip(self.routers, self._forecasts, strict=True):
            forecasts.engine_lost(engine.name)
            router.engine_lost(engine.name, self.clock.now())
        self.on_leave()

    def kill_engine(self, name: str) -> None:
        """Have an engine end at once; its requests arrive again, with their output so far."""
        engine, now = self._engines[name], self.clock.now()
        lost = [
            one
            for router in self.routers
            for view in router.engines
            if view.name == name
            for one in view.sent
        ]
        self._remove(engine)
        for record in [self.records[request_id] for request_id in lost]:
            record.num_resent += 1
            record.is_decoding = False
            self.routers[record.frontend].arrive(record.make_request(), now, is_resent=True)
        self.tick()

    @property
    def live_engines(self) -> list[str]:
        """Names of the engines that take requests."""
        return [one.name for one in self._engines.values() if not one.is_draining]

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have something happen at a time."""
        now = self.clock.now()
        entry = (time if time > now else now, next(self._numbers), action, arguments)
        heappush(self._agenda, entry)

    def deliver(self, action: Callable[..., None], *arguments: Any) -> None:
        """Have something happen after the time of a message."""
        at = self.clock.now() + self._delay_s
        self._messages.append((at, next(self._numbers), action, arguments))

    def send(self, record: FleetRecord) -> None:
        """Have a request arrive at its time."""
        self.at(record.arrived_at, self._arrive, record)

    def run(self, until_s: float) -> None:
        """Let everything happen that is due before a time."""
        agenda, messages = self._agenda, self._messages
        while agenda or messages:
            is_message = not agenda or (messages and messages[0] < agenda[0])
            if (messages if is_message else agenda)[0][0] > until_s:
                return
            time, _, action, arguments = messages.popleft() if is_message else heappop(agenda)
            self.clock.advance_to(time)
            action(*arguments)

    def _arrive(self, record: FleetRecord) -> None:
        self.records[record.id] = record
        request, now = record.make_request(), self.clock.now()
        if not self._forecasts[record.frontend].arrive(request, now) or isinstance(
            self.routers[record.frontend].arrive(request, now), NoEngineInTime
        ):
            self.refuse(record, "deadline")
        self.tick()

    def refuse(self, record: FleetRecord, reason: str) -> None:
        """Have a request end without an answer."""
        self._forecasts[record.frontend].ended(record.id)
        record.refusal_reason = reason
        self.on_refuse(record)

    def tick(self) -> None:
        """Send what the routers say, each until it says nothing, as a frontend does."""
        now = self.clock.now()
        for router, forecasts in zip(self.routers, self._forecasts, strict=True):
            while sendings := router.tick(now):
                for sending in sendings:
                    record = self.records[sending.request.id]
                    if not record.num_resent:
                        forecasts.sent(sending.request, sending.engine, now)
                    record.engine, record.waited_s = sending.engine, sending.waited_s
                    record.predicted_cached = sending.num_cached
                    self.deliver(self._join, self._engines[sending.engine], record)
        self.on_tick()

    def _join(self, engine: _Engine, record: FleetRecord) -> None:
        if engine.has_left:
            return  # killed while the request was on its way
        engine.joining.append(record)
        if not engine.is_stepping:
            engine.executor.num_ended = 0
            self._begin(engine)

    def _begin(self, engine: _Engine) -> None:
        for record in engine.joining:
            if record.output_ids or record.max_tokens > record.num_output:
                self._expect(engine, record)
            engine.core.add(record.make_request(), record.num_resent > 0)
        engine.joining.clear()
        engine.is_stepping = engine.core.begin_step() is not None
        if engine.is_stepping:
            self.at(self.clock.now() + engine.executor.step_s, self._end, engine)
        elif engine.events:  # an idle engine has refused a request
            self._tell(engine)

    def _expect(self, engine: _Engine, record: FleetRecord) -> None:
        """Have an engine sample the output of a request, and end it where it ended."""
        num_prompt = len(record.token_ids)
        if record.output_ids:
            engine.canned.outputs[record.id] = num_prompt, record.output_ids
        if record.max_tokens > record.num_output:
            # The last token is sampled when all tokens before it are known.
            engine.canned.stop_at[record.id] = num_prompt + record.num_output - 1

    def _end(self, engine: _Engine) -> None:
        if engine.has_left:
            return
        num_running = len(engine.core.scheduler.running)
        engine.core.end_step()
        engine.executor.num_ended = num_running - len(engine.core.scheduler.running)
        self._tell(engine)
        self._begin(engine)

    def _tell(self, engine: _Engine) -> None:
        """Have what has happened in an engine reach the routers after the time of a message."""
        events = list(engine.events)
        engine.events.clear()
        self.deliver(self._report, engine, events)

    def _report(self, engine: _Engine, events: Sequence[Event]) -> None:
        if engine.has_left:
            return  # nobody waits for it
        now = self.clock.now()
        self._observe(engine.name, events, now)
        ended: list[FleetRecord] = []
        for event in events:
            if isinstance(event, TOLD):  # most are tokens
                record = self.records[event.request_id]
                self._take(record, event, now)
                if isinstance(event, Finished):
                    engine.canned.forget(record.id)
                    ended.append(record)
        if engine.is_draining:
            self._leave_if_idle(engine)
        self.tick()
        for record in ended:
            self.on_finish(record)

    def _observe(self, name: str, events: Sequence[Event], now: float) -> None:
        """Take over what is known of an engine."""
        for forecasts in self._forecasts:
            forecasts.observe(name, events, now)
        last = events[-1]  # `_end` reports a step as soon as the core has emitted it
        if isinstance(last, Stepped):
            for router in self.routers:
                router.observe(name, last, now)

    def _take(
        self, record: FleetRecord, event: Admitted | TokensEmitted | Finished | Refused, now: float
    ) -> None:
        """Take over what has happened to a request in its engine."""
        router = self.routers[record.frontend]
        if isinstance(event, TokensEmitted):
            record.num_emitted += len(event.token_ids)
            if record.first_token_at is None:
                record.first_token_at = now
            if not record.is_decoding:
                record.is_decoding = True
                router.first_token(record.id)
        elif isinstance(event, Refused):
            router.finished(record.id)
            self.refuse(record, event.reason)
            return
        elif isinstance(event, Admitted) and not event.is_resumed:
            record.num_cached = event.num_cached_tokens
            router.admitted(record.id, event.num_cached_tokens)
        elif isinstance(event, Admitted):
            record.num_preemptions += 1  # it runs again
        elif isinstance(event, Finished):
            record.finished_at = now
            self._forecasts[record.frontend].ended(record.id)
            router.finished(record.id, record.output_until(event.num_output_tokens))
        self.on_event(record, event)
