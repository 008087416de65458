"""Waits computed from event times alone, to check the wait attribution of the engine."""

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
"""How far a sum of causes may be from the wait: so much of it, or so many seconds."""


def differ(counted_s: float, waited_s: float) -> bool:
    return abs(counted_s - waited_s) > max(SECONDS, SHARE * waited_s)


@dataclass(slots=True)
class Story:
    """One request, as its events tell it."""

    id: str
    tenant: str
    waits_since: float | None
    """None while it runs."""
    forked_at: float | None = None
    """Of a sample that may run or wait: its next event will tell."""
    runs: list[list[float]] = field(default_factory=list[list[float]])
    """From when until when it had a seat."""
    queue_s: float = 0.0
    causes: dict[WaitCause, float] = field(default_factory=dict[WaitCause, float])
    num_preempted: int = 0
    num_resumed: int = 0
    finished_at: float | None = None

    def ran_at(self, at: float) -> bool:
        return any(start <= at <= end for start, end in self.runs)


@dataclass(slots=True)
class WaitBooks:
    """The stories of all requests, and what is wrong with them."""

    stories: dict[str, Story] = field(default_factory=dict[str, Story])
    preempted: list[Preempted] = field(default_factory=list[Preempted])
    admitted: list[Admitted] = field(default_factory=list[Admitted])
    problems: list[str] = field(default_factory=list[str])

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Arrived():
                    tenant = event.terms.tenant
                    self.stories[event.request_id] = Story(event.request_id, tenant, event.at)
                case Forked():
                    tenant = self.stories[event.parent_id].tenant
                    story = Story(event.request_id, tenant, None, forked_at=event.at)
                    self.stories[event.request_id] = story
                case Refused():
                    self.problems.append(f"{event.request_id} was refused: {event.message}")
                case Admitted():
                    self._admit(event)
                case TokensEmitted():
                    story = self.stories[event.request_id]
                    self._settle_fork(story)
                    if story.waits_since is not None:
                        self.problems.append(f"{story.id} waits, and yet has tokens")
                case Preempted():
                    self._preempt(event)
                case Finished():
                    self._finish(event)
                case _:
                    pass

    def conclude(self) -> None:
        """Everybody has gone: whatever was taken from somebody must have its counterpart."""
        for event in self.preempted:
            causer = self.stories.get(event.by)
            if causer is None:
                self.problems.append(f"{event.request_id} gave way to nobody known: {event.by}")
            elif not causer.ran_at(event.at):
                self.problems.append(
                    f"{event.request_id} gave way to {event.by}, which did not run"
                )
        for story in self.stories.values():
            if story.finished_at is None:
                self.problems.append(f"{story.id} has no end")
            if story.num_resumed not in (story.num_preempted, story.num_preempted - 1):
                self.problems.append(
                    f"{story.id}: preempted {story.num_preempted} times, "
                    f"resumed {story.num_resumed} times"
                )
            if differ(sum(story.causes.values()), story.queue_s):
                self.problems.append(f"{story.id} waited {story.queue_s} s for {story.causes}")

    def total_causes(self) -> dict[WaitCause, float]:
        total: dict[WaitCause, float] = {}
        for story in self.stories.values():
            for cause, seconds in story.causes.items():
                total[cause] = total.get(cause, 0.0) + seconds
        return total

    def _admit(self, event: Admitted) -> None:
        story = self.stories[event.request_id]
        if story.forked_at is not None:
            story.waits_since, story.forked_at = story.forked_at, None
        if event.is_resumed != (story.num_preempted > 0):
            self.problems.append(f"{story.id}: is_resumed is {event.is_resumed}")
        waited_s = self._end_wait(story, event.at, event.causes)
        if differ(event.waited_s, waited_s):
            self.problems.append(f"{story.id} waited {waited_s} s, not {event.waited_s}")
        self._check_holder(event)
        story.num_resumed += event.is_resumed
        story.runs.append([event.at, inf])
        self.admitted.append(event)

    def _check_holder(self, event: Admitted) -> None:
        """Who waited for seats or blocks is told who held them, and nobody else is."""
        held = {WaitCause.KV_BLOCKS, WaitCause.RUNNING_LIMIT}
        has_waited = any(one.cause in held and one.seconds > SECONDS for one in event.causes)
        tenants = {story.tenant for story in self.stories.values() if story.runs}
        if has_waited and event.held_by not in tenants:
            self.problems.append(f"{event.request_id} waited for what {event.held_by!r} held")

    def _preempt(self, event: Preempted) -> None:
        story = self.stories[event.request_id]
        self._settle_fork(story)
        if story.waits_since is not None:
            self.problems.append(f"{story.id} was preempted and did not run")
            return
        story.runs[-1][1] = event.at
        story.waits_since = event.at
        story.num_preempted += 1
        self.preempted.append(event)

    def _finish(self, event: Finished) -> None:
        story = self.stories[event.request_id]
        if story.finished_at is not None:
            self.problems.append(f"{story.id} ended twice")
        if story.forked_at is not None and event.causes:
            story.waits_since, story.forked_at = story.forked_at, None
        self._settle_fork(story)
        if story.waits_since is not None:
            self._end_wait(story, event.at, event.causes)
        else:
            story.runs[-1][1] = event.at
            if event.causes:
                self.problems.append(f"{story.id} ran, and yet waited for {event.causes}")
        story.finished_at = event.at

    def _end_wait(self, story: Story, at: float, causes: Sequence[CauseTime]) -> float:
        if story.waits_since is None:
            self.problems.append(f"{story.id} ran, and yet its wait ended")
            return 0.0
        waited_s = at - story.waits_since
        counted_s = sum(one.seconds for one in causes)
        if differ(counted_s, waited_s) or any(one.seconds < 0.0 for one in causes):
            self.problems.append(f"{story.id} waited {waited_s} s for {causes}")
        for one in causes:
            story.causes[one.cause] = story.causes.get(one.cause, 0.0) + one.seconds
        story.queue_s += waited_s
        story.waits_since = None
        return waited_s

    def _settle_fork(self, story: Story) -> None:
        """A forked sample that does anything without having waited has run since it was forked."""
        if story.forked_at is not None:
            story.runs.append([story.forked_at, inf])
            story.forked_at = None
