"""Requests that took engines down; the same request is refused from then on.

A request is known by a digest of its prompt and parameters, never by its text. In a fleet the
digests are passed on: from the frontend to its engines, and from an engine to its other frontends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from math import isfinite

import msgspec

from headway.clock import Clock
from headway.engine.process.messages import AddRequest, QuarantinedDigest
from headway.errors import QuarantinedError

MAX_QUARANTINED = 256
QUARANTINE_S = 3600.0
"""How long a request is refused."""
_DIGEST_BYTES = 32


class Quarantine:
    """The newest quarantined requests."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}
        """When each digest is forgotten, the oldest first."""

    def __len__(self) -> int:
        return len(self._until)

    @property
    def entries(self) -> list[QuarantinedDigest]:
        """What others must know to refuse the same requests."""
        now = self._forget_expired()
        return [QuarantinedDigest(one, until - now) for one, until in self._until.items()]

    def add(self, command: AddRequest) -> QuarantinedDigest:
        """Quarantine a request; return what others must know."""
        entry = QuarantinedDigest(digest_of(command), QUARANTINE_S)
        self.learn([entry])
        return entry

    def learn(self, entries: Iterable[QuarantinedDigest]) -> list[QuarantinedDigest]:
        """Add what another process has quarantined; return what was not known here."""
        now, fresh = self._forget_expired(), []
        for entry in entries:
            is_valid = len(entry.digest) == _DIGEST_BYTES and isfinite(entry.left_s)
            if is_valid and entry.left_s > 0.0 and entry.digest not in self._until:
                self._until[entry.digest] = now + min(entry.left_s, QUARANTINE_S)
                fresh.append(entry)
        while len(self._until) > MAX_QUARANTINED:
            del self._until[next(iter(self._until))]
        return fresh

    def check(self, command: AddRequest) -> None:
        """Raise QuarantinedError if the same request is quarantined."""
        if self._until and self._clock.now() < self._until.get(digest_of(command), 0.0):
            raise QuarantinedError(
                "the engine failed twice while computing a request with this prompt and these "
                "parameters; change the prompt or the parameters"
            )

    def _forget_expired(self) -> float:
        """Forget what has expired; return the time."""
        now = self._clock.now()
        self._until = {one: until for one, until in self._until.items() if until > now}
        return now


def digest_of(command: AddRequest) -> bytes:
    """Return the digest of prompt and parameters, without the seed: a drawn seed differs."""
    return hashlib.sha256(msgspec.msgpack.encode((command.token_ids, command.params))).digest()
