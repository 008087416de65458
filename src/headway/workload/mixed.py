"""Fixed offline workloads, to compare runs and peers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from headway.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: these prompt tokens and exactly this many output tokens.

    It arrives `at` seconds after the start. `tenant` is None with a single tenant.
    """

    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int
    at: float = 0.0
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class OfflineWorkload:
    """A named list of requests."""

    name: str
    items: tuple[WorkItem, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt_token_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.num_output_tokens for item in self.items)


def mixed(num_requests: int) -> OfflineWorkload:
    """Prompts of 32-256 random tokens, outputs lognormal(4.0, 0.9) clipped to 8-256.

    The order of the draws is part of the definition: other programs measure the same 64 requests.
    """
    draw = random.Random(0)
    items: list[WorkItem] = []
    for _ in range(num_requests):
        num_prompt = draw.randint(32, 256)
        num_output = min(256, max(8, int(draw.lognormvariate(4.0, 0.9))))
        prompt = tuple(draw.randint(100, 49000) for _ in range(num_prompt))
        items.append(WorkItem(prompt, num_output))
    return OfflineWorkload(f"mixed-{num_requests}", tuple(items))


WORKLOADS: dict[str, Callable[[], OfflineWorkload]] = {
    "mixed-16": lambda: mixed(16),
    "mixed-64": lambda: mixed(64),
    "mixed-256": lambda: mixed(256),
}


def parse_workload(text: str) -> OfflineWorkload:
    """Return a workload by name.

    With "@R" after the name, arrivals are a seeded Poisson process of R per second instead of all
    at once.
    """
    name, _, rate_text = text.partition("@")
    if name not in WORKLOADS:
        raise ConfigError(f"unknown workload {name!r}; one of {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]()
    if not rate_text:
        return workload
    try:
        rate = float(rate_text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < inf:
        raise ConfigError(f"{text!r}: what follows @ must be a positive rate per second")
    draw = random.Random(1)
    at = 0.0
    items: list[WorkItem] = []
    for item in workload.items:
        items.append(replace(item, at=at))
        at += draw.expovariate(rate)
    return replace(workload, name=text, items=tuple(items))
