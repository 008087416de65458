"""Writes the workloads as plain lists to a file that every runner reads."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from headway.workload import WorkItem, parse_workload

LOW, HIGH = 100, 49_000
COLD = "cold"
DECODES = {"decode-1": 1, "decode-8": 8, "decode-32": 32}
"""Numbers of streams that decode together, by workload."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload; with `is_warmed_up`, it runs once untimed before the first timed run."""

    name: str
    about: str
    items: tuple[WorkItem, ...]
    is_warmed_up: bool = True


def make_workloads() -> dict[str, Measured]:
    """Return all workloads by name; the seeds are part of the definitions."""
    measured = (
        Measured(
            "mixed-64",
            "64 requests, 9,996 prompt and 5,371 output tokens, at most 32 running",
            parse_workload("mixed-64").items,
        ),
        Measured(
            "single", "one stream, 64 prompt and 128 output tokens", _uniform(1, 64, 128, seed=1)
        ),
        Measured(
            "long", "8 prompts of 3,500 tokens, 64 outputs each", _uniform(8, 3500, 64, seed=2)
        ),
        *(
            Measured(
                name, f"{count} streams, 64 prompt and 64 output tokens", _uniform(count, 64, 64, 5)
            )
            for name, count in DECODES.items()
        ),
        Measured(
            COLD,
            "from the start of the process to the first token of a 64-token prompt",
            _uniform(1, 64, 1, seed=3),
            is_warmed_up=False,
        ),
        Measured("smoke", "4 prompts of 16-64 tokens, 8 outputs each: no figure", _smoke()),
    )
    return {item.name: item for item in measured}


def write_workloads(path: Path, workloads: dict[str, Measured]) -> None:
    content = {
        name: {
            "is_warmed_up": workload.is_warmed_up,
            "items": [
                {"prompt": item.prompt_token_ids, "num_output": item.num_output_tokens}
                for item in workload.items
            ],
        }
        for name, workload in workloads.items()
    }
    path.write_text(json.dumps(content))


def _uniform(
    num_requests: int, num_prompt: int, num_output: int, seed: int
) -> tuple[WorkItem, ...]:
    draw = random.Random(seed)
    return tuple(
        WorkItem(tuple(draw.randint(LOW, HIGH) for _ in range(num_prompt)), num_output)
        for _ in range(num_requests)
    )


def _smoke() -> tuple[WorkItem, ...]:
    draw = random.Random(4)
    return tuple(
        WorkItem(tuple(draw.randint(LOW, HIGH) for _ in range(length)), 8)
        for length in (16, 32, 48, 64)
    )
