"""The requests of one connection: which attempt of each is live, within the credit.

Both sides keep this table: the frontend to drop events of older attempts, the engine to end what
its frontend has left behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.core.request import sample_id
from headway.engine.process.messages import AddRequest
from headway.errors import WireError
from headway.fleet.network.wire import Credit, wire_id


@dataclass(slots=True)
class _Attempt:
    """One attempt of a request; `open_ids` are its samples that have not ended."""

    number: int
    open_ids: set[str] = field(default_factory=set[str])
    num_tokens: int = 0
    has_forked: bool = False


class LiveRequests:
    """Live requests by the id of their first sample; of each, the newest attempt."""

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._attempts: dict[str, _Attempt] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def has_room(self, num_tokens: int, name: str = "") -> bool:
        """Return whether the credit allows one more request, or one more sample, `name`, of one."""
        num_others = len(self._attempts) - (request_of(name) in self._attempts)
        # A request alone is never too large: it would wait forever.
        is_small = self._num_tokens + num_tokens <= self._credit.num_tokens or not num_others
        return is_small and num_others < self._credit.num_requests

    def add(self, command: AddRequest) -> list[str]:
        """Add the samples of a command; return wire ids of an older attempt, which ends.

        Raises WireError if a newer attempt, or this sample of this attempt, is live.
        """
        request_id = request_of(command.id)
        names = {sample_id(command.id, index) for index in range(command.params.n)}
        attempt, ended = self._attempts.get(request_id), []
        if attempt is not None and attempt.number < command.attempt:
            ended = self._wire_ids(attempt)
            self._remove(request_id)
            attempt = None
        if attempt is None:
            attempt = self._attempts[request_id] = _Attempt(command.attempt)
        if attempt.number > command.attempt or attempt.open_ids & names:
            raise WireError(f"{wire_id(command.attempt, command.id)} is not a new attempt")
        attempt.open_ids |= names
        # The samples of a request with output are sent one by one.
        attempt.has_forked |= command.num_prompt_tokens > 0
        attempt.num_tokens += command.size
        self._num_tokens += command.size
        return ended

    def adopt(self, command: AddRequest, open_ids: set[str], has_forked: bool) -> None:
        """Add a request that another connection had, with the samples that have not ended."""
        attempt = _Attempt(command.attempt, open_ids, command.size, has_forked)
        self._attempts[command.id] = attempt
        self._num_tokens += command.size

    def release(self, request_id: str) -> list[str]:
        """Remove a request that goes on elsewhere; return the wire ids of its samples."""
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return []
        self._remove(request_id)
        return self._wire_ids(attempt)

    @property
    def request_ids(self) -> list[str]:
        return list(self._attempts)

    def open_ids_of(self, request_id: str) -> frozenset[str]:
        """Return the samples of a request that have not ended."""
        attempt = self._attempts.get(request_id)
        return frozenset() if attempt is None else frozenset(attempt.open_ids)

    def attempt_of(self, name: str) -> int | None:
        """Return the live attempt of a sample; None if the sample is not live."""
        attempt = self._attempts.get(request_of(name))
        return attempt.number if attempt is not None and name in attempt.open_ids else None

    def is_live(self, attempt: int, name: str) -> bool:
        """Return whether this attempt of a sample is live."""
        return self.attempt_of(name) == attempt

    def fork(self, number: int, name: str) -> None:
        """Record that the prompt of a sample has forked, in this attempt."""
        attempt = self._attempts.get(request_of(name))
        if attempt is not None and attempt.number == number:
            attempt.has_forked = True

    def end(self, name: str) -> None:
        """Record that a sample has ended; a prompt that ends before its fork ends with all."""
        request_id = request_of(name)
        attempt = self._attempts.get(request_id)
        if attempt is None:
            return
        attempt.open_ids.discard(name)
        if not attempt.open_ids or (name == request_id and not attempt.has_forked):
            self._remove(request_id)

    def clear(self) -> list[str]:
        """Remove all requests; return the wire ids of their samples."""
        ids = [name for attempt in self._attempts.values() for name in self._wire_ids(attempt)]
        self._attempts.clear()
        self._num_tokens = 0
        return ids

    def check(self) -> None:
        if self._num_tokens != sum(one.num_tokens for one in self._attempts.values()):
            raise AssertionError("the tokens are not those of the live requests")
        if any(not one.open_ids for one in self._attempts.values()):
            raise AssertionError("a request without open samples is live")

    def _remove(self, request_id: str) -> None:
        self._num_tokens -= self._attempts.pop(request_id).num_tokens

    def _wire_ids(self, attempt: _Attempt) -> list[str]:
        return [wire_id(attempt.number, name) for name in attempt.open_ids]


def request_of(name: str) -> str:
    """Return the id of the first sample of a request."""
    return name.partition("#")[0]
