"""A simulated fleet with tenants at several frontends, and how much service each tenant gets.

Service is machine-seconds by the true step costs: prefill of what was not cached, and decodes. A
tenant waits while it has a request that no engine has admitted, although a step of every engine has
ended since it came. Without the step, a tenant with few requests and no backlog would count as
waiting for minutes: each of its requests waits for a step to end, and before that the next comes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.sim.fair_rig import ServiceLog, jain, widest_gap
from headway.config import SchedulerConfig
from headway.core.events import Admitted, Event, Finished, TokensEmitted
from headway.core.executor import Capacity
from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.fleet.router.shared import SharedRouter
from headway.fleet.router.simulated import SharedFrontends, make_shared
from headway.percentiles import percentile_if_any
from headway.routing import PredictedTtft, Router
from headway.sim import SMOLLM2_135M
from headway.sim.fleet import DELAY_S, EngineSpec, FleetRecord, VirtualFleet

NUM_ENGINES = 8
CAPACITY = Capacity(num_blocks=1000, block_size=16, max_model_len=4096)
MAX_NUM_SEQS = 16
PREFIX_TOKENS = 1024
WARM_UP_S = 5.0
SAMPLE_S = 0.05
RETRY_S = 0.2
COST = SMOLLM2_135M.cost
FULL_STEP_S = COST.constant_s + COST.prefill_s(512)
PASS_S = FULL_STEP_S + MAX_NUM_SEQS * COST.decode_s(0) + 5 * DELAY_S
"""A full step, and the messages from a frontend over the router to an engine and back."""


@dataclass(frozen=True, slots=True)
class FleetTenant:
    """One tenant: what it sends, and at which frontends."""

    name: str
    num_clients: int = 0
    """Clients with one request each at a time; 0: sends at a rate."""
    rate: float = 0.0
    is_last: bool = False
    """Whether it is at the last frontend; if not, it is at all others."""
    has_prefix: bool = False
    """Whether its prompts share a prefix of 1,024 tokens."""
    num_prompt: int = 256
    num_output: int = 48
    targets: Targets = NO_TARGETS
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """How frontends decide: alone, by one router, or by one that is killed in between."""

    num_frontends: int = 1
    is_shared: bool = True
    kills_at_s: tuple[float, ...] = ()
    outage_s: float = 1.0
    """Time until the standby decides."""
    is_fair: bool = True
    """Whether routers and engines tell tenants apart."""
    make_rule: Callable[[], PredictedTtft] = PredictedTtft
    ahead_steps: float | None = None

    @property
    def name(self) -> str:
        kind = "one router" if self.is_shared else "own routers"
        kind += ", killed" if self.kills_at_s else ""
        return f"{self.num_frontends} frontends, {kind}"


@dataclass(slots=True)
class Figures:
    """What one run measured."""

    gap_s: float
    """Largest difference of service between two tenants that both wait."""
    bound_s: float
    jain: float
    work_per_s: float
    """Machine-seconds of service per second, cached tokens counted as if computed."""
    services: dict[str, float]
    """Machine-seconds of each tenant after the warm-up."""
    ttft_p99_s: dict[str, float]
    tpot_mean_s: dict[str, float]


@dataclass(slots=True)
class _Progress:
    admitted_at: float | None = None
    num_tokens: int = 0


class FleetRig:
    """Runs tenants on a simulated fleet."""

    def __init__(
        self,
        setup: Setup,
        tenants: Sequence[FleetTenant],
        seed: int,
        slowness: float = 1.0,
    ) -> None:
        self._setup = setup
        self._tenants = list(tenants)
        self._numbers = {tenant.name: number for number, tenant in enumerate(tenants)}
        self._draw = random.Random(f"fleet/{seed}")
        policy = "fair" if setup.is_fair else "fcfs"
        config = SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512, scheduling_policy=policy
        )
        routers = [self._make_router() for _ in range(setup.num_frontends)]
        profiles = [SMOLLM2_135M.scaled(slowness)] * NUM_ENGINES
        self.fleet = VirtualFleet(routers, profiles, EngineSpec(config, CAPACITY), seed)
        self.fleet.on_event, self.fleet.on_finish = self._count, self._send_next
        self.fleet.on_refuse = self._refuse
        self._owners: dict[str, FleetTenant] = {}
        self._progress: dict[str, _Progress] = {}
        self._ids = count()
        self._service = [0.0] * len(tenants)
        self._work = 0.0
        self._waiting: list[set[str]] = [set() for _ in tenants]
        """Requests by tenant."""
        self._num_held: Counter[str] = Counter()
        self._max_held = 0
        self.log = ServiceLog()

    def _make_router(self) -> Router:
        rule = self._setup.make_rule()
        if self._setup.is_shared:
            return make_shared(rule)
        if self._setup.ahead_steps is None:
            return Router(rule)
        return Router(rule, ahead_steps=self._setup.ahead_steps)

    def run(self, until_s: float) -> Figures:
        """Send and serve for so long."""
        fleet = self.fleet
        shared = [one for one in fleet.routers if isinstance(one, SharedRouter)]
        if shared:
            frontends = SharedFrontends("ttft", shared)
            frontends.connect(fleet)
            for at in self._setup.kills_at_s:
                fleet.at(at, frontends.kill_router)
                fleet.at(at + self._setup.outage_s, frontends.start_router)
        for tenant in self._tenants:
            for number in range(tenant.num_clients):
                self._send(tenant, 1e-4 * number)
            at = 0.0
            while tenant.rate and at < until_s:
                at += self._draw.expovariate(tenant.rate)
                self._send(tenant, at)
        at = SAMPLE_S
        while at < until_s:
            fleet.at(at, self._sample)
            at += SAMPLE_S
        fleet.run(until_s)
        return self._figures(until_s)

    def _send(self, tenant: FleetTenant, at: float) -> None:
        number, draw, num_others = next(self._ids), self._draw, self._setup.num_frontends - 1
        num_own = max(16, int(tenant.num_prompt * draw.lognormvariate(0.0, 0.4)))
        num_output = max(2, int(tenant.num_output * draw.lognormvariate(0.0, 0.4)))
        prefix = [self._numbers[tenant.name]] * (PREFIX_TOKENS * tenant.has_prefix)
        name = tenant.name if self._setup.is_fair else ""
        terms = Terms(tenant=name, cache_group=tenant.name, targets=tenant.targets)
        record = FleetRecord(
            f"r{number}",
            [*prefix, *[10_000 + number] * min(num_own, 2500)],
            min(num_output, 400),
            terms,
            at,
            frontend=num_others if tenant.is_last else number % max(1, num_others),
            priority=tenant.priority,
        )
        self._owners[record.id] = tenant
        self._progress[record.id] = _Progress()
        self.log.max_prompt = max(self.log.max_prompt, len(record.token_ids))
        self.fleet.at(at + PASS_S, self._wait, record)
        self.fleet.send(record)

    def _wait(self, record: FleetRecord) -> None:
        """Count a request as waiting, unless an engine has admitted or refused it."""
        if self._progress[record.id].admitted_at is None and not record.is_refused:
            self._waiting[self._numbers[self._owners[record.id].name]].add(record.id)

    def _send_next(self, record: FleetRecord) -> None:
        tenant = self._owners[record.id]
        if tenant.num_clients:
            self._send(tenant, self.fleet.clock.now())

    def _refuse(self, record: FleetRecord) -> None:
        """Count a refusal; its client tries again shortly."""
        tenant = self._owners[record.id]
        self._waiting[self._numbers[tenant.name]].discard(record.id)
        if tenant.num_clients:
            self._send(tenant, self.fleet.clock.now() + RETRY_S)

    def _count(self, record: FleetRecord, event: Event) -> None:
        tenant, progress = self._owners[record.id], self._progress[record.id]
        number, num_prompt = self._numbers[tenant.name], len(record.token_ids)
        if isinstance(event, Admitted) and progress.admitted_at is None:
            progress.admitted_at = self.fleet.clock.now()
            self._waiting[number].discard(record.id)
            progress.num_tokens = num_prompt
            num_cached = event.num_cached_tokens
            self._service[number] += COST.prefill_s(num_prompt - num_cached, num_cached)
            self._work += COST.prefill_s(num_prompt)
            self._num_held[tenant.name] += num_prompt
        elif isinstance(event, TokensEmitted):
            seconds = len(event.token_ids) * COST.decode_s(progress.num_tokens)
            progress.num_tokens += len(event.token_ids)
            self._num_held[tenant.name] += len(event.token_ids)
            self._service[number] += seconds
            self._work += seconds
        elif isinstance(event, Finished):
            self._num_held[tenant.name] -= progress.num_tokens
        self._max_held = max(self._max_held, self._num_held[tenant.name])

    def _sample(self) -> None:
        log = self.log
        log.times.append(self.fleet.clock.now())
        log.service.append(self._service.copy())
        log.is_waiting.append([bool(waiting) for waiting in self._waiting])
        log.work.append(self._work)

    def _figures(self, until_s: float) -> Figures:
        log = self.log
        first = next(at for at, time in enumerate(log.times) if time >= WARM_UP_S)
        services = {
            tenant.name: log.service[-1][number] - log.service[first][number]
            for number, tenant in enumerate(self._tenants)
        }
        backlogged = [services[tenant.name] for tenant in self._tenants if tenant.num_clients]
        after = ServiceLog(log.times[first:], log.service[first:], log.is_waiting[first:])
        longest, held = COST.prefill_s(log.max_prompt), self._max_held
        window_s = log.times[-1] - log.times[first]
        return Figures(
            widest_gap(after),
            2 * max(longest, held * COST.decode_s(0)),
            jain(backlogged) if backlogged else 1.0,
            (log.work[-1] - log.work[first]) / window_s,
            services,
            self._by_tenant(lambda one: until_s - one.arrived_at, 99),
            self._tpots(),
        )

    def _by_tenant(self, without: Callable[[FleetRecord], float], percent: int) -> dict[str, float]:
        found: dict[str, list[float]] = {tenant.name: [] for tenant in self._tenants}
        for record in self.fleet.records.values():
            if record.arrived_at >= WARM_UP_S and not record.is_refused:
                ttft_s = without(record) if record.ttft_s is None else record.ttft_s
                found[self._owners[record.id].name].append(ttft_s)
        return {name: percentile_if_any(values, percent) or 0.0 for name, values in found.items()}

    def _tpots(self) -> dict[str, float]:
        """Return the mean time per output token after the first, by tenant."""
        found: dict[str, list[float]] = {tenant.name: [] for tenant in self._tenants}
        for record in self.fleet.records.values():
            first, last = record.first_token_at, record.finished_at
            if first is not None and last is not None and record.arrived_at >= WARM_UP_S:
                num_after = max(1, self._progress[record.id].num_tokens - len(record.token_ids) - 1)
                found[self._owners[record.id].name].append((last - first) / num_after)
        return {name: sum(one) / len(one) if one else 0.0 for name, one in found.items()}
