"""Passes that are cut short because nobody waits plan what whole passes plan."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headway.core.engine import EngineCore
from headway.core.events import Event
from headway.core.plan import StepPlan
from headway.core.waiting.queue import WaitingQueue
from headway.record.entries import digest_plan
from tests.properties.rig import Rig
from tests.properties.walk import Walker

NUM_STEPS = 120
SEEDS = range(5)


class _Diary:
    """Digests of the plans of an engine, and its events."""

    def __init__(self) -> None:
        self.plans: list[bytes] = []
        self.events: list[str] = []


def walk(seed: int) -> _Diary:
    diary = _Diary()

    class DiaryRig(Rig):
        def make_core(self) -> EngineCore:
            def keep(events: Sequence[Event]) -> None:
                diary.events.extend(map(repr, events))
                self.ledger(events)

            return EngineCore(self.scheduler, self.executor, self.clock, keep)

        def begin(self) -> StepPlan | None:
            plan = super().begin()
            diary.plans.append(b"" if plan is None else digest_plan(plan))
            return plan

    walker = Walker(random.Random(f"quiet/{seed}"), DiaryRig)
    for _ in range(NUM_STEPS):
        walker.act()
    return diary


def test_random_walks_have_equal_plans_and_events(monkeypatch: pytest.MonkeyPatch):
    is_quiet, num_quiet = WaitingQueue.is_quiet, 0

    def counted(queue: WaitingQueue) -> bool:
        nonlocal num_quiet
        found = bool(is_quiet.fget and is_quiet.fget(queue))
        num_quiet += found
        return found

    for seed in SEEDS:
        monkeypatch.setattr(WaitingQueue, "is_quiet", property(counted))
        short = walk(seed)
        monkeypatch.setattr(WaitingQueue, "is_quiet", property(lambda _queue: False))
        whole = walk(seed)
        assert short.plans == whole.plans
        assert short.events == whole.events
    assert num_quiet > 100
