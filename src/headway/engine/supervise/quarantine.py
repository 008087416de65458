"""Requests that took the engine down twice: asked again, they are refused unseen."""

from __future__ import annotations

import hashlib

import msgspec

from headway.engine.process.messages import AddRequest
from headway.errors import QuarantinedError

MAX_QUARANTINED = 256


class Quarantine:
    """Remembers the newest of them by a digest of what they asked for."""

    def __init__(self) -> None:
        self._digests: dict[bytes, None] = {}

    def add(self, command: AddRequest) -> None:
        self._digests[_digest(command)] = None
        while len(self._digests) > MAX_QUARANTINED:
            del self._digests[next(iter(self._digests))]

    def check(self, command: AddRequest) -> None:
        """QuarantinedError if this was asked before, and twice was the last thing asked."""
        if self._digests and _digest(command) in self._digests:
            raise QuarantinedError("the engine failed twice while computing such a request")


def _digest(command: AddRequest) -> bytes:
    # Not the seed: one that was drawn is another each time.
    return hashlib.sha256(msgspec.msgpack.encode((command.token_ids, command.params))).digest()
