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
    num_slots: int = 0
    """Blocks whose contents the offload store can keep; 0 if there is none."""
    block_copy_s: float = 0.0
    """Seconds to move one block to the offload store or back, as measured at the start."""


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
