"""Priority at a full engine, and the bound on what it may cost those without it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, takewhile

import pytest

from benchmarks.support.wait_checker import WaitChecker
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.terms import Terms
from headway.sim import VirtualEngine
from tests.sharing.rig import make_engine

MAX_STEPS = 2
MAX_WAIT_S = 8.0


@dataclass(frozen=True, slots=True)
class Class:
    """Requests of one standing."""

    tenant: str
    priority: int = 0
    is_spot: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """Which request goes before which, by policy."""

    policy: str
    strong: Class
    weak: Class


CASES = {
    "priority": Case("priority", Class("a", 0), Class("b", 5)),
    "fair, within a tenant": Case("fair", Class("a", 0), Class("a", 5)),
    "fair, before spot": Case("fair", Class("a"), Class("b", is_spot=True)),
}
FULL = {
    "sequences": {"num_blocks": 4000, "max_num_seqs": 16},
    "blocks": {"num_blocks": 220, "max_num_seqs": 64},
}
CROWD = 30
"""Requests: more than fit the sequences or blocks, but not so many that they wait for long."""


def stream(kind: Class, name: str, rate: float, seed: int) -> Iterator[Request]:
    """Poisson arrivals without end, of prompts around 120 and outputs around 60 tokens."""
    draw = random.Random(f"{name}/{seed}")
    at = 0.0
    for number in count():
        at += draw.expovariate(rate)
        num_prompt = min(600, max(8, int(draw.lognormvariate(4.8, 0.6))))
        num_output = min(200, max(4, int(draw.lognormvariate(4.1, 0.6))))
        yield Request(
            id=f"{name}{number}",
            token_ids=[draw.randrange(1000) for _ in range(num_prompt)],
            params=SamplingParams(max_tokens=num_output),
            seed=number,
            arrived_at=at,
            priority=kind.priority,
            terms=Terms(tenant=kind.tenant, cache_group=kind.tenant, is_spot=kind.is_spot),
        )


class Crowd:
    """A stream that never ends and never falls behind: so many requests are always there."""

    def __init__(self, engine: VirtualEngine, requests: Iterator[Request], size: int) -> None:
        self._engine = engine
        self._requests = requests
        self._size = size
        self._ids: set[str] = set()

    def top_up(self) -> None:
        self._ids &= self._engine.scheduler.requests.keys()
        while len(self._ids) < self._size:
            request = next(self._requests)
            request.arrived_at = request.state_since = self._engine.clock.now()
            self._engine.core.add(request)
            self._ids.add(request.id)


@pytest.mark.parametrize("what", FULL)
@pytest.mark.parametrize("name", CASES)
def test_a_request_of_higher_priority_starts_within_two_steps_at_a_full_engine(
    name: str, what: str, is_full: bool
) -> None:
    case = CASES[name]
    engine = make_engine(**FULL[what], sink=lambda _: None, scheduling_policy=case.policy)
    crowd = Crowd(engine, stream(case.weak, "weak", 1.0, 1), CROWD)
    coming = stream(case.strong, "strong", 1.5, 2)
    request, num_started = next(coming), 0
    waiting: dict[str, int] = {}
    """For how many steps each that found the engine full has not been computed."""
    while num_started < (30 if is_full else 6):
        crowd.top_up()
        while request.arrived_at <= engine.clock.now():
            if _is_full(engine, what):
                engine.core.add(request)
                waiting[request.id] = 0
            request = next(coming)
        plan = engine.step()
        assert plan is not None
        for request_id in list(waiting):
            waiting[request_id] += 1
            assert waiting[request_id] <= MAX_STEPS, f"{request_id} has not started"
            if any(item.request_id == request_id for item in plan.scheduled):
                del waiting[request_id]
                num_started += 1


def _is_full(engine: VirtualEngine, what: str) -> bool:
    scheduler = engine.scheduler
    if what == "sequences":
        return scheduler.num_seqs == scheduler.config.max_num_seqs
    return scheduler.kv.pool.num_free < 8


@pytest.mark.parametrize("what", FULL)
def test_a_spot_backlog_takes_nothing_from_an_ordinary_tenant(what: str) -> None:
    def served(num_spot: int) -> float:
        engine = make_engine(**FULL[what], sink=lambda _: None, max_wait_s=2.0)
        ordinary = Crowd(engine, stream(Class("a"), "a", 1.0, 1), CROWD)
        spot = Crowd(engine, stream(Class("s", is_spot=True), "s", 1.0, 2), num_spot)
        while engine.clock.now() < 15.0:
            ordinary.top_up()
            spot.top_up()
            engine.step()
        account = engine.scheduler.accounts.get("a")
        assert account is not None
        return account.served

    assert served(CROWD) >= 0.99 * served(0)


@pytest.mark.parametrize("what", FULL)
@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].weak.is_spot])
def test_an_endless_stream_of_higher_priority_delays_no_other_past_the_bound(
    name: str, what: str
) -> None:
    """The bound: `max_wait_s`, and then as long as those that run at that time may go on. It
    holds while the stronger ones do not themselves wait as long: nobody can serve all at once."""
    case, checker, end_s = CASES[name], WaitChecker(), 50.0
    engine = make_engine(
        **FULL[what], sink=checker, scheduling_policy=case.policy, max_wait_s=MAX_WAIT_S
    )
    crowd = Crowd(engine, stream(case.strong, "strong", 1.0, 3), CROWD)
    weak = stream(case.weak, "weak", 0.5, 4)
    engine.send(takewhile(lambda request: request.arrived_at < end_s - MAX_WAIT_S, weak))
    while engine.clock.now() < end_s:
        crowd.top_up()
        engine.step()
    longest_run_s = max(
        min(end, end_s) - start
        for history in checker.histories.values()
        for start, end in history.runs
    )
    waits = [(event.request_id, event.waited_s) for event in checker.admitted]
    now = engine.clock.now()
    waits += [
        (history.id, now - history.waits_since)
        for history in checker.histories.values()
        if history.waits_since is not None
    ]
    of_weak = {request_id: wait for request_id, wait in waits if request_id.startswith("weak")}
    bound_s = MAX_WAIT_S + longest_run_s
    assert {one: wait for one, wait in of_weak.items() if wait > bound_s} == {}
    # Without the bound they would wait for ever: somebody stronger always did.
    assert len(of_weak) > 10
    assert statistics.median(of_weak.values()) >= MAX_WAIT_S
    assert longest_run_s < MAX_WAIT_S
    assert max(wait for one, wait in waits if one.startswith("strong")) < bound_s
