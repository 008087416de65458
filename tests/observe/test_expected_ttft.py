"""The expected TTFT, against what the scheduler then does on a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from headway.config import SchedulerConfig
from headway.core.events import Event, Stepped
from headway.core.executor import Capacity
from headway.observe.metrics.expected_ttft import (
    DEFAULT_OUTPUT,
    DEFAULT_PROMPT,
    Backlog,
    ExpectedTtft,
    TypicalRequest,
    predict_ttft_s,
)
from headway.observe.requests.table import RequestTable
from headway.sim.engine import VirtualEngine
from headway.sim.steps import SMOLLM2_135M, CannedExecutor, StepProfile, TimedExecutor
from tests.support.harness import make_request

PROMPT, OUTPUT = 200, 60


class Rig:
    """A scheduler on a virtual clock, and what its server would predict."""

    def __init__(self, max_num_seqs: int = 64, num_blocks: int = 4000) -> None:
        config = SchedulerConfig(scheduling_policy="fcfs", max_num_seqs=max_num_seqs)
        canned = CannedExecutor(Capacity(num_blocks, 16, 4096))
        profile = StepProfile(SMOLLM2_135M.cost)
        self.engine = VirtualEngine(config, TimedExecutor(canned, profile, seed=1), self.consume)
        self.table = RequestTable()
        self.steps: list[Stepped] = []
        self.expected = ExpectedTtft(self.table, lambda: self.steps)
        self.ttft_s: dict[str, float] = {}
        self._num_sent = 0

    def consume(self, events: Sequence[Event]) -> None:
        self.steps = [one for one in events if isinstance(one, Stepped)][-1:] or self.steps
        changes = self.table.consume(events)
        self.expected.consume(changes)
        for part in changes.first_tokens:
            self.ttft_s[part.id] = part.ttft_s or 0.0

    def send(self, num_requests: int, prompt: int = PROMPT, output: int = OUTPUT) -> str:
        """Have requests arrive now; return the id of the last."""
        request_id = ""
        for _ in range(num_requests):
            self._num_sent += 1
            request_id = f"{self._num_sent:04}"
            now = self.engine.clock.now()
            self.engine.core.add(
                make_request(request_id, prompt, max_tokens=output, arrived_at=now)
            )
        return request_id

    def warm_up(self) -> None:
        for _ in range(3):
            self.send(4)
            self.engine.run()


def probe(rig: Rig) -> tuple[float, float]:
    """Return the TTFT that is predicted now, and that of a request that arrives now."""
    predicted_s = rig.expected.seconds()
    last = rig.send(1)
    rig.engine.run()
    return predicted_s, rig.ttft_s[last]


def test_nothing_is_said_before_the_steps_are_known() -> None:
    rig = Rig()
    assert rig.expected.seconds() == 0.0
    assert rig.expected.typical == TypicalRequest(DEFAULT_PROMPT, 1.0, DEFAULT_OUTPUT)
    rig.send(1, output=4)
    rig.engine.run()
    assert rig.expected.seconds() == 0.0
    rig.warm_up()
    assert rig.expected.seconds() > 0.0
    assert rig.expected.typical.num_uncached == PROMPT


@pytest.mark.parametrize(
    ("settings", "num_before", "num_steps"),
    [
        ({}, 0, 0),  # idle
        ({}, 12, 40),  # all decode
        ({}, 40, 1),  # prompts wait
        ({}, 60, 10),
        ({"max_num_seqs": 8}, 24, 20),  # every sequence is taken
        ({"max_num_seqs": 8}, 48, 20),
        ({"num_blocks": 160}, 30, 20),  # every KV block is taken
    ],
)
def test_a_request_has_its_first_token_about_when_it_is_predicted(
    settings: dict[str, int], num_before: int, num_steps: int
) -> None:
    rig = Rig(**settings)
    rig.warm_up()
    rig.send(num_before)
    for _ in range(num_steps):
        rig.engine.step()
    predicted_s, actual_s = probe(rig)
    assert predicted_s == pytest.approx(actual_s, rel=0.2)


def test_the_longer_the_line_the_later() -> None:
    rig = Rig(max_num_seqs=16)
    rig.warm_up()
    found = [rig.expected.seconds()]
    for _ in range(6):
        rig.send(8)
        rig.engine.step()
        found.append(rig.expected.seconds())
    assert found == sorted(found) and found[-1] > 10 * found[0]


def test_engines_share_a_backlog_and_strangers_count() -> None:
    rig = Rig()
    rig.warm_up()
    rig.send(40)
    rig.engine.step()
    [step], typical = rig.steps, rig.expected.typical
    backlog = Backlog(40 * PROMPT, 40)
    one, two = (
        predict_ttft_s([replace(step, num_waiting=40 // number)] * number, backlog, typical)
        for number in (1, 2)
    )
    assert 1.5 < one / two < 2.1
    alone = predict_ttft_s([replace(step, num_waiting=0)], Backlog(), typical)
    others = predict_ttft_s([replace(step, num_waiting=40)], Backlog(), typical)
    assert others == pytest.approx(one, rel=0.01) and others > 5 * alone


def test_cached_prompts_count_for_what_is_computed() -> None:
    rig = Rig()
    tokens = list(range(320))
    for number in range(20):
        now = rig.engine.clock.now()
        rig.engine.core.add(make_request(f"{number}", tokens, max_tokens=3, arrived_at=now))
        rig.engine.run()
    assert rig.expected.typical.num_uncached <= 16
    assert rig.expected.typical.uncached_share < 0.2
