"""Tiny tokenizers in both formats, and writers of their files."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headway.text.token_bytes import _byte_level_alphabet

BYTE_TO_CHAR = {byte: character for character, byte in _byte_level_alphabet().items()}


def spell(data: bytes) -> str:
    return "".join(BYTE_TO_CHAR[byte] for byte in data)


# Pieces that end inside a character, and pieces that start inside one.
PARTIAL = [(b"\xe4", b"\xbd"), (b"\xf0", b"\x9f"), (b"\x98", b"\x80")]


def byte_level_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    vocab = {BYTE_TO_CHAR[byte]: byte for byte in range(256)}
    merges = []
    words = [(b"h", b"i"), (b" ", b"hi"), (b"1", b"2"), (b"12", b"3"), (b"123", b"4")]
    for left, right in PARTIAL + words:
        merges.append((spell(left), spell(right)))
        vocab[spell(left + right)] = len(vocab)
    return vocab, merges


def byte_level_backend() -> Tokenizer:
    vocab, merges = byte_level_parts()
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in ("<s>", "</s>", "<end>")])
    backend.add_tokens([AddedToken("<\u2581think>", normalized=False)])
    return backend


def write_folder(folder: Path, backend: Tokenizer, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_gguf(path: Path, model: str, tokens: list[str], **keys: object) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    for key, value in keys.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, value)  # pyright: ignore[reportArgumentType]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SPM_WORDS = ["▁", "h", "i", "t", "e", "a", "aa", "▁h", "▁hi", "hi", "th", "the", "▁the", "▁t", "▁a"]


def spm_parts() -> tuple[list[str], list[float], list[int]]:
    special = ["<unk>", "<s>", "</s>"]
    lone = [f"<0x{byte:02X}>" for byte in range(256)]
    defined = ["<think>"]
    tokens = special + lone + SPM_WORDS + defined
    scores = [0.0] * 259 + [-float(i) for i in range(len(SPM_WORDS))] + [0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * len(SPM_WORDS) + [4]
    return tokens, scores, types


def write_spm(path: Path, **keys: object) -> Path:
    tokens, scores, types = spm_parts()
    known = {"scores": scores, "token_type": types}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_gguf(path, "llama", tokens, **(known | ids | keys))


def write_byte_level(path: Path, **keys: object) -> Path:
    vocab, merges = byte_level_parts()
    tokens = [*vocab, "hello", "<s>", "</s>", "<end>", "<think>"]
    types = [1] * (len(vocab) + 1) + [3, 3, 3, 4]
    num_words = len(vocab) + 1
    known = {"token_type": types, "merges": [" ".join(pair) for pair in merges]}
    ids = {"bos_token_id": num_words, "eos_token_id": num_words + 1, "eot_token_id": num_words + 2}
    return write_gguf(path, "gpt2", tokens, **(known | ids | keys))
