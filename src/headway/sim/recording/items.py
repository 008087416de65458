"""A recorded request as an item of a load."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.terms import NO_TERMS, Terms
from headway.workload import WorkItem


@dataclass(frozen=True, slots=True)
class RecordedItem(WorkItem):
    """A recorded request; its output tokens matter to later prompts."""

    output_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    terms: Terms = NO_TERMS
    priority: int = 0
    number: int = 0
    """Position among the requests of the recording."""
    after: int | None = None
    """Number of the request whose answer this one continues; None: arrives at its time."""
    think_s: float = 0.0
    """Seconds between that answer and this request."""


def follows(item: WorkItem) -> bool:
    """Return whether a request is sent after the answer to another one."""
    return isinstance(item, RecordedItem) and item.after is not None
