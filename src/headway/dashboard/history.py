"""Counts of the last ten minutes, in intervals of five seconds."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from headway.core.events import Stepped
from headway.core.owners import BlockOwners
from headway.dashboard.waits import INTERVAL_S, NUM_INTERVALS

MAX_KINDS = 32
"""Most reasons or causes that one interval counts apart."""


@dataclass(slots=True)
class TenantLoad:
    """Requests of one tenant that run or wait; each prompt and sample counts."""

    num_running: int = 0
    num_waiting: int = 0

    @property
    def size(self) -> int:
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True)
class ServerState:
    """Requests and KV blocks at one time, of all engines together."""

    loads: dict[str, TenantLoad]
    """The tenants with the most requests, the most first."""
    others: TenantLoad
    """All other tenants."""
    num_blocks: int
    owners: BlockOwners


@dataclass(slots=True)
class HistoryInterval:
    """What happened in five seconds, and the state at their end."""

    number: int
    """Start of the interval over INTERVAL_S."""
    num_steps: int = 0
    step_s: float = 0.0
    max_step_s: float = 0.0
    num_predicted: int = 0
    predicted_s: float = 0.0
    model_error: float | None = None
    """Median relative error of the step-time model."""
    num_step_tokens: int = 0
    num_output_tokens: int = 0
    num_arrived: int = 0
    num_finished: int = 0
    num_first_tokens: int = 0
    ttft_s: float = 0.0
    wait_s: float = 0.0
    """Seconds of the waits that ended here."""
    num_met: int = 0
    num_missed: int = 0
    num_restarts: int = 0
    refusals: Counter[str] = field(default_factory=Counter[str])
    preemptions: Counter[str] = field(default_factory=Counter[str])
    state: ServerState | None = None
    """The state at the end; None before the server started."""

    def step(self, event: Stepped) -> None:
        """Add a step."""
        self.num_steps += 1
        self.step_s += event.elapsed_s
        self.max_step_s = max(self.max_step_s, event.elapsed_s)
        if event.predicted_s:
            self.num_predicted += 1
            self.predicted_s += event.predicted_s
        if event.forecast is not None:
            self.model_error = event.forecast.speed.cost.error
        self.num_step_tokens += event.num_tokens


def count_kind(kinds: Counter[str], kind: str) -> None:
    """Count one of a kind; kinds beyond MAX_KINDS are counted together."""
    kinds[kind if kind in kinds or len(kinds) < MAX_KINDS else "other"] += 1


class History:
    """The last NUM_INTERVALS intervals, the newest last."""

    def __init__(self, now: float) -> None:
        number = int(now // INTERVAL_S)
        numbers = range(number - NUM_INTERVALS + 1, number + 1)
        self.intervals = deque((HistoryInterval(one) for one in numbers), maxlen=NUM_INTERVALS)

    @property
    def newest(self) -> HistoryInterval:
        return self.intervals[-1]

    def advance(self, now: float, state: ServerState) -> None:
        """Begin the interval of `now`; without an event, the state has not changed since."""
        number, last = int(now // INTERVAL_S), self.newest
        last.state = state
        for one in range(max(last.number + 1, number - NUM_INTERVALS + 1), number + 1):
            self.intervals.append(HistoryInterval(one, state=state))
