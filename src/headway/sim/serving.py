"""A load on simulated engines, as its clients see it.

Requests reach an engine after a measured delay, and tokens reach the client after another. One
engine has no router, as in `headway serve`; several have the router of a frontend.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from math import inf
from typing import Any

from headway.core.slo.steptime import StepShape
from headway.core.terms import NO_TERMS, Terms
from headway.errors import ConfigError
from headway.routing import RULES, Router
from headway.sim.fleet import DELAY_S, EngineSpec, FleetRecord, VirtualFleet
from headway.sim.profile import Delays, MachineProfile, MeasuredTimes
from headway.sim.recorded import RecordedItem
from headway.sim.steps import DrawStep, StepTime
from headway.workload import WorkItem, Workload

PAUSE_AFTER_REFUSAL_S = 0.1
"""A client of a closed loop whose request was refused sends the next one after this time."""


@dataclass(frozen=True, slots=True)
class TermChange:
    """Fields of a tenant's terms and targets that a simulation sets."""

    terms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    targets: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def apply(self, terms: Terms) -> Terms:
        return replace(terms, **self.terms, targets=replace(terms.targets, **self.targets))


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated: engines of one profile, their settings and their tenants."""

    profile: MachineProfile
    spec: EngineSpec
    num_engines: int = 1
    rule: str = "ttft"
    """How a router chooses an engine; one engine has no router."""
    term_changes: Mapping[str, TermChange] = field(default_factory=dict[str, TermChange])
    """By tenant; drawn tenants have weight 1 and no targets, recorded ones their own."""
    kill_every_s: float | None = None
    """An engine is killed as often, and another one is there after the start-up time."""

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ConfigError(f"at least 1 engine is needed, not {self.num_engines}")
        if self.rule not in RULES:
            raise ConfigError(f"unknown routing rule {self.rule!r}; one of {', '.join(RULES)}")
        if self.kill_every_s is not None and not self.kill_every_s > 0:
            raise ConfigError(f"seconds between kills must be above 0, not {self.kill_every_s:g}")

    @staticmethod
    def of(profile: MachineProfile) -> Setup:
        """Return one engine with the settings under which the profile was measured."""
        spec = EngineSpec(profile.scheduler, profile.capacity, profile.enable_prefix_caching)
        return Setup(profile, spec)


@dataclass(frozen=True, slots=True)
class Limits:
    """When a simulated load stops sending; requests in flight are served."""

    num_requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ConfigError("a load needs a number of requests, a duration, or both")


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request as its client sees it; times are seconds since the start of the load."""

    tenant: str | None
    scheduled_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_at: float | None = None
    finished_at: float | None = None
    num_cached_tokens: int = 0
    is_refused: bool = False

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.scheduled_at

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_at is None else self.finished_at - self.scheduled_at

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_at is None or self.finished_at is None or self.num_output_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class ServedLoad:
    """The requests of one simulated load, and how far its steps were measured."""

    requests: list[ServedRequest] = field(default_factory=list[ServedRequest])
    num_steps: int = 0
    num_extrapolated: int = 0
    """Steps larger than every step of the profile in some property."""
    num_kills: int = 0


class _CountedTimes:
    """Step times of a profile that count steps beyond it."""

    def __init__(self, times: MeasuredTimes, load: ServedLoad) -> None:
        self._times = times
        self._load = load

    def start(self, rng: random.Random) -> DrawStep:
        draw, profile, load = self._times.start(rng), self._times.profile, self._load

        def counted(shape: StepShape) -> StepTime:
            load.num_steps += 1
            load.num_extrapolated += profile.is_beyond(shape)
            return draw(shape)

        return counted


def serve_load(
    setup: Setup, workload: Workload, limits: Limits, seed: int = 0, machine_seed: int | None = None
) -> ServedLoad:
    """Simulate a load until all its requests have ended.

    `seed` draws the requests, as in `headway bench serve`. `machine_seed` draws how fast the
    machine is; without one it has the expected speed, with residuals.
    """
    return _Clients(setup, workload, limits, seed, machine_seed).run()


