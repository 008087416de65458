"""Time of a run by part: executor parts, and the rest of the wall time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rich.table import Table

from headway.bench.offline.modes import Bench
from headway.workload import OfflineWorkload

OUTSIDE = "scheduler and events"


@runtime_checkable
class Profiled(Protocol):
    """An executor that reports its time by part."""

    def profile(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds by part of one continuous run; they add up to the wall time."""

    num_steps: int
    elapsed_s: float
    seconds: Mapping[str, float]


def run_profile(bench: Bench, workload: OfflineWorkload) -> Profile:
    """Profile one continuous run; transport and idling exist only in a server."""
    executor = bench.executor
    if not isinstance(executor, Profiled):
        raise TypeError("this executor has no profile")
    executor.profile()
    record = bench.run_continuous(workload)
    seconds = executor.profile()
    in_executor = sum(step.elapsed_s for step in record.steps)
    seconds["rest of the executor"] = in_executor - sum(seconds.values())
    seconds[OUTSIDE] = record.elapsed_s - in_executor
    return Profile(len(record.steps), record.elapsed_s, seconds)


def profile_table(profile: Profile) -> Table:
    """Return milliseconds per step and shares, largest first."""
    table = Table(title=f"Where the time went: {profile.num_steps} steps")
    table.add_column("part")
    table.add_column("ms per step", justify="right")
    table.add_column("share", justify="right")
    for part, seconds in sorted(profile.seconds.items(), key=lambda item: -item[1]):
        per_step = 1e3 * seconds / profile.num_steps
        table.add_row(part, f"{per_step:.3f}", f"{seconds / profile.elapsed_s:.1%}")
    table.add_row(
        "all", f"{1e3 * profile.elapsed_s / profile.num_steps:.3f}", "100.0%", style="bold"
    )
    return table
