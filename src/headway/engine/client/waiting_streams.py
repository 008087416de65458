"""Requests that the engine has not admitted yet, with their totals per tenant."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import NamedTuple

from headway.engine.client.streams import RequestStream


class QueueTotals(NamedTuple):
    """Number of requests and of their prompt tokens."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens of these requests."""


class TotalsByTenant:
    """Totals of waiting requests, overall and per tenant.

    Updated with each change, because every HTTP request reads them.
    """

    def __init__(self) -> None:
        self.total = QueueTotals()
        self._of: dict[str, QueueTotals] = {}

    @property
    def tenants(self) -> KeysView[str]:
        """Tenants with waiting requests."""
        return self._of.keys()

    def of(self, tenant: str) -> QueueTotals:
        return self._of.get(tenant, QueueTotals())

    def add(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        """Add to the totals of a tenant; negative numbers subtract."""
        totals = self.of(tenant)
        left = QueueTotals(totals.num_requests + num_requests, totals.num_tokens + num_tokens)
        if left.num_requests:
            self._of[tenant] = left
        else:
            del self._of[tenant]
        total = self.total
        self.total = QueueTotals(total.num_requests + num_requests, total.num_tokens + num_tokens)


class WaitingStreams:
    """Requests that the engine has not admitted yet, oldest first."""

    def __init__(self) -> None:
        self.totals = TotalsByTenant()
        """Of ordinary requests."""
        self.spot_totals = TotalsByTenant()
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        return iter(self._streams.values())

    def add(self, stream: RequestStream) -> None:
        self._streams[stream.request_id] = stream
        self._count(stream, 1)

    def pop(self, request_id: str) -> RequestStream | None:
        """Remove and return a request; None if it does not wait."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._count(stream, -1)
        return stream

    def _count(self, stream: RequestStream, sign: int) -> None:
        command = stream.command
        totals = self.spot_totals if command.terms.is_spot else self.totals
        totals.add(command.terms.tenant, sign, sign * len(command.token_ids))
