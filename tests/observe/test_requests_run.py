"""Accounts of requests that the real scheduler ran: their causes add up, and are the true ones."""

from __future__ import annotations

import random

import pytest

from headway.core.causes import WaitCause
from headway.core.events import Admitted, Arrived, Finished, Preempted, TokensEmitted
from headway.core.terms import Terms
from headway.engine.process.messages import all_events, batch_events
from headway.observe.requests.table import RequestTable, account
from headway.observe.trace.account import UNRECORDED, RequestAccount
from headway.observe.trace.explain import paragraph
from tests.support.harness import Harness


class TrackedRun(Harness):
    """An engine on a virtual clock, whose events reach a request table as in a server:
    sorted by kind, a step at a time."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # pyright: ignore[reportArgumentType]
        self.table = RequestTable()
        self.accounts: dict[str, RequestAccount] = {}
        self._num_consumed = 0

    def tell(self) -> None:
        batch = batch_events(self.events[self._num_consumed :])
        self._num_consumed = len(self.events)
        for request in self.table.consume(all_events(batch)).ended:
            self.accounts[request.id] = account(request, self.clock.now(), 0.0)

    def step_for(self, seconds: float) -> None:
        plan = self.core.begin_step()
        self.advance(seconds)
        if plan is not None:
            self.core.end_step()
        self.tell()

    def drain(self) -> None:
        while self.core.has_work:
            self.step_for(0.1)


def test_the_causes_of_500_requests_add_up() -> None:
    draw = random.Random(3)
    run = TrackedRun(num_blocks=32, max_num_seqs=8, scheduling_policy="fair", max_wait_s=5.0)
    tenants = [Terms(f"tenant-{n}", "gold", weight=1.0 + n % 2) for n in range(5)]
    for number in range(500):
        fields = {"n": draw.choice((1, 1, 1, 2)), "priority": draw.choice((0, 0, 1))}
        run.add(
            f"r-{number:x}",
            draw.randint(1, 20),
            max_tokens=draw.randint(1, 40),
            terms=draw.choice(tenants),
            **fields,
        )
        run.advance(draw.uniform(0.0, 0.01))
        run.tell()
        for _ in range(draw.randint(0, 12)):
            run.step_for(draw.uniform(0.005, 0.02))
        if number % 50 == 49:
            if live := list(run.scheduler.requests):
                run.abort(draw.choice(live))
            run.tell()
    run.drain()
    run.table.check()
    assert len(run.accounts) == 500 and len(run.table) == 0
    waited_s = {f"r-{number:x}": 0.0 for number in range(500)}
    for event in run.seen(Admitted):
        waited_s[event.request_id.partition("#")[0]] += event.waited_s
    left = {event.request_id for event in run.seen(Finished) if event.causes}
    for found in run.accounts.values():
        seconds = {share.cause: share.seconds for share in found.causes}
        assert sum(seconds.values()) == pytest.approx(found.queue_s, abs=1e-6)
        assert seconds.get(UNRECORDED, 0.0) < 1e-3
        if not any(name.partition("#")[0] == found.id for name in left):
            assert found.queue_s == pytest.approx(waited_s[found.id], abs=1e-3)
    check_preemptions(run)
    causes = {share.cause for found in run.accounts.values() for share in found.causes}
    assert causes >= {WaitCause.KV_BLOCKS, WaitCause.TENANT_SHARE, WaitCause.TIER_ORDER}
    num_tokens = sum(len(event.token_ids) for event in run.seen(TokensEmitted))
    assert sum(found.num_output_tokens for found in run.accounts.values()) == num_tokens


def check_preemptions(run: TrackedRun) -> None:
    """Accounts have every preemption, with its requester and the time until it resumed."""
    preempted = run.seen(Preempted)
    assert len(preempted) > 20
    assert sum(found.num_preemptions for found in run.accounts.values()) == len(preempted)
    arrived = {event.request_id for event in run.seen(Arrived)}
    for found in run.accounts.values():
        entries = [entry for entry in found.timeline if entry.kind == "preempted"]
        resumed = [entry for entry in entries if entry.seconds is not None]
        assert all(entry.by.partition("#")[0] in arrived for entry in entries)
        assert found.finish_reason == "abort" or len(resumed) == len(entries)


# ------------------------------------------------- situations with one true cause


def text_of(run: TrackedRun, name: str) -> str:
    run.drain()
    return paragraph(run.accounts[name])


def test_blocked_by_blocks() -> None:
    run = TrackedRun(num_blocks=8, scheduling_policy="fair")
    run.add("b-1", 24, max_tokens=4, terms=Terms("b"))
    run.step_for(0.5)
    run.add("a-1", 24, max_tokens=2, terms=Terms("a"))
    text = text_of(run, "a-1")
    assert "s for KV blocks held mostly by tenant b" in text
    assert "share" not in text and "tier" not in text


def test_blocked_by_the_share_of_the_tenant() -> None:
    run = TrackedRun(num_blocks=64, max_num_seqs=1, scheduling_policy="fair")
    a, b = Terms("a"), Terms("b")
    run.add("a-0", 24, max_tokens=4, terms=a)
    run.step_for(0.1)
    run.add("b-0", 4, max_tokens=8, terms=b)
    run.add("b-1", 4, max_tokens=8, terms=b)
    run.add("a-1", 4, max_tokens=2, terms=a)
    assert "because its tenant had used its share" in text_of(run, "a-1")


def test_blocked_by_a_higher_tier() -> None:
    run = TrackedRun(num_blocks=64, max_num_seqs=1, scheduling_policy="fair")
    run.add("a-0", 4, max_tokens=4, terms=Terms("a"))
    run.step_for(0.1)
    run.add("spot-1", 4, max_tokens=2, terms=Terms("c", is_spot=True))
    run.add("a-1", 4, max_tokens=8, terms=Terms("a"))
    assert "because requests of a higher tier went first" in text_of(run, "spot-1")
