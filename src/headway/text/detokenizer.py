"""Turns token ids into text as they arrive.

A delta never holds half a character: bytes wait until they form one, and become U+FFFD only once
nothing that follows could complete them. Deltas and the final flush add up to the decoding of the
whole sequence. Owns the pending bytes of one sample; knows nothing of stop strings.
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
    """One sample's token ids in, its text out."""

    def push(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str:
        """What was pending; the detokenizer takes no more ids after it."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are bytes: constant work and at most three bytes held.

    `DecodeStream` would decode its whole window again for each token while the text ends in an
    incomplete character, which is quadratic when a model emits a run of stray bytes.
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
    """For any other decoder, through the tokenizer library's own incremental decoding."""

    def __init__(
        self, backend: tokenizers.Tokenizer, skip_special_tokens: bool, after: Sequence[int]
    ) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._ids = list(after[-_NUM_CONTEXT_IDS:])
        context = self._decode()
        if context.endswith("\ufffd"):
            # The library would take a half character as text to come, and give the context out.
            self._ids, context = [], ""
        self._num_sent = len(context)
        self._stream: DecodeStream | None = DecodeStream(
            ids=list(self._ids), skip_special_tokens=skip_special_tokens
        )

    def push(self, token_ids: Sequence[int]) -> str:
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
            # The library raises a bare Exception when a decoder rewrites text already given out.
            # What was sent cannot be taken back, so the rest waits for the whole decoding.
            self._stream = None
            return ""

    def _decode(self) -> str:
        return self._backend.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
