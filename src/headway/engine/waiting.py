"""The requests that have yet to be seated for the first time, and how many of them are whose."""

from __future__ import annotations

from collections.abc import Iterator

from headway.engine.streams import RequestStream


class WaitingLine:
    """Oldest first. Its sums are kept, not counted: they are asked for with every request."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Of all their prompts."""
        self._streams: dict[str, RequestStream] = {}
        self._num_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        return iter(self._streams.values())

    def num_of(self, tenant: str) -> int:
        return self._num_of.get(tenant, 0)

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
        self.num_tokens += sign * len(stream.command.token_ids)
        tenant = stream.command.terms.tenant
        left = self.num_of(tenant) + sign
        if left:
            self._num_of[tenant] = left
        else:
            del self._num_of[tenant]
