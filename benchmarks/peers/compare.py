"""Runs every contender on every workload in rounds, one at a time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.peers.catalog import ROOT
from benchmarks.peers.host import Launch, RunnerError, RunnerProcess
from benchmarks.peers.results import Result, metrics_of
from headway.bench.steal import steal_text

T = TypeVar("T")
Record = Callable[[Result], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Contenders, workloads, samplings and rounds.

    A process stays loaded between its turns unless `starts_afresh`.
    """

    contenders: tuple[Launch, ...]
    workloads: tuple[str, ...]
    samplings: tuple[str, ...]
    rounds: int
    logs: Path
    timeout_s: float
    starts_afresh: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """A workload, and how its requests sample."""

    workload: str
    sampling: str

    def __str__(self) -> str:
        return f"{self.workload}, {self.sampling}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded process, stopped outside its turns."""

    process: RunnerProcess
    load_s: float
    details: dict[str, Any]


class Comparison:
    """Context manager that owns the runner processes of a comparison."""

    def __init__(self, plan: Plan, record: Record) -> None:
        self._plan = plan
        self._record = record
        self._loaded: dict[str, Loaded] = {}
        self._unloadable: dict[str, str] = {}
        self._failed: dict[tuple[str, Work], str] = {}
        self._started = time.strftime("%Y-%m-%dT%H:%M:%S")

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._loaded):
            self._close(name)

    def run(self) -> None:
        """Run the rounds interleaved.

        In each round every contender runs a workload before the next workload begins, and greedy
        before sampled. The order rotates by one per round.
        """
        plan = self._plan
        for number in range(1, plan.rounds + 1):
            for work in starmap(Work, product(plan.workloads, plan.samplings)):
                for launch in rotated(plan.contenders, number - 1):
                    self._turn(number, work, launch)

    def _turn(self, number: int, work: Work, launch: Launch) -> None:
        reason = (
            launch.unavailable
            or self._unloadable.get(launch.name)
            or self._failed.get((launch.name, work))
        )
        figures: dict[str, Any] = {}
        if reason is None:
            say(f"round {number}, {work}: {launch.name}")
            try:
                figures = self._measure(work, launch)
            except (RunnerError, OSError) as error:
                reason = str(error)
                # A failed workload is not run again: it would cost time in every round.
                self._failed[launch.name, work] = reason
                self._close(launch.name)
        result = Result(
            number, work.workload, launch.name, figures, reason, self._started, work.sampling
        )
        say(f"  {launch.name}: {outcome_of(result)}")
        self._record(result)

    def _measure(self, work: Work, launch: Launch) -> dict[str, Any]:
        loaded = self._load(launch)
        loaded.process.continue_group()
        figures = loaded.process.ask(work.workload, work.sampling, self._plan.timeout_s)
        loaded.process.stop_group()
        if self._plan.starts_afresh:
            self._close(launch.name)
        return {**figures, "load_s": loaded.load_s, "details": loaded.details}

    def _load(self, launch: Launch) -> Loaded:
        if launch.name in self._loaded:
            return self._loaded[launch.name]
        process = RunnerProcess(launch, ROOT, log_of(self._plan.logs, launch.name))
        try:
            ready = process.wait_ready(self._plan.timeout_s)
        except RunnerError as error:
            process.close()
            self._unloadable[launch.name] = f"it did not load: {error}"
            raise
        load_s = time.monotonic() - process.started_at
        self._loaded[launch.name] = Loaded(process, load_s, ready["details"])
        return self._loaded[launch.name]

    def _close(self, name: str) -> None:
        loaded = self._loaded.pop(name, None)
        if loaded is not None:
            loaded.process.close()


def rotated(contenders: Sequence[T], by: int) -> list[T]:
    start = by % len(contenders)
    return [*contenders[start:], *contenders[:start]]


def outcome_of(result: Result) -> str:
    """Return the outcome of a run in a few words, with its steal."""
    if result.reason is not None:
        return f"failed: {result.reason}"
    metric = metrics_of(result.workload)[0]
    return f"{metric.label} {result.figures[metric.key]:.4g}, {steal_text(result.steal)}"


def log_of(logs: Path, name: str) -> Path:
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name)
    return logs / f"{safe}.log"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
