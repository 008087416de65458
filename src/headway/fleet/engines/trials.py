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
from headway.fleet.network.live import request_of

AFTER_FAILURE_S = 0.25
"""How long a process waits for requests to try alone, if the one before it has failed."""
MAX_TRIAL_S = 5.0
"""How long others wait for a trial; twice as long for each failure after the second."""
MAX_DOUBLINGS = 4
MAX_DRAIN_S = 5.0
"""How long a trial waits until no other request is new in the process."""
MAX_HOLD_S = 60.0
"""How long a request is held back, whatever is on trial."""


class Trials:
    """Passes requests on to the engine process, and knows which of them are new there.

    A sample is new until the process has computed enough tokens to clear it.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        """Tokens of the new samples."""
        self._alone: dict[str, tuple[AddRequest, float]] = {}
        """Requests to try alone, which the process does not have yet, and since when."""
        self._held: dict[str, tuple[AddRequest, float]] = {}
        """Other requests that the process does not have yet, and since when they are here."""
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

    @property
    def new_ids(self) -> list[str]:
        """Samples that are new in the process."""
        return list(self._num_tokens)

    @property
    def held_ids(self) -> list[str]:
        """Samples that the process does not have yet."""
        return [*self._alone, *self._held]

    def start_process(self, now: float) -> None:
        """Record that the process takes requests."""
        self._opens_at = now + AFTER_FAILURE_S if self._has_failed else -inf
        self._has_failed = False

    def lose_process(self, loss: EngineLoss) -> None:
        """Forget all requests."""
        self._num_tokens, self._alone, self._held, self._trial = {}, {}, {}, ""
        self._has_failed = bool(loss.step_ids) or loss.has_failed

    def add(self, command: AddRequest, now: float) -> None:
        """Add a request, which is passed on when `pop_ready` returns it."""
        (self._alone if command.num_crashes else self._held)[command.id] = command, now

    def pop_ready(self, now: float) -> AddRequest | None:
        """Remove and return a request that the process gets now."""
        if self._trial and (now >= self._ends_at or not self._is_new(self._trial)):
            self._trial = ""
        if not self._trial and self._alone:
            command, since = next(iter(self._alone.values()))
            if not self._num_tokens or now - since >= MAX_DRAIN_S:
                num_more = min(max(0, command.num_crashes - 2), MAX_DOUBLINGS)
                self._trial = request_of(command.id)
                self._ends_at = now + MAX_TRIAL_S * 2**num_more
        if self._trial:
            # The samples of a request with output are sent one by one.
            ready = next((one for one in self._alone if request_of(one) == self._trial), None)
            if ready is not None:
                self._num_tokens[ready] = 0
                return self._alone.pop(ready)[0]
        if not self._held:
            return None
        first, (command, since) = next(iter(self._held.items()))
        is_open = not self._trial and not self._alone and now >= self._opens_at
        if not is_open and now - since < MAX_HOLD_S:
            return None
        del self._held[first]
        self._num_tokens[first] = 0
        return command

    def take(self, ids: Iterable[str]) -> list[str]:
        """Remove and return those of these samples that the process does not have yet."""
        found = [one for one in ids if one in self._alone or one in self._held]
        for name in found:
            self._alone.pop(name, None)
            self._held.pop(name, None)
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
        return any(request_of(name) == request_id for name in self._num_tokens)
