"""What a model format says about its tokenizer, as one value.

The readers of folders and GGUF files return it; nothing here reads files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers.processors import TemplateProcessing


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """Tokenizer, special tokens and chat template of a model.

    `special_tokens` maps names of chat templates (`bos_token`, ...) to text.
    """

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None
    longest_token: int
    """In characters of its spelling, of which a token has at least as many as of its text."""


def surround(backend: tokenizers.Tokenizer, before: list[int], after: list[int]) -> None:
    """Make `encode` with special tokens add these ids around the text."""
    # The template names tokens by alias: real token text may hold ':' or '$', which it would parse.
    specials = [
        {"id": name, "ids": ids, "tokens": [backend.id_to_token(token_id) for token_id in ids]}
        for name, ids in (("before", before), ("after", after))
        if ids
    ]
    names = {special["id"] for special in specials}
    pieces = ["before"] * ("before" in names) + ["$A"] + ["after"] * ("after" in names)
    backend.post_processor = TemplateProcessing(single=pieces, special_tokens=specials)
