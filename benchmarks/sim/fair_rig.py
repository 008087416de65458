"""Runs one scenario of benchmarks/sim/fair_load.py on a virtual clock and measures it.

Counts service from plans and events, in the units of headway.core.waiting.accounts: prompt tokens
when they are first computed (cached ones at admission), output tokens when they are emitted, blocks
while the tenant owns them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count, islice, takewhile
from typing import Any

import numpy as np

from benchmarks.sim.fair_load import (
    PREFIX_TOKENS,
    Mix,
    RequestSpec,
    Scenario,
    Tenant,
    draw_requests,
)
from benchmarks.sim.pace_rig import CAPACITY, MAX_NUM_SEQS
from headway.config import SchedulerConfig
from headway.core.events import Admitted, Arrived, Event, Finished, Preempted, TokensEmitted
from headway.core.params import SamplingParams
from headway.core.plan import StepPlan
from headway.core.request import Request
from headway.core.terms import Terms
from headway.core.waiting.accounts import BLOCK_S_COST, CACHED_COST, OUTPUT_COST, PROMPT_COST
from headway.sim import SMOLLM2_135M, CannedExecutor, TimedExecutor, VirtualEngine

SETTINGS: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 512}
OF_POLICY: dict[str, dict[str, Any]] = {"priority": {"max_wait_s": 1e9}}
CAPACITY_S, WARM_UP_S = 120.0, 20.0


@dataclass(slots=True)
class SentRequest:
    """A request, with its progress."""

    id: str
    arrived_at: float
    spec: RequestSpec
    tenant: Tenant
    first_token_at: float | None = None
    finished_at: float | None = None
    num_preemptions: int = 0
    num_charged: int = 0
    """Prompt tokens computed, or found in the prefix cache."""
    num_ended: int = 0
    """Samples that have ended."""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at


@dataclass(slots=True)
class ServiceLog:
    """Service of each tenant over its weight, and who waits, at the end of each step.

    A tenant waits in a step if it has waiting requests from the scheduling pass to the end.
    """

    times: list[float] = field(default_factory=list)
    service: list[list[float]] = field(default_factory=list)
    is_waiting: list[list[bool]] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    """Weighted prompt tokens, cached or not, and output tokens of all tenants."""
    num_output: list[int] = field(default_factory=list)
    max_prompt: int = 0
    max_running_tokens: int = 0
    """Most tokens of the running requests of one tenant."""

    @property
    def bound(self) -> float:
        """Bound of headway.core.waiting.fair, not divided by the smaller weight."""
        return 2 * max(PROMPT_COST * self.max_prompt, OUTPUT_COST * self.max_running_tokens)

    def since_warm_up(self, until_s: float) -> tuple[int, int]:
        """Return the first and the last step after the warm-up."""
        first, last = np.searchsorted(self.times, [WARM_UP_S, until_s])
        return int(first), min(int(last), len(self.times) - 1)


class TenantRig:
    """Runs some or all tenants of a scenario on one simulated engine."""

    def __init__(
        self,
        scenario: Scenario,
        tenants: Sequence[Tenant],
        policy: str,
        seed: int,
        slowness: float = 1.0,
    ) -> None:
        config = SchedulerConfig(**SETTINGS, **OF_POLICY.get(policy, {}), scheduling_policy=policy)
        profile = SMOLLM2_135M.scaled(slowness)
        executor = TimedExecutor(CannedExecutor(CAPACITY), profile, seed)
        self.engine = VirtualEngine(config, executor, self._consume, scenario.has_cache)
        self.engine.may_join, self.engine.on_step = self._arrive, self._record_step
        self.log = ServiceLog()
        self.records: dict[str, SentRequest] = {}
        self._sent: dict[str, SentRequest] = {}
        self._prompt_numbers, self._resend_numbers = count(), count()
        self._tenants = tenants
        self._numbers = {tenant.name: number for number, tenant in enumerate(tenants)}
        self._service = [0.0] * len(tenants)
        self._num_waiting = [0] * len(tenants)
        self._waiting_ids: set[str] = set()
        self._work, self._num_output = 0.0, 0
        self._request_streams: dict[str, Iterator[RequestSpec]] = {}

    def send(self, scenario: Scenario, seed: int, until_s: float) -> None:
        """Send all requests of the open loops, and the first of the closed loops."""
        requests: list[SentRequest] = []
        for tenant in self._tenants:
            if tenant.is_backlogged:
                stream = self._request_streams[tenant.name] = draw_requests(
                    scenario, tenant, 0.0, seed
                )
                chosen = islice(stream, tenant.num_clients)
            else:
                capacity = measure_capacity(tenant.mix, scenario.has_cache, tenant.prefix_share)
                stream = draw_requests(scenario, tenant, capacity, seed)
                chosen = takewhile(lambda spec: spec.at < until_s, stream)
            requests += [
                SentRequest(f"{tenant.name}-{number}", spec.at, spec, tenant)
                for number, spec in enumerate(chosen)
            ]
        for record in sorted(requests, key=lambda record: record.arrived_at):
            self._send(record)

    def run(self, until_s: float, drain: bool) -> None:
        """Serve the requests that arrive before `until_s`; with `drain`, to their end."""
        self.engine.run(until_s, drain)

    def _send_next(self, tenant: Tenant) -> None:
        if tenant.is_backlogged:
            spec = next(self._request_streams[tenant.name])
            number, now = next(self._resend_numbers), self.engine.clock.now()
            self._send(SentRequest(f"{tenant.name}-again-{number}", now, spec, tenant))

    def _send(self, record: SentRequest) -> None:
        self._sent[record.id] = record
        self.engine.send([self._request(record)])

    def _arrive(self, request: Request) -> bool:
        record = self.records[request.id] = self._sent.pop(request.id)
        self.log.max_prompt = max(self.log.max_prompt, record.spec.num_prompt)
        return True

    def _request(self, record: SentRequest) -> Request:
        spec, tenant = record.spec, record.tenant
        prefix = [self._numbers[tenant.name]] * (PREFIX_TOKENS * spec.has_prefix)
        own = [1000 + next(self._prompt_numbers)] * (spec.num_prompt - len(prefix))
        return Request(
            id=record.id,
            token_ids=prefix + own,
            params=SamplingParams(max_tokens=spec.num_output, n=spec.num_samples),
            seed=0,
            arrived_at=record.arrived_at,
            priority=tenant.priority,
            terms=Terms(tenant=tenant.name, weight=tenant.weight, cache_group=tenant.name),
        )

    def _consume(self, events: Sequence[Event]) -> None:
        now = self.engine.clock.now()
        for event in events:
            if isinstance(event, TokensEmitted):
                record = self._record(event.request_id)
                record.first_token_at = record.first_token_at or now
                self._num_output += len(event.token_ids)
                self._work += OUTPUT_COST * len(event.token_ids)
                self._charge(record, OUTPUT_COST * len(event.token_ids))
            elif isinstance(event, Finished):
                record = self._record(event.request_id)
                self._set_waiting(event.request_id, record, False)
                record.num_ended += 1
                if record.num_ended == record.spec.num_samples:
                    record.finished_at = now
                    self._send_next(record.tenant)
            elif isinstance(event, Arrived):
                self._set_waiting(event.request_id, self._record(event.request_id), True)
            elif isinstance(event, Admitted):
                self._admit(event)
            elif isinstance(event, Preempted):
                record = self._record(event.request_id)
                record.num_preemptions += 1
                self._set_waiting(event.request_id, record, True)

    def _admit(self, event: Admitted) -> None:
        record = self._record(event.request_id)
        self._set_waiting(event.request_id, record, False)
        if not event.is_resumed and "#" not in event.request_id:
            num_cached = min(event.num_cached_tokens, record.spec.num_prompt)
            record.num_charged = num_cached
            self._work += PROMPT_COST * num_cached
            self._charge(record, CACHED_COST * num_cached)

    def _record(self, request_id: str) -> SentRequest:
        return self.records[request_id.partition("#")[0]]

    def _charge(self, record: SentRequest, amount: float) -> None:
        self._service[self._numbers[record.tenant.name]] += amount / record.tenant.weight

    def _set_waiting(self, request_id: str, record: SentRequest, is_waiting: bool) -> None:
        if (request_id in self._waiting_ids) == is_waiting:
            return
        (self._waiting_ids.add if is_waiting else self._waiting_ids.remove)(request_id)
        self._num_waiting[self._numbers[record.tenant.name]] += 1 if is_waiting else -1

    def _record_step(self, plan: StepPlan) -> None:
        """Record service and waiting tenants after a step."""
        for item in plan.scheduled:
            if "#" in item.request_id:  # the first sample computes the prompt for all
                continue
            record = self._record(item.request_id)
            end = min(item.start + len(item.token_ids), record.spec.num_prompt)
            if end > record.num_charged:
                num_fresh, record.num_charged = end - record.num_charged, end
                self._work += PROMPT_COST * num_fresh
                self._charge(record, PROMPT_COST * num_fresh)
        scheduler, elapsed_s = self.engine.scheduler, self.engine.executor.step_s
        for name, blocks in scheduler.kv.blocks_by_tenant.items():
            number = self._numbers[name]
            cost = BLOCK_S_COST * len(blocks) * elapsed_s
            self._service[number] += cost / self._tenants[number].weight
        num_tokens = [0] * len(self._tenants)
        for request in scheduler.running:
            num_tokens[self._numbers[request.terms.tenant]] += request.num_tokens
        log = self.log
        log.max_running_tokens = max(log.max_running_tokens, *num_tokens)
        log.times.append(self.engine.clock.now())
        log.service.append(self._service.copy())
        log.is_waiting.append([count > 0 for count in self._num_waiting])
        log.work.append(self._work)
        log.num_output.append(self._num_output)


@cache
def measure_capacity(mix: Mix, has_cache: bool, prefix_share: float) -> float:
    """Return requests per second of an engine that is full of this kind."""
    tenant = Tenant("capacity", mix, 2 * MAX_NUM_SEQS, prefix_share=prefix_share)
    scenario = Scenario("capacity", (tenant,), has_cache)
    rig = TenantRig(scenario, scenario.tenants, "fcfs", seed=0)
    rig.send(scenario, 0, CAPACITY_S)
    rig.run(CAPACITY_S, drain=False)
    ends = [record.finished_at for record in rig.records.values() if record.finished_at]
    num_steady = sum(WARM_UP_S <= at < CAPACITY_S for at in ends)
    return num_steady / (CAPACITY_S - WARM_UP_S)


def widest_gap(log: ServiceLog) -> float:
    """Return the largest difference of service between two tenants.

    It is taken over any span in which both had waiting requests without a break.
    """
    service = np.array(log.service)
    is_waiting = np.array(log.is_waiting)
    widest = 0.0
    num_tenants = service.shape[1]
    for one in range(num_tenants):
        for other in range(one + 1, num_tenants):
            (steps,) = np.nonzero(is_waiting[:, one] & is_waiting[:, other])
            if not len(steps):
                continue
            lead = service[steps, one] - service[steps, other]
            starts = np.concatenate(([0], np.nonzero(np.diff(steps) > 1)[0] + 1))
            spans = np.maximum.reduceat(lead, starts) - np.minimum.reduceat(lead, starts)
            widest = max(widest, float(spans.max()))
    return widest


def jain(amounts: Sequence[float]) -> float:
    """Return Jain's index: 1 if all amounts are equal, 1/n if one has everything."""
    total = sum(amounts)
    squares = sum(amount**2 for amount in amounts)
    return total**2 / (len(amounts) * squares) if squares else 0.0
