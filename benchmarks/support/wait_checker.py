"""Computes waits from event times alone, to check the wait attribution of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from headway.core.causes import CauseTime, WaitCause
from headway.core.events import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Forked,
    Preempted,
    Refused,
    TokensEmitted,
)

SHARE, SECONDS = 0.01, 1e-3
"""Allowed difference between a wait and the sum of its causes: share, seconds."""


def differ(counted_s: float, waited_s: float) -> bool:
    return abs(counted_s - waited_s) > max(SECONDS, SHARE * waited_s)


@dataclass(slots=True)
class RequestHistory:
    """State and waits of one request, from its events."""

    id: str
    tenant: str
    waits_since: float | None
    """None while the request runs."""
    forked_at: float | None = None
    """Fork time of a sample whose next event will show whether it runs or waits."""
    runs: list[list[float]] = field(default_factory=list[list[float]])
    """Begin and end of each time in the running set."""
    queue_s: float = 0.0
    causes: dict[WaitCause, float] = field(default_factory=dict[WaitCause, float])
    num_preempted: int = 0
    num_resumed: int = 0
    finished_at: float | None = None

    def ran_at(self, at: float) -> bool:
        return any(start <= at <= end for start, end in self.runs)


@dataclass(slots=True)
class WaitChecker:
    """Sink of events: follows all requests and collects problems of their waits."""

    histories: dict[str, RequestHistory] = field(default_factory=dict[str, RequestHistory])
    preempted: list[Preempted] = field(default_factory=list[Preempted])
    admitted: list[Admitted] = field(default_factory=list[Admitted])
    problems: list[str] = field(default_factory=list[str])

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Arrived():
                    tenant = event.terms.tenant
                    self.histories[event.request_id] = RequestHistory(
                        event.request_id, tenant, event.at
                    )
                case Forked():
                    tenant = self.histories[event.parent_id].tenant
                    history = RequestHistory(event.request_id, tenant, None, forked_at=event.at)
                    self.histories[event.request_id] = history
                case Refused():
                    self.problems.append(f"{event.request_id} was refused: {event.message}")
                case Admitted():
                    self._admit(event)
                case TokensEmitted():
                    history = self.histories[event.request_id]
                    self._settle_fork(history)
                    if history.waits_since is not None:
                        self.problems.append(f"{history.id} waits, but has tokens")
                case Preempted():
                    self._preempt(event)
                case Finished():
                    self._finish(event)
                case _:
                    pass

    def conclude(self) -> None:
        """Check all requests after the last has ended.

        Every requester must have run, and every preempted request must have resumed or ended.
        """
        for event in self.preempted:
            requester = self.histories.get(event.by)
            if requester is None:
                self.problems.append(f"{event.request_id}: requester {event.by} is unknown")
            elif not requester.ran_at(event.at):
                self.problems.append(f"{event.request_id}: requester {event.by} did not run")
        for history in self.histories.values():
            if history.finished_at is None:
                self.problems.append(f"{history.id} has no end")
            if history.num_resumed not in (history.num_preempted, history.num_preempted - 1):
                self.problems.append(
                    f"{history.id}: preempted {history.num_preempted} times, "
                    f"resumed {history.num_resumed} times"
                )
            if differ(sum(history.causes.values()), history.queue_s):
                self.problems.append(
                    f"{history.id} waited {history.queue_s} s for {history.causes}"
                )

    def total_causes(self) -> dict[WaitCause, float]:
        total: dict[WaitCause, float] = {}
        for history in self.histories.values():
            for cause, seconds in history.causes.items():
                total[cause] = total.get(cause, 0.0) + seconds
        return total

    def _admit(self, event: Admitted) -> None:
        history = self.histories[event.request_id]
        if history.forked_at is not None:
            history.waits_since, history.forked_at = history.forked_at, None
        if event.is_resumed != (history.num_preempted > 0):
            self.problems.append(f"{history.id}: is_resumed is {event.is_resumed}")
        waited_s = self._end_wait(history, event.at, event.causes)
        if differ(event.waited_s, waited_s):
            self.problems.append(f"{history.id} waited {waited_s} s, not {event.waited_s}")
        self._check_holder(event)
        history.num_resumed += event.is_resumed
        history.runs.append([event.at, inf])
        self.admitted.append(event)

    def _check_holder(self, event: Admitted) -> None:
        """Check that a wait for blocks or the running limit names a tenant that ran."""
        named = {WaitCause.KV_BLOCKS, WaitCause.RUNNING_LIMIT}
        has_waited = any(one.cause in named and one.seconds > SECONDS for one in event.causes)
        tenants = {history.tenant for history in self.histories.values() if history.runs}
        if has_waited and event.held_by not in tenants:
            self.problems.append(
                f"{event.request_id}: held_by is {event.held_by!r}, which never ran"
            )

    def _preempt(self, event: Preempted) -> None:
        history = self.histories[event.request_id]
        self._settle_fork(history)
        if history.waits_since is not None:
            self.problems.append(f"{history.id} was preempted and did not run")
            return
        history.runs[-1][1] = event.at
        history.waits_since = event.at
        history.num_preempted += 1
        self.preempted.append(event)

    def _finish(self, event: Finished) -> None:
        history = self.histories[event.request_id]
        if history.finished_at is not None:
            self.problems.append(f"{history.id} ended twice")
        if history.forked_at is not None and event.causes:
            history.waits_since, history.forked_at = history.forked_at, None
        self._settle_fork(history)
        if history.waits_since is not None:
            self._end_wait(history, event.at, event.causes)
        else:
            history.runs[-1][1] = event.at
            if event.causes:
                self.problems.append(f"{history.id} ran, but waited for {event.causes}")
        history.finished_at = event.at

    def _end_wait(self, history: RequestHistory, at: float, causes: Sequence[CauseTime]) -> float:
        if history.waits_since is None:
            self.problems.append(f"{history.id} ran, but its wait ended")
            return 0.0
        waited_s = at - history.waits_since
        counted_s = sum(one.seconds for one in causes)
        if differ(counted_s, waited_s) or any(one.seconds < 0.0 for one in causes):
            self.problems.append(f"{history.id} waited {waited_s} s for {causes}")
        for one in causes:
            history.causes[one.cause] = history.causes.get(one.cause, 0.0) + one.seconds
        history.queue_s += waited_s
        history.waits_since = None
        return waited_s

    def _settle_fork(self, history: RequestHistory) -> None:
        """Count a forked sample as running since its fork, if it has not waited."""
        if history.forked_at is not None:
            history.runs.append([history.forked_at, inf])
            history.forked_at = None
