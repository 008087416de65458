"""The real engine process with injected faults: `python -m benchmarks.faults.faulty_engine`."""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.faults.injection import Inbox
from headway.core.executor import Capacity, Executor, Ticket
from headway.core.plan import Failure, Sample, StepPlan, StepResult
from headway.engine.process import loop as process
from headway.engine_main import main
from headway.executors.executor import ModelExecutor

SLOWNESS = 100


class FaultyExecutor:
    """Passes calls to an executor, and applies injected faults."""

    def __init__(self, executor: Executor, inbox: Inbox) -> None:
        self._executor = executor
        self._inbox = inbox
        self._step_s = 0.05
        if isinstance(executor, ModelExecutor):
            self._poison_samples(executor)

    def _poison_samples(self, executor: ModelExecutor) -> None:
        model: Any = executor._model
        sample = model.sample

        def faulty_sample(*args: Any) -> list[Sample | Failure]:
            outcomes = sample(*args)
            if outcomes and self._inbox.take("nan"):
                outcomes[0] = Failure("the model's scores are not finite (nan)")
            return outcomes

        model.sample = faulty_sample

    def capacity(self) -> Capacity:
        return self._executor.capacity()

    def submit(self, plan: StepPlan) -> Ticket:
        match self._inbox.take("exception", "memory", "slow"):
            case "exception":
                raise RuntimeError("a fault in the step")
            case "memory":
                raise MemoryError("a fault in the step")
            case "slow":
                time.sleep(SLOWNESS * self._step_s)
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._executor.collect(ticket)
        self._step_s = result.elapsed_s
        return result

    def close(self) -> None:
        self._executor.close()


def corrupt_reports(inbox: Inbox) -> None:
    """Send an invalid report frame when the fault is injected."""
    encode = process.encode

    def faulty_encode(report: object) -> bytes:
        frame = encode(report)
        return frame[: len(frame) // 2] + b"\xc1" if inbox.take("garbage") else frame

    process.encode = faulty_encode


if __name__ == "__main__":
    faults = Inbox("engine")
    corrupt_reports(faults)
    sys.exit(main(lambda executor: FaultyExecutor(executor, faults)))
