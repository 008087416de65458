"""Requests on trial in an engine process that several frontends share.

A frontend tries a request alone after two failures, because a third one is proof then. It does not
know what other frontends send. So the host of the engine passes on one such request at a time and
holds all others back, and after a failure it says whether a request of another frontend may be the
cause. A process that follows a failed one gets the requests on trial first.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from headway.engine.process.messages import AddRequest, EventBatch
from headway.engine.supervise.loss import NUM_CLEARING_TOKENS, EngineLoss

AFTER_FAILURE_S = 0.25
"""How long a process waits for requests to try alone, if the one before it has failed."""
MAX_TRIAL_S = 5.0
"""How long others wait for a trial; twice as long for each failure after the second."""
MAX_DOUBLINGS = 4


class Trials:
    """Passes requests on to the engine process, and knows which of them are new there.

    A sample is new until the process has computed enough tokens to clear it.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        """Tokens of the new samples."""
        self._alone: list[AddRequest] = []
        """Requests to try alone, which the process does not have yet."""
        self._held: list[AddRequest] = []
        """Other requests that the process does not have yet."""
        self._trial = ""
        """The request on trial."""
        self._ends_at = 0.0
        """When others wait no longer for the request on trial."""
        self._opens_at = -inf
        """When a process that follows a failed one takes any request."""
        self._has_failed = False

    @property
    def is_holding(self) -> bool:
        """Whether there are requests that the process does not have yet."""
        return bool(self._alone or self._held)

    def start_process(self, now: float) -> None:
        """Record that the process takes requests."""
        self._opens_at = now + AFTER_FAILURE_S if self._has_failed else -inf
        self._has_failed = False

    def lose_process(self, loss: EngineLoss) -> list[str]:
        """Forget all requests; return the new samples that may be the cause."""
        ids = loss.step_ids or self._num_tokens
        found = [name for name in ids if name in self._num_tokens]
        self._num_tokens, self._alone, self._held, self._trial = {}, [], [], ""
        self._has_failed = bool(loss.step_ids) or loss.has_failed
        return found

    def add(self, command: AddRequest) -> None:
        """Add a request, which is passed on when `pop_ready` returns it."""
        (self._alone if command.num_crashes else self._held).append(command)

    def pop_ready(self, now: float) -> AddRequest | None:
        """Remove and return a request that the process gets now."""
        if self._trial and (now >= self._ends_at or not self._is_new(self._trial)):
            self._trial = ""
        if not self._trial and self._alone:
            num_more = min(max(0, self._alone[0].num_crashes - 2), MAX_DOUBLINGS)
            self._trial = _request_of(self._alone[0].id)
            self._ends_at = now + (MAX_TRIAL_S * 2**num_more)
        if self._trial:
            # The samples of a request with output are sent one by one.
            ready = next((one for one in self._alone if _request_of(one.id) == self._trial), None)
        else:
            ready = self._held[0] if self._held and now >= self._opens_at else None
        if ready is not None:
            self._remove(ready)
        return ready

    def take(self, ids: Iterable[str]) -> list[AddRequest]:
        """Remove and return those of these samples that the process does not have yet."""
        names = set(ids)
        found = [one for one in (*self._alone, *self._held) if one.id in names]
        for command in found:
            self._remove(command)
        return found

    def record(self, report: EventBatch) -> None:
        """Record what the process has computed without failing."""
        for fork in report.forked:
            if fork.parent_id in self._num_tokens:
                self._num_tokens[fork.request_id] = 0
        for emitted in report.tokens:
            if emitted.request_id in self._num_tokens:
                self._num_tokens[emitted.request_id] += len(emitted.token_ids)
                if self._num_tokens[emitted.request_id] >= NUM_CLEARING_TOKENS:
                    del self._num_tokens[emitted.request_id]
        for event in (*report.refused, *report.finished):
            self._num_tokens.pop(event.request_id, None)

    def _is_new(self, request_id: str) -> bool:
        return any(_request_of(name) == request_id for name in self._num_tokens)

    def _remove(self, command: AddRequest) -> None:
        """Record that the process gets a request now."""
        self._alone = [one for one in self._alone if one is not command]
        self._held = [one for one in self._held if one is not command]
        self._num_tokens[command.id] = 0


def _request_of(name: str) -> str:
    """Return the id of the first sample of a request."""
    return name.partition("#")[0]
