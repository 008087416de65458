"""Makes GGUF files that are nearly right: seeded changes to the bytes of small valid ones."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.support.tiny_tokenizers import write_byte_level, write_spm

ODD_COUNTS = (0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
NUM_VALUE_TYPES = 13


def seed_files(folder: Path) -> list[bytes]:
    """One file of each kind of tokenizer, with and without a chat template's worth of keys."""
    made = [
        write_byte_level(folder / "byte_level.gguf", pre="gpt-2", add_bos_token=True),
        write_byte_level(folder / "llama3.gguf", pre="llama-bpe"),
        write_byte_level(folder / "qwen2.gguf", pre="qwen2"),
        write_spm(folder / "spm.gguf", add_eos_token=True),
    ]
    return [path.read_bytes() for path in made]


def mutated_files(seeds: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    for place in range(count):
        source = random.Random(f"{seed}/{place}")
        data = source.choice(seeds)
        for _ in range(source.choice((1, 1, 2, 4))):
            data = change_bytes(data, seeds, source)
        yield data


def change_bytes(data: bytes, seeds: list[bytes], source: random.Random) -> bytes:
    # The first kilobyte holds the counts and most keys: a change there goes furthest.
    end = source.choice((24, 200, 1024, len(data)))
    at = source.randrange(min(end, len(data)) + 1)
    number = struct.pack("<Q", source.choice(ODD_COUNTS))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at] + bytes([source.randrange(256)]) + data[at + 1 :],
        lambda: data[:at] + number + data[at + 8 :],
        lambda: (
            data[:at] + struct.pack("<I", source.randrange(NUM_VALUE_TYPES + 2)) + data[at + 4 :]
        ),
        lambda: data[:at],
        lambda: data[:at] + data[at + source.randrange(1, 64) :],
        lambda: data[:at] + source.randbytes(source.randrange(1, 64)) + data[at:],
        lambda: data[:at] + source.choice(seeds)[at:],
        lambda: _swapped_ids(data, source),
    )
    return source.choice(changes)()


def _swapped_ids(data: bytes, source: random.Random) -> bytes:
    """The value of a key that names a token, replaced: a file can be whole and still be wrong."""
    keys = [key for key in (b"bos_token_id", b"eos_token_id", b"eot_token_id") if key in data]
    if not keys:
        return data
    key = source.choice(keys)
    at = data.index(key) + len(key) + 4
    return data[:at] + struct.pack("<I", source.choice(ODD_COUNTS) % 2**32) + data[at + 4 :]
