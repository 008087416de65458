"""Builds a tokenizer from GGUF metadata.

Interprets the `tokenizer.*` keys: algorithm, pre-tokenization, special tokens. An unknown kind of
tokenizer is refused, never approximated: a wrongly split prompt still runs, with worse output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headway.errors import ModelLoadError
from headway.gguf_header import read_header
from headway.text.loaded import LoadedTokenizer, surround

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_ENDING_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TEMPLATE_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the spelling of the format
    "mask_token": "mask_token_id",
}


def load_gguf_tokenizer(path: Path) -> LoadedTokenizer:
    """Return tokenizer, special tokens and chat template of a GGUF file."""
    metadata = read_header(path).metadata
    try:
        return _Builder(metadata).build()
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelLoadError(f"{path}: its tokenizer cannot be built: {error}") from error


@dataclass(frozen=True, slots=True)
class _Split:
    """Pre-tokenization of a vocabulary, and the defaults of absent keys."""

    pattern: str | None = None  # None is GPT-2's pattern, which the library has built in
    isolates_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[Any] = []
        if self.isolates_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        has_builtin = self.pattern is None
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_builtin))
        return pre_tokenizers.Sequence(steps)


def _words_and_numbers(number: str) -> str:
    return "|".join(
        [
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            r"[^\r\n\p{L}\p{N}]?\p{L}+",
            number,
            r" ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    )


_GPT2 = _Split()
_DIGITS_THEN_GPT2 = _Split(isolates_digits=True)
_LLAMA3 = _Split(pattern=_words_and_numbers(r"\p{N}{1,3}"), ignores_merges=True, adds_bos=True)
_QWEN2 = _Split(pattern=_words_and_numbers(r"\p{N}"), is_nfc=True)

_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
}


class _Builder:
    """Builds the tokenizer of one file from its keys."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._tokens: list[str] = self._get("tokens") or []
        self._vocab = {token: index for index, token in enumerate(self._tokens)}
        self._types: list[int] = self._get("token_type") or [_NORMAL] * len(self._tokens)

    def build(self) -> LoadedTokenizer:
        self._check_vocabulary()
        backend, adds_bos = self._backend()
        self._add_special_tokens(backend)
        self._surround(backend, adds_bos)
        ending_ids = [self._token_id(key) for key in _ENDING_KEYS]
        names = {name: self._token_id(key) for name, key in _TEMPLATE_NAMES.items()}
        return LoadedTokenizer(
            backend=backend,
            bos_token_id=self._token_id("bos_token_id"),
            eos_token_ids=tuple(dict.fromkeys(i for i in ending_ids if i is not None)),
            special_tokens={name: self._tokens[i] for name, i in names.items() if i is not None},
            chat_template=self._metadata.get("tokenizer.chat_template"),
            longest_token=max(map(len, self._tokens)),
        )

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def _token_id(self, key: str) -> int | None:
        token_id = self._get(key)
        if token_id is not None and not 0 <= token_id < len(self._tokens):
            raise ModelLoadError(f"tokenizer.ggml.{key} is {token_id}, beyond the vocabulary")
        return token_id

    def _check_vocabulary(self) -> None:
        if not self._tokens:
            raise ModelLoadError("tokenizer.ggml.tokens is missing")
        if len(self._vocab) != len(self._tokens):
            num_repeated = len(self._tokens) - len(self._vocab)
            raise ModelLoadError(f"{num_repeated} tokens of tokenizer.ggml.tokens are repeated")
        if len(self._types) != len(self._tokens):
            raise ModelLoadError("tokenizer.ggml.token_type and .tokens differ in length")

    def _backend(self) -> tuple[tokenizers.Tokenizer, bool]:
        kind = self._get("model")
        if kind == "gpt2":
            return self._byte_level()
        if kind == "llama":
            return self._sentencepiece(), True
        raise ModelLoadError(
            f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' and 'llama'. "
            "Use the model's original folder with its tokenizer.json"
        )

    def _byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        name = self._get("pre") or "default"
        split = _SPLITS.get(name)
        if split is None:
            raise ModelLoadError(
                f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(_SPLITS))}. "
                "Use the model's original folder with its tokenizer.json"
            )
        model = models.BPE(self._vocab, self._merges(), ignore_merges=split.ignores_merges)
        backend = tokenizers.Tokenizer(model)
        if split.is_nfc:
            backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = split.pre_tokenizer()
        backend.decoder = decoders.ByteLevel()
        return backend, split.adds_bos

    def _sentencepiece(self) -> tokenizers.Tokenizer:
        merges = self._merges() if self._get("merges") else self._merges_from_scores()
        unknown_id = self._token_id("unknown_token_id")
        model = models.BPE(
            self._vocab,
            merges,
            unk_token=None if unknown_id is None else self._tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = tokenizers.Tokenizer(model)
        # A normalizer runs on each stretch between special tokens, so every stretch gets the
        # space, also one that already starts with a space: the model was trained on both.
        has_space_prefix = self._get("add_space_prefix") is not False
        prefix = [normalizers.Prepend("\u2581")] if has_space_prefix else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
        strip = [decoders.Strip(" ", 1, 0)] if has_space_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        return backend

    def _merges(self) -> list[tuple[str, str]]:
        merges = []
        for merge in self._get("merges") or []:
            # The left half has at least one character, which may itself be a space.
            border = merge.index(" ", 1)
            merges.append((merge[:border], merge[border + 1 :]))
        return merges

    def _merges_from_scores(self) -> list[tuple[str, str]]:
        """Return merges equivalent to SentencePiece scores: the best-scored pair first."""
        scores = self._get("scores")
        if scores is None or len(scores) != len(self._tokens):
            raise ModelLoadError(
                "neither tokenizer.ggml.merges nor a score for each token is present"
            )
        named = self._special_ids()
        pieces = {
            token: index
            for token, index in self._vocab.items()
            if self._types[index] == _NORMAL and index not in named
        }
        ranked = []
        for token, index in pieces.items():
            for border in range(1, len(token)):
                left, right = token[:border], token[border:]
                if left in pieces and right in pieces:
                    rank = (-scores[index], index, pieces[left], pieces[right])
                    ranked.append((rank, (left, right)))
        return [pair for _, pair in sorted(ranked)]

    def _special_ids(self) -> set[int]:
        ids = (self._token_id(key) for key in ("bos_token_id", *_ENDING_KEYS))
        return {token_id for token_id in ids if token_id is not None}

    def _add_special_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Add special tokens: output may skip control tokens, never user-defined ones."""
        named = self._special_ids()
        added = [
            AddedToken(token, special=kind != _USER_DEFINED or index in named, normalized=False)
            for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True))
            if token and (kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or index in named)
        ]
        backend.add_special_tokens([token for token in added if token.special])
        backend.add_tokens([token for token in added if not token.special])

    def _surround(self, backend: tokenizers.Tokenizer, adds_bos: bool) -> None:
        before = self._added_id("add_bos_token", "bos_token_id", adds_bos)
        after = self._added_id("add_eos_token", "eos_token_id", False)
        if before or after:
            surround(backend, before, after)

    def _added_id(self, flag_key: str, id_key: str, default: bool) -> list[int]:
        flag, token_id = self._get(flag_key), self._token_id(id_key)
        if flag and token_id is None:
            raise ModelLoadError(f"tokenizer.ggml.{flag_key} is set, but {id_key} is not")
        is_added = default if flag is None else flag
        return [token_id] if is_added and token_id is not None else []
