"""An engine on a clock that moves with its steps."""

from __future__ import annotations

import random
from typing import Any

from headway.core.events import Refused
from headway.core.executor import Capacity
from headway.core.slo.steptime import StepCost, StepShape
from headway.core.terms import Targets, Terms
from headway.executors.fake import FakeExecutor
from headway.sim import StepProfile, TimedExecutor
from tests.support.harness import Harness, make_request

COST = StepCost(0.01, 1e-3, 1e-3, 0.0, 0.0)
"""A prefill token and a decode take a millisecond each, a step 10 ms by itself."""
CAPACITY = Capacity(num_blocks=1000, block_size=4, max_model_len=10_000)


class Paced(Harness):
    """An engine whose clock moves with its steps, and which knows what they cost."""

    def __init__(self, **settings: Any) -> None:
        settings = {"max_num_batched_tokens": 512, "prefill_floor": 8, **settings}
        settings = {"scheduling_policy": "deadline", "max_num_seqs": 64, **settings}
        self.timed = TimedExecutor(FakeExecutor(CAPACITY), StepProfile(COST))
        super().__init__(1000, 4, False, self.timed, **settings)
        for number in range(300):
            shape = StepShape(number % 37, 64 * (number % 5), number % 37 * 40)
            self.scheduler.pacer.model.observe(shape, COST.predict(shape))
        self.add("first", 4, max_tokens=4)
        self.run()
        self.events.clear()

    def end(self) -> None:
        self.advance(self.timed.step_s)
        super().end()

    def ask(
        self, name: str, prompt: int, max_tokens: int, tenant: str = "", **targets: float
    ) -> None:
        terms = Terms(tenant=tenant, targets=Targets(**targets))
        self.add(name, prompt, max_tokens=max_tokens, terms=terms)

    def refusal(self, name: str) -> Refused | None:
        return next(iter(self.seen(Refused, name)), None)


def crowded(num_open: int) -> Paced:
    """Return an engine with this many open requests of 50 tenants."""
    engine, draw = Paced(scheduling_policy="fair"), random.Random(3)
    for number in range(num_open):
        targets = Targets(deadline_s=draw.uniform(40_000.0, 60_000.0))
        terms = Terms(tenant=f"t{number % 50}", targets=targets)
        engine.core.add(make_request(f"r{number}", 8, max_tokens=16, terms=terms))
    assert engine.refusal(f"r{num_open - 1}") is None
    return engine
