"""Times of another machine, as times of this one.

Monotonic clocks of two machines have nothing in common. A message says what its sender's clock
showed, so the receiver knows how old each time in it is, but for the time that the message took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import TypeVar

from msgspec.structs import replace as replace_fields

from headway.core.events import Admitted, Finished, Forked, Idled, Preempted, Stepped
from headway.engine.process.messages import EventBatch

Timed = TypeVar("Timed", Admitted, Preempted, Forked, Finished, Idled, Stepped)
MAX_AGE_S = 7 * 86400.0


def age_of(at: float, sent_at: float) -> float:
    """Return how old a time was when its message was sent, within bounds."""
    age_s = sent_at - at
    return min(max(age_s, 0.0), MAX_AGE_S) if isfinite(age_s) else 0.0


def localize(batch: EventBatch, sent_at: float, now: float) -> EventBatch:
    """Return the events of a batch with times of this machine."""

    def move(events: Sequence[Timed]) -> list[Timed]:
        return [replace(event, at=now - age_of(event.at, sent_at)) for event in events]

    return replace_fields(
        batch,
        admitted=move(batch.admitted),
        preempted=move(batch.preempted),
        forked=move(batch.forked),
        finished=move(batch.finished),
        idled=move(batch.idled),
        stepped=move(batch.stepped),
    )
