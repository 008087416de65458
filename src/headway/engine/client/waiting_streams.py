"""The requests that have yet to be seated for the first time, and how many of them are whose."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import NamedTuple

from headway.engine.client.streams import RequestStream


class QueueTotals(NamedTuple):
    """Of some requests."""

    num_requests: int = 0
    num_tokens: int = 0
    """Of their prompts."""


class TotalsByTenant:
    """Sums of what waits, in all and of each tenant. Kept, not counted: they are asked for with
    every request."""

    def __init__(self) -> None:
        self.total = QueueTotals()
        self._of: dict[str, QueueTotals] = {}

    @property
    def tenants(self) -> KeysView[str]:
        """Those that have anything here."""
        return self._of.keys()

    def of(self, tenant: str) -> QueueTotals:
        return self._of.get(tenant, QueueTotals())

    def add(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """Numbers below zero take away."""
        totals = self.of(tenant)
        left = QueueTotals(totals.num_requests + num_requests, totals.num_tokens + num_tokens)
        if left.num_requests:
            self._of[tenant] = left
        else:
            del self._of[tenant]
        total = self.total
        self.total = QueueTotals(total.num_requests + num_requests, total.num_tokens + num_tokens)


class WaitingStreams:
    """Oldest first."""

    def __init__(self) -> None:
        self.totals = TotalsByTenant()
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        return iter(self._streams.values())

    def add(self, stream: RequestStream) -> None:
        self._streams[stream.request_id] = stream
        self._count(stream, 1)

    def pop(self, request_id: str) -> RequestStream | None:
        """The request, which waits no longer; None if it did not."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._count(stream, -1)
        return stream

    def _count(self, stream: RequestStream, sign: int) -> None:
        command = stream.command
        self.totals.add(command.terms.tenant, sign, sign * len(command.token_ids))
