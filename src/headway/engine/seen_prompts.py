"""What the engine's prefix cache is likely to hold, as far as the API process can tell."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

NUM_FIRST = 16
"""Prompts that begin with the same tokens, so many of them, are taken for a family."""
MAX_FAMILIES = 128
_ITEM_BYTES = array("i").itemsize


class SeenPrompts:
    """The last prompt of each family that got a seat. Its tokens are in the cache soon after, and
    stay there until others need the room: that is not seen from here, so what is found may be
    more than there is, and hardly ever less."""

    def __init__(self) -> None:
        self._latest: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()

    def note(self, group: str, token_ids: Sequence[int]) -> None:
        """A prompt of somebody of this cache group got a seat."""
        tokens = array("i", token_ids).tobytes()
        key = (group, _first(tokens))
        self._latest[key] = tokens
        self._latest.move_to_end(key)
        if len(self._latest) > MAX_FAMILIES:
            self._latest.popitem(last=False)

    def num_cached(self, group: str, token_ids: Sequence[int]) -> int:
        """Tokens that a prompt has in common with the last of its family."""
        tokens = array("i", token_ids).tobytes()
        known = self._latest.get((group, _first(tokens)))
        return 0 if known is None else _num_common(known, tokens)


def _first(tokens: bytes) -> bytes:
    return tokens[: NUM_FIRST * _ITEM_BYTES]


def _num_common(a: bytes, b: bytes) -> int:
    """Tokens at the start of both, by halving: comparing bytes is fast."""
    low, high = 0, min(len(a), len(b)) // _ITEM_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at, end = low * _ITEM_BYTES, middle * _ITEM_BYTES
        if a[at:end] == b[at:end]:
            low = middle
        else:
            high = middle - 1
    return low
