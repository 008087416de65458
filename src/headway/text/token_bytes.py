"""Bytes of a token.

Vocabularies spell bytes in one of two ways: byte-level (every byte is one printable character) or
SentencePiece (text with U+2581 for a space, and `<0xNN>` for a single byte). With both, the text of
a sequence is the concatenation of the bytes of its tokens, which incremental decoding relies on.
Other decoders have no spelling here.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

import tokenizers

_SPACE_MARK = "\u2581"
_LONE_BYTE = re.compile(r"<0x([0-9a-fA-F]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary spells bytes, and whether the first space is only a start mark."""

    is_byte_level: bool
    drops_first_space: bool = False

    def to_bytes(self, piece: str) -> bytes:
        if self.is_byte_level:
            return _byte_level_to_bytes(piece)
        lone_byte = _LONE_BYTE.fullmatch(piece)
        if lone_byte:
            return bytes([int(lone_byte[1], 16)])
        return piece.replace(_SPACE_MARK, " ").encode()


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling | None:
    """Return the spelling of a tokenizer; None for any other decoder."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(is_byte_level=True)
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if (steps[0]["pattern"], steps[0]["content"]) != ({"String": _SPACE_MARK}, " "):
        return None
    if not steps[3:]:
        return Spelling(is_byte_level=False)
    is_first_space = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return Spelling(False, drops_first_space=True) if steps[3:] == [is_first_space] else None


class TokenBytes:
    """Token id to bytes, computed on first use: a server meets few of the tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling) -> None:
        self._backend = backend
        self._spelling = spelling
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes; empty for ids beyond the vocabulary, which pad output layers."""
        known = self._known.get(token_id)
        if known is not None:
            return known
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        value = self._known[token_id] = self._spelling.to_bytes(piece)
        return value


def _byte_level_to_bytes(piece: str) -> bytes:
    alphabet = _byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        # An added token is plain text, which the decoder does not change.
        return piece.encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    # Printable Latin-1 stands for itself; the other bytes, in order, take the code points from 256.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet
