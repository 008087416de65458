"""The tokenizer of a model: text to token ids and back, and special tokens.

Wraps the tokenizers library. Holds no state of requests; detokenizers do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from headway.errors import InvalidRequestError, ModelLoadError
from headway.text.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer
from headway.text.folder_tokenizer import load_folder_tokenizer
from headway.text.gguf_tokenizer import load_gguf_tokenizer
from headway.text.loaded import LoadedTokenizer
from headway.text.token_bytes import TokenBytes, spelling_of


class Tokenizer:
    """Tokenizer of one model; safe to share between threads."""

    def __init__(self, loaded: LoadedTokenizer) -> None:
        self._backend = loaded.backend
        self._spelling = spelling_of(loaded.backend)
        self._bytes = self._spelling and TokenBytes(loaded.backend, self._spelling)
        added = loaded.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = loaded.backend.get_vocab_size(with_added_tokens=True)
        self._longest_token = loaded.longest_token
        self.bos_token_id: int | None = loaded.bos_token_id
        self.eos_token_ids: tuple[int, ...] = loaded.eos_token_ids
        self.special_tokens: Mapping[str, str] = loaded.special_tokens
        self.chat_template: str | None = loaded.chat_template

    @classmethod
    def from_path(cls, path: Path | str) -> Tokenizer:
        """Load the tokenizer of a model folder or a GGUF file."""
        path = Path(path)
        if path.is_dir():
            return cls.from_folder(path)
        if path.is_file():
            return cls.from_gguf(path)
        raise ModelLoadError(f"no model folder or GGUF file at {path}")

    @classmethod
    def from_folder(cls, path: Path | str) -> Tokenizer:
        return cls(load_folder_tokenizer(Path(path)))

    @classmethod
    def from_gguf(cls, path: Path | str) -> Tokenizer:
        return cls(load_gguf_tokenizer(Path(path)))

    def digest(self) -> str:
        """Return a digest of all that decides token ids; the same wherever it was read from."""
        facts = (self._backend.to_str(), str(self.bos_token_id), str(self.eos_token_ids))
        return sha256("\n".join(facts).encode()).hexdigest()

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the token count, far cheaper than encoding."""
        return -(-len(text) // self._longest_token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        A rendered chat contains its special tokens: encode it without adding them.
        """
        try:
            # As a batch of one: `encode` would block every other thread.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(
                "the text holds a lone surrogate, not Unicode text"
            ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        after: Sequence[int] = (),
        shown_ids: Sequence[int] = (),
    ) -> Detokenizer:
        """Return a detokenizer; `after` is the end of the prompt that the ids continue.

        Without `after` the ids start a text, and SentencePiece vocabularies drop the space that
        marks the start. `shown_ids` are not skipped.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if shown_ids:
            skipped = skipped.difference(shown_ids)
        if self._spelling is None or self._bytes is None:
            return StreamDetokenizer(self._backend, skipped, after)
        return ByteDetokenizer(self._bytes, skipped, self._spelling.drops_first_space and not after)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; they may be part of a character."""
        if self._bytes is not None:
            return self._bytes[token_id]
        return self._backend.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """Return the text of a token, with U+FFFD for parts of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")
