"""A long seeded random walk over the engine core: far more steps than a state machine affords.

Each epoch draws a new small engine, walks it, and drains it. Cheap checks follow every action,
the full invariants every few.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from tests.properties.rig import TARGETS, RequestSpec, Rig, terms_of

STEPS_PER_EPOCH = 500
STEPS_PER_CHECK = 50
REPORTED = (
    *("steps", "requests", "preemptions", "trim", "checkpoint", "recompute", "saves", "loads"),
    *("aborts", "forks", "refusals"),
)


@dataclass(slots=True)
class Tally:
    """What a walk has seen. A violation raises, so a summary has none to report."""

    counts: Counter[str] = field(default_factory=Counter[str])

    def take(self, rig: Rig) -> None:
        seen = rig.ledger.counts
        self.counts["steps"] += rig.num_steps
        self.counts["requests"] += seen["Arrived"]
        self.counts["preemptions"] += seen["Preempted"]
        for name in ("trim", "checkpoint", "recompute"):
            self.counts[name] += seen[f"preempted_{name}"]
        self.counts["saves"] += rig.executor.num_saves
        self.counts["loads"] += rig.executor.num_loads
        self.counts["aborts"] += seen["finished_abort"]
        self.counts["forks"] += seen["Forked"]
        self.counts["refusals"] += seen["Refused"]

    def summary(self) -> str:
        return " ".join(f"{name}={self.counts[name]}" for name in REPORTED)


def draw_rig(rng: random.Random, rig_class: type[Rig] = Rig) -> Rig:
    floor = rng.randint(1, 4)
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 12),
        max_num_batched_tokens=floor + rng.randint(1, 24),
        scheduling_policy=rng.choice(["fair", "fair", "fcfs", "priority", "deadline"]),
        prefill_floor=floor,
        prefill_cap=rng.choice([None, floor + rng.randint(0, 8)]),
        kv_watermark=rng.choice([0.0, 0.1, 0.4]),
        max_preemptions=rng.randint(1, 4),
        preemption_method=rng.choice(["auto", "auto", "trim", "checkpoint", "recompute"]),
        max_wait_s=rng.choice([0.0, 0.3, 3.0, 1000.0]),
    )
    capacity = Capacity(
        rng.randint(4, 48),
        rng.randint(1, 6),
        rng.randint(16, 64),
        num_slots=rng.choice([0, 1, 3, 40]),
        # By the cost of a token as it is before any was measured, either way is cheaper at times.
        block_copy_s=rng.choice([0.0, 0.0003, 1.0]),
    )
    terms = tuple(
        terms_of(
            tenant,
            rng.choice([0.5, 1.0, 3.0]),
            rng.choice([0.3, 0.6, 1.0, 1.0]),
            rng.choice(TARGETS),
        )
        for tenant in range(4)
    )
    return rig_class(config, capacity, rng.random() < 0.7, terms)


def draw_spec(rng: random.Random, rig: Rig) -> RequestSpec:
    """Draw a request; most fit an empty engine, a few never do."""
    capacity = rig.capacity
    room = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1)
    prompt_len = rng.randint(1, max(1, room - 2))
    max_n = min(4, rig.scheduler.config.max_num_seqs)
    return RequestSpec(
        stem=rng.randrange(6),
        prompt_len=prompt_len,
        max_tokens=rng.randint(1, room - prompt_len) + room * (rng.random() < 0.02),
        n=rng.choice([1, rng.randint(1, max_n)]),
        priority=rng.choice([0, 0, 0, -1, 1, 2]),
        tenant=rng.randrange(4),
        is_spot=rng.random() < 0.2,
        stop_at=rng.choice([0, 0, rng.randint(1, 12)]),
        min_tokens=rng.choice([0, 0, 2]),
    )


class Walker:
    """One engine, and the habits of its clients."""

    def __init__(self, rng: random.Random, rig_class: type[Rig] = Rig) -> None:
        self._rng = rng
        self.rig = draw_rig(rng, rig_class)
        self._crowd = rng.choice([2, 6, 20])

    def act(self) -> None:
        """One step, and what clients do around it and while it is in flight."""
        rng, rig = self._rng, self.rig
        while len(rig.ledger.live) < self._crowd and rng.random() < 0.6:
            rig.add(draw_spec(rng, rig))
        if rng.random() < 0.05:
            self._meddle()
        if rig.begin() is not None:
            if rng.random() < 0.1:
                self._meddle()
            rig.end()
        rig.advance(rng.choice([0.001, 0.02, 0.2]))
        rig.check_books()

    def _meddle(self) -> None:
        rng, rig = self._rng, self.rig
        live = list(rig.ledger.live)
        choice = rng.random()
        if choice < 0.2 or not live:
            rig.add(draw_spec(rng, rig))
        elif choice < 0.3:
            rig.abort("never-seen")
        elif choice < 0.4:
            rig.executor.fail_next(rng.choice(live))
        else:
            rig.abort(rng.choice(live))


def walk(num_steps: int, seed: int, progress_s: float | None = None) -> Tally:
    """Walk at least so many steps; an AssertionError names the seed and the epoch."""
    tally = Tally()
    reported_at = time.monotonic()
    epoch = 0
    while tally.counts["steps"] < num_steps:
        walker = Walker(random.Random(f"{seed}/{epoch}"))
        left = num_steps - tally.counts["steps"]
        try:
            for index in range(min(STEPS_PER_EPOCH, left)):
                walker.act()
                if index % STEPS_PER_CHECK == 0:
                    walker.rig.check()
            walker.rig.drain()
        except Exception as error:
            error.add_note(f"walk seed={seed} epoch={epoch} step={walker.rig.num_steps}")
            error.add_note(f"before: {tally.summary()}")
            raise
        tally.take(walker.rig)
        epoch += 1
        if progress_s is not None and time.monotonic() - reported_at > progress_s:
            reported_at = time.monotonic()
            print(tally.summary(), flush=True)
    return tally
