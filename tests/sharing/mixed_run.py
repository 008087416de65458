"""A run with a little of everything: tenants of unequal weight, one that may hold few blocks, spot
requests, priorities, several samples, prompts that begin alike, clients that leave, bursts, and
more demand for blocks than there are."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.support.wait_checker import WaitChecker
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.terms import Terms
from tests.sharing.rig import make_engine

NUM_BLOCKS, NUM_SEATS = 400, 32
STEM_TOKENS = 64
ABORT_SHARE = 0.06


def _terms(tenant: str, **fields: object) -> Terms:
    return Terms(tenant=tenant, cache_group=tenant, **fields)  # pyright: ignore


TENANTS = (
    (0.30, _terms("gold", tier="gold", weight=4.0)),
    (0.20, _terms("silver-1", tier="silver", weight=2.0)),
    (0.15, _terms("silver-2", tier="silver", weight=2.0)),
    (0.15, _terms("capped", tier="bronze", max_kv_share=0.15)),
    (0.20, _terms("night", tier="spot", is_spot=True)),
)


@dataclass(frozen=True, slots=True)
class Mixed:
    """The requests of a run, and when which of them are aborted."""

    requests: list[Request]
    aborts: list[tuple[float, str]]


def draw_mixed(num_requests: int, rate: float, seed: int) -> Mixed:
    """Half of them come in bursts of 20."""
    draw = random.Random(f"mixed/{seed}")
    requests: list[Request] = []
    aborts: list[tuple[float, str]] = []
    at = 0.0
    for number in range(num_requests):
        if number % 40 < 20 or number % 20 == 0:
            at += draw.expovariate(rate)
        (terms,) = draw.choices([t for _, t in TENANTS], [share for share, _ in TENANTS])
        # A tenant that may hold 60 blocks sends nothing that needs more.
        most = 500 if terms.max_kv_share < 1.0 else 1000
        num_prompt = min(most, max(4, int(draw.lognormvariate(4.8, 0.9))))
        num_output = min(300, max(1, int(draw.lognormvariate(3.6, 0.9))))
        prompt = [draw.randrange(100, 900) for _ in range(num_prompt)]
        if draw.random() < 0.35:
            prompt[:STEM_TOKENS] = [7] * min(STEM_TOKENS, num_prompt)
        requests.append(
            Request(
                id=f"r{number}",
                token_ids=prompt,
                params=SamplingParams(
                    max_tokens=num_output, n=draw.choices((1, 2, 5), (0.9, 0.07, 0.03))[0]
                ),
                seed=number,
                arrived_at=at,
                priority=draw.choice((0, 0, 0, 1, 2)),
                terms=terms,
            )
        )
        if draw.random() < ABORT_SHARE:
            aborts.append((at + draw.expovariate(0.5), f"r{number}"))
    return Mixed(requests, aborts)


def run_mixed(policy: str, num_requests: int, rate: float = 14.0, seed: int = 1) -> WaitChecker:
    """To the end; the books are closed."""
    checker = WaitChecker()
    engine = make_engine(
        NUM_BLOCKS,
        checker,
        scheduling_policy=policy,
        max_num_seqs=NUM_SEATS,
        max_num_batched_tokens=512,
        prefill_cap=256,
        max_wait_s=5.0,
    )
    mixed = draw_mixed(num_requests, rate, seed)
    engine.send(mixed.requests, mixed.aborts)
    engine.run()
    checker.conclude()
    return checker