class _Clients:
    """The clients of a load, and the fleet that serves them."""

    def __init__(
        self,
        setup: Setup,
        workload: Workload,
        limits: Limits,
        seed: int,
        machine_seed: int | None,
    ) -> None:
        self._setup = setup
        self._limits = limits
        self._rng = random.Random(f"clients/{seed}/{machine_seed}")
        self._served = ServedLoad()
        self._requests: dict[str, ServedRequest] = {}
        self._numbers = count()
        self._num_in_flight = 0
        self._concurrency = workload.concurrency
        self._items: Iterator[WorkItem] = islice(workload.items(seed), limits.num_requests)
        self._is_all_sent = False
        self._is_drawn = machine_seed is not None
        self._machines = random.Random(f"machines/{machine_seed}")
        self._fleet = self._make_fleet(machine_seed or 0)
        self._fleet.on_finish = self._finish
        self._fleet.on_refuse = self._refuse

    def _make_fleet(self, machine_seed: int) -> VirtualFleet:
        setup = self._setup
        is_alone = setup.num_engines == 1
        router = Router(ahead_steps=inf) if is_alone else Router(RULES[setup.rule]())
        times = [self._draw_times() for _ in range(setup.num_engines)]
        return VirtualFleet(
            [router], times, setup.spec, machine_seed, delay_s=0.0 if is_alone else DELAY_S
        )

    def _draw_times(self) -> _CountedTimes:
        profile = self._setup.profile
        chosen = profile.times(self._machines) if self._is_drawn else profile.expected()
        return _CountedTimes(chosen, self._served)

    def run(self) -> ServedLoad:
        if self._setup.kill_every_s is not None:
            self._fleet.at(self._setup.kill_every_s, self._kill)
        if self._concurrency is None:
            self._send_next()
        else:
            for _ in range(self._concurrency):
                self._send_now()
        self._fleet.run(inf)
        return self._served

    def _kill(self) -> None:
        """Kill an engine; another one starts. Ends with the load."""
        setup, fleet = self._setup, self._fleet
        if self._has_ended or setup.kill_every_s is None:
            return
        if live := fleet.live_engines:
            fleet.kill_engine(self._rng.choice(live))
            self._served.num_kills += 1
            fleet.at(fleet.clock.now() + setup.profile.start_s, self._start_engine)
        fleet.at(fleet.clock.now() + setup.kill_every_s, self._kill)

    def _start_engine(self) -> None:
        self._fleet.add_engine(self._draw_times())
        self._fleet.tick()

    @property
    def _has_ended(self) -> bool:
        return self._is_all_sent and not self._num_in_flight

    def _send_next(self) -> None:
        """Schedule the next request of an open loop at its time."""
        item = self._next_item()
        if item is None or self._is_over(item.at):
            self._is_all_sent = True
        else:
            self._fleet.at(item.at, partial(self._send_open, item))

    def _send_open(self, item: WorkItem) -> None:
        self._send(item, item.at)
        self._send_next()

    def _send_now(self) -> None:
        """Send the next request of a closed loop."""
        now = self._fleet.clock.now()
        item = None if self._is_over(now) else self._next_item()
        if item is None:
            self._is_all_sent = True
        else:
            self._send(item, now)

    def _next_item(self) -> WorkItem | None:
        return next(self._items, None)

    def _is_over(self, at: float) -> bool:
        return self._limits.duration_s is not None and at >= self._limits.duration_s

    def _send(self, item: WorkItem, at: float) -> None:
        self._num_in_flight += 1
        num_prompt, num_output = len(item.prompt_token_ids), item.num_output_tokens
        capacity = self._setup.spec.capacity
        if num_prompt + num_output > capacity.max_model_len:
            raise ConfigError(
                f"a request has {num_prompt} prompt and {num_output} output tokens; the longest "
                f"context is {capacity.max_model_len}: --max-prompt-tokens cuts those of a trace"
            )
        request = ServedRequest(item.tenant, at, num_prompt, num_output)
        self._served.requests.append(request)
        request_id = str(next(self._numbers))
        self._requests[request_id] = request
        at += self._rng.choice(self._delays.to_engine_s)
        record = FleetRecord(
            request_id, list(item.prompt_token_ids), num_output, self._terms_of(item), at
        )
        if isinstance(item, RecordedItem):
            record.output_ids, record.max_tokens = item.output_ids, item.max_tokens
            record.priority = item.priority
        self._fleet.send(record)

    def _terms_of(self, item: WorkItem) -> Terms:
        if isinstance(item, RecordedItem):
            terms = item.terms
        elif item.tenant is None:
            return NO_TERMS
        else:
            terms = Terms(tenant=item.tenant, cache_group=item.tenant)
        change = self._setup.term_changes.get(terms.tenant)
        return terms if change is None else change.apply(terms)

    @property
    def _delays(self) -> Delays:
        return self._setup.profile.delays_with(self._num_in_flight)

    def _finish(self, record: FleetRecord) -> None:
        request, delays = self._requests.pop(record.id), self._delays
        self._num_in_flight -= 1
        self._fleet.records.pop(record.id)
        if record.first_token_at is not None:
            request.first_token_at = record.first_token_at + self._rng.choice(delays.to_client_s)
        finished_at = (record.finished_at or 0.0) + self._rng.choice(delays.to_client_s)
        request.finished_at = max(finished_at, request.first_token_at or 0.0)
        request.num_cached_tokens = record.num_cached
        if self._concurrency is not None:
            self._fleet.at(request.finished_at, self._send_now)

    def _refuse(self, record: FleetRecord) -> None:
        self._requests.pop(record.id).is_refused = True
        self._num_in_flight -= 1
        if self._concurrency is not None:
            self._fleet.at(self._fleet.clock.now() + PAUSE_AFTER_REFUSAL_S, self._send_now)
