"""What an executor may answer, beyond one token per request."""

from __future__ import annotations

from headway.core.executor import Ticket
from headway.core.plan import Sample, StepPlan, StepResult
from headway.core.request import FinishReason
from headway.executors.fake import FakeExecutor
from tests.support.harness import Harness


class Answering(FakeExecutor):
    """Answers every request with the same outcome, whatever was asked."""

    def __init__(self, outcome: Sample | None) -> None:
        super().__init__(Harness().capacity)
        self._outcome = outcome
        self._num_scheduled = 0

    def submit(self, plan: StepPlan) -> Ticket:
        self._num_scheduled = len(plan.scheduled)
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        elapsed_s = super().collect(ticket).elapsed_s
        return StepResult(ticket.step_id, (self._outcome,) * self._num_scheduled, elapsed_s)


def test_a_sample_may_have_several_tokens():
    engine = Harness(executor=Answering(Sample((1, 2))))
    engine.add("a", 4, max_tokens=9)
    for _ in range(9):
        engine.core.step()
    assert engine.finish("a").num_output_tokens == 9


def test_an_outcome_that_is_missing_ends_its_request_with_an_error():
    engine = Harness(executor=Answering(None))
    engine.add("a", 4, max_tokens=9)
    engine.core.step()
    ended = engine.finish("a")
    assert ended.reason is FinishReason.ERROR
    assert "sampled nothing" in ended.message
