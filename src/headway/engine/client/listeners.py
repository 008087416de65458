"""Passes every batch of events to its listeners: observers, admission."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from msgspec.structs import replace as replace_fields

from headway.core.events import Stepped
from headway.engine.process.messages import EventBatch

logger = logging.getLogger(__name__)

Listener = Callable[[EventBatch], None]
StepListener = Callable[[str, Sequence[Stepped]], None]
"""Called with the name of an engine and the steps that it ended."""


class EventListeners:
    """Listeners of events, called in the order of subscription."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._step_listeners: list[StepListener] = []

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def add_for_steps(self, listener: StepListener) -> None:
        self._step_listeners.append(listener)

    def notify(self, report: EventBatch) -> None:
        for listener in self._listeners:
            _call(partial(listener, report))

    def notify_steps(self, engine: str, steps: Sequence[Stepped]) -> None:
        for listener in self._step_listeners:
            _call(partial(listener, engine, steps))


def _call(listener: Callable[[], None]) -> None:
    try:
        listener()
    except Exception:
        # A fault in a listener must not end a request.
        logger.exception("an event listener failed")


def total_steps(
    report: EventBatch, last_steps: Sequence[Stepped | None], num_unsent: int = 0
) -> EventBatch:
    """Return a report whose steps count the requests and blocks of all engines.

    `last_steps` has the last step of each engine, or None. `num_unsent` requests wait for engines.
    """
    steps = [one for one in last_steps if one is not None]
    if len(steps) < 2 and not num_unsent:
        return report
    num_running = sum(one.num_running for one in steps)
    if report.idled and num_running:
        report = replace_fields(report, idled=[])  # only one of the engines is idle
    if not report.stepped:
        return report
    total = replace(
        report.stepped[-1],
        max_num_seqs=sum(one.max_num_seqs for one in steps),
        num_running=num_running,
        num_waiting=sum(one.num_waiting for one in steps) + num_unsent,
        num_blocks_used=sum(one.num_blocks_used for one in steps),
        num_blocks=sum(one.num_blocks for one in steps),
    )
    return replace_fields(report, stepped=[*report.stepped[:-1], total])
