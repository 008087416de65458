"""Passes every batch of events to its listeners: observers, admission."""

from __future__ import annotations

import logging
from collections.abc import Callable

from headway.engine.process.messages import EventBatch

logger = logging.getLogger(__name__)

Listener = Callable[[EventBatch], None]


class EventListeners:
    """Listeners of events, called in the order of subscription."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def add(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def notify(self, report: EventBatch) -> None:
        for listener in self._listeners:
            try:
                listener(report)
            except Exception:
                # A fault in a listener must not end a request.
                logger.exception("an event listener failed")
