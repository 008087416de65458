"""Reads the tokenizer of a model folder: `tokenizer.json` and related JSON files.

Defines which file takes precedence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from headway.errors import ModelLoadError
from headway.text.loaded import LoadedTokenizer, surround

_TEMPLATE_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def load_folder_tokenizer(folder: Path) -> LoadedTokenizer:
    """Return tokenizer, special tokens and chat template of a folder."""
    backend = _read_backend(folder)
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config)
    bos_token_id = _id_of(backend, special_tokens.get("bos_token"))
    eos_token_id = _id_of(backend, special_tokens.get("eos_token"))
    _follow_config(backend, config, bos_token_id, eos_token_id)
    stated = [] if eos_token_id is None else [eos_token_id]
    return LoadedTokenizer(
        backend=backend,
        bos_token_id=bos_token_id,
        eos_token_ids=tuple(dict.fromkeys(stated + _generation_eos_ids(folder))),
        special_tokens=special_tokens,
        chat_template=_chat_template(folder, config),
        longest_token=max(map(len, backend.get_vocab(with_added_tokens=True))),
    )


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"no tokenizer.json in {folder}; a SentencePiece tokenizer.model alone is not enough"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    # Settings of training: a prompt must never be truncated or padded silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _TEMPLATE_NAMES:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _follow_config(
    backend: tokenizers.Tokenizer,
    config: Mapping[str, Any],
    bos_token_id: int | None,
    eos_token_id: int | None,
) -> None:
    """Apply `add_bos_token` and `add_eos_token`, which take precedence over tokenizer.json."""
    added = backend.encode("").ids
    before, after = _is_at(added[:1], bos_token_id), _is_at(added[-1:], eos_token_id)
    wants_before = _flag(config, "add_bos_token", before, bos_token_id)
    wants_after = _flag(config, "add_eos_token", after, eos_token_id)
    if (wants_before, wants_after) != (before, after):
        bos = [bos_token_id] if wants_before and bos_token_id is not None else []
        eos = [eos_token_id] if wants_after and eos_token_id is not None else []
        surround(backend, bos, eos)


def _is_at(position: list[int], token_id: int | None) -> bool:
    return token_id is not None and position == [token_id]


def _flag(config: Mapping[str, Any], key: str, otherwise: bool, token_id: int | None) -> bool:
    value = config.get(key)
    return value if isinstance(value, bool) and token_id is not None else otherwise


def _generation_eos_ids(folder: Path) -> list[int]:
    """Return the end ids; `generation_config.json` takes precedence over `config.json`."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        ids = [token_id for token_id in ids if isinstance(token_id, int)]
        if ids:
            return ids
    return []


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    for content in (_read_json(folder / "chat_template.json"), config):
        template = content.get("chat_template")
        if isinstance(template, list):
            entries = [entry for entry in template if isinstance(entry, dict)]
            template = {e.get("name"): e.get("template") for e in entries}.get("default")
        if isinstance(template, str):
            return template
    return None
