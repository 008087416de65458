"""Which engine gets a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.engine.client.replica import EngineReplica
from headway.engine.process.messages import AddRequest


class Placement(Protocol):
    """Chooses among the engines that may take a request."""

    def choose(self, request: AddRequest, engines: Sequence[EngineReplica]) -> EngineReplica | None:
        """Return one of `engines`; None if the request should wait."""
        ...


class LeastLoaded:
    """Chooses the engine with the fewest sequences, then with the fewest tokens."""

    def choose(self, request: AddRequest, engines: Sequence[EngineReplica]) -> EngineReplica | None:
        return min(engines, key=lambda one: (one.num_seqs, one.num_tokens), default=None)
