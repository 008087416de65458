"""The Executor port: the one seam between scheduling and computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headway.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold."""

    num_blocks: int
    block_size: int
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """Names a submitted step."""

    step_id: int


class Executor(Protocol):
    """Runs step plans. Submitting and collecting are apart so that steps can overlap later;
    today at most one step is in flight."""

    def capacity(self) -> Capacity: ...

    def submit(self, plan: StepPlan) -> Ticket: ...

    def collect(self, ticket: Ticket) -> StepResult: ...

    def close(self) -> None: ...
