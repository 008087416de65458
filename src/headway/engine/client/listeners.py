"""Who hears of every event: metrics, the gate, accounts. None of them can harm an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headway.engine.process.messages import EventBatch

logger = logging.getLogger(__name__)

Listener = Callable[[EventBatch], None]


class EventListeners:
    """Passes batches on, in the order in which listeners came."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def notify(self, report: EventBatch) -> None:
        for listener in self._listeners:
            try:
                listener(report)
            except Exception:
                # A fault in a metric must not cost anyone their answer.
                logger.exception("a listener failed")
