"""Engine and request tiers of sim/deadlines.py and sim/control.py."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.sim import SMOLLM2_135M, Record, Simulation

CAPACITY = Capacity(num_blocks=3000, block_size=16, max_model_len=4096)
MAX_NUM_SEQS = 64


def make_simulation(settings: dict[str, Any], seed: int = 0) -> Simulation:
    """Return a simulated engine with these settings and SmolLM2's step times."""
    return Simulation(SchedulerConfig(**settings), CAPACITY, SMOLLM2_135M, seed)


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of request: its share of all requests, median lengths and targets."""

    name: str
    share: float
    median_prompt: int
    median_output: int
    targets: Targets = NO_TARGETS
    priority: int = 0


def draw_record(number: int, at: float, tier: Tier, draw: random.Random) -> Record:
    """Draw a request of a tier, with lognormal lengths around the tier's medians.

    `max_tokens` is up to three times the output: the scheduler does not know the length.
    """
    num_prompt = min(2000, max(8, int(tier.median_prompt * draw.lognormvariate(0.0, 0.6))))
    num_output = min(400, max(2, int(tier.median_output * draw.lognormvariate(0.0, 0.6))))
    max_tokens = int(num_output * draw.uniform(1.0, 3.0))
    terms = Terms(tenant=tier.name, tier=tier.name, targets=tier.targets)
    return Record(f"r{number}", at, num_prompt, num_output, max_tokens, terms, tier.priority)
