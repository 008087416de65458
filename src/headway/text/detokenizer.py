"""Token ids to text, incrementally.

A delta never ends within a character: bytes are buffered until they form one, and become U+FFFD
once no further byte could complete them. Deltas and the final flush add up to the decoding of the
whole sequence. Stop strings are not handled here.
"""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from headway.text.token_bytes import TokenBytes

# Enough context for any decoder to see that text came before.
_NUM_CONTEXT_IDS = 8


class Detokenizer(Protocol):
    """Turns the token ids of one sample into text."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """Return the pending text; no ids may follow."""
        ...


class ByteDetokenizer:
    """Detokenizer of byte vocabularies: constant work per token, at most three bytes pending.

    `DecodeStream` would decode its whole window for each token while the text ends in an incomplete
    character, which is quadratic for a run of stray bytes.
    """

    def __init__(
        self, token_bytes: TokenBytes, skipped_ids: Container[int], drops_first_space: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._drops_first_space = drops_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        skipped = self._skipped_ids
        data = b"".join([self._token_bytes[i] for i in token_ids if i not in skipped])
        return self._after_first_space(self._utf8.decode(data))

    def finish(self) -> str:
        return self._after_first_space(self._utf8.decode(b"", final=True))

    def _after_first_space(self, text: str) -> str:
        if not self._drops_first_space or not text:
            return text
        self._drops_first_space = False
        return text.removeprefix(" ")


class StreamDetokenizer:
    """Detokenizer of any other vocabulary, by the tokenizers library."""

    def __init__(
        self, backend: tokenizers.Tokenizer, skipped_ids: Container[int], after: Sequence[int]
    ) -> None:
        self._backend = backend
        self._skipped_ids = skipped_ids
        self._ids = [i for i in after[-_NUM_CONTEXT_IDS:] if i not in skipped_ids]
        context = self._decode()
        if context.endswith("\ufffd"):
            # The library would treat a partial character as pending and emit the context.
            self._ids, context = [], ""
        self._num_sent = len(context)
        self._stream: DecodeStream | None = DecodeStream(
            ids=list(self._ids), skip_special_tokens=False
        )

    def push(self, token_ids: Sequence[int]) -> str:
        token_ids = [i for i in token_ids if i not in self._skipped_ids]
        self._ids.extend(token_ids)
        text = "".join([self._step(token_id) for token_id in token_ids])
        self._num_sent += len(text)
        return text

    def finish(self) -> str:
        return self._decode()[self._num_sent :]

    def _step(self, token_id: int) -> str:
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:
            # The library raises a bare Exception when a decoder rewrites emitted text.
            # Sent text cannot be withdrawn, so the rest waits for the whole decoding.
            self._stream = None
            return ""

    def _decode(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=False)
