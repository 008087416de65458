"""Counter-based random numbers: a hash of seed, sample and position.

A request resumed after preemption, on another replica or after a crash draws the same numbers,
whatever else is in the batch.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

SAMPLER_VERSION = 1
"""Raised with every change of the tokens that the same logits and seed give."""
_WORD = 2**64 - 1


def uniform(seed: int, index: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, determined by the three keys."""
    key = struct.pack("<QQQ", seed & _WORD, index & _WORD, position & _WORD)
    digest = blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
