"""How the engine requests behind one HTTP request are named, and whose part each one is.

The first prompt goes by the name of the HTTP request itself, `cmpl-1f`; further ones are called
`cmpl-1f-1` and so on. Samples of a prompt beyond the first are `cmpl-1f#1`, `cmpl-1f-1#1`.
"""

from __future__ import annotations

import re

_PROMPT = re.compile(r"(.+-.+)-(\d+)")


def prompt_id(request_id: str, prompt_index: int) -> str:
    """The name of one of the prompts of an HTTP request."""
    return request_id if prompt_index == 0 else f"{request_id}-{prompt_index}"


def split_id(part_id: str) -> tuple[str, int, int]:
    """The HTTP request, and which of its prompts and of that prompt's samples this is."""
    prompt, _, sample = part_id.partition("#")
    match = _PROMPT.fullmatch(prompt)
    index = int(sample) if sample.isdecimal() else 0
    return (match[1], int(match[2]), index) if match else (prompt, 0, index)


def part_name(part_id: str) -> str:
    """What to call a part in front of a reader: nothing, for the first."""
    _, prompt, sample = split_id(part_id)
    words = [f"prompt {prompt + 1}"] if prompt else []
    return ", ".join([*words, f"sample {sample + 1}"] if sample else words)
