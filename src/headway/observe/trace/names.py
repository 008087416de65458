"""Ids of the engine requests behind one HTTP request.

The first prompt has the id of the HTTP request, `cmpl-1f`; further prompts are `cmpl-1f-1` and so
on. Samples of a prompt beyond the first are `cmpl-1f#1`, `cmpl-1f-1#1`.
"""

from __future__ import annotations

import re

_PROMPT = re.compile(r"(.+-.+)-(\d+)")


def prompt_id(request_id: str, prompt_index: int) -> str:
    """Return the id of a prompt of an HTTP request."""
    return request_id if prompt_index == 0 else f"{request_id}-{prompt_index}"


def split_id(part_id: str) -> tuple[str, int, int]:
    """Return the HTTP request id, the prompt index and the sample index."""
    prompt, _, sample = part_id.partition("#")
    match = _PROMPT.fullmatch(prompt)
    index = int(sample) if sample.isdecimal() else 0
    return (match[1], int(match[2]), index) if match else (prompt, 0, index)


def part_name(part_id: str) -> str:
    """Return the display name of a part; empty for the first."""
    _, prompt, sample = split_id(part_id)
    words = [f"prompt {prompt + 1}"] if prompt else []
    return ", ".join([*words, f"sample {sample + 1}"] if sample else words)


def prompt_name(name: str) -> str:
    """Return the display name of the prompt that a part belongs to; empty for the first."""
    return name.rpartition("sample ")[0].removesuffix(", ") if "sample " in name else name
