"""Requests that took the engine down twice; the same request is refused from then on."""

from __future__ import annotations

import hashlib

import msgspec

from headway.engine.process.messages import AddRequest
from headway.errors import QuarantinedError

MAX_QUARANTINED = 256


class Quarantine:
    """The newest quarantined requests, by a digest of prompt and parameters."""

    def __init__(self) -> None:
        self._digests: dict[bytes, None] = {}

    def add(self, command: AddRequest) -> None:
        self._digests[_digest(command)] = None
        while len(self._digests) > MAX_QUARANTINED:
            del self._digests[next(iter(self._digests))]

    def check(self, command: AddRequest) -> None:
        """Raise QuarantinedError if the same request is quarantined."""
        if self._digests and _digest(command) in self._digests:
            raise QuarantinedError(
                "the engine failed twice while computing a request with this prompt and these "
                "parameters; change the prompt or the parameters"
            )


def _digest(command: AddRequest) -> bytes:
    # Without the seed: a drawn seed differs each time.
    return hashlib.sha256(msgspec.msgpack.encode((command.token_ids, command.params))).digest()
