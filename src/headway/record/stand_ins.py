"""Stand-in tokens for recorded prompts: blocks with equal hashes have equal tokens."""

from __future__ import annotations

from itertools import count

from headway.record.entries import HASH_BYTES


class StandIns:
    """Makes tokens from recorded hashes."""

    def __init__(self, first_token: int, block_size: int = 0) -> None:
        """Begin with a token; a `block_size` of 0 is set before any hashes come."""
        self.block_size = block_size
        self._tokens = count(first_token)
        self._by_hash: dict[bytes, int] = {}

    def sequence(self, hashes: bytes, num_tokens: int) -> list[int]:
        """Return tokens for full blocks and what follows them, which nothing else has."""
        made: list[int] = []
        for start in range(0, len(hashes), HASH_BYTES):
            block_hash = hashes[start : start + HASH_BYTES]
            if block_hash not in self._by_hash:
                self._by_hash[block_hash] = next(self._tokens)
            made += [self._by_hash[block_hash]] * self.block_size
        made += [next(self._tokens)] * max(0, num_tokens - len(made))
        return made[:num_tokens]
