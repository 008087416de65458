"""Requests, engines and steps for tests of the router."""

from __future__ import annotations

from itertools import count

from headway.core.events import Stepped
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.slo.forecast import EngineSpeed, Forecast
from headway.core.slo.steptime import StepCost
from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.routing import EngineLimits, Router

LIMITS = EngineLimits(num_blocks=1000, block_size=16, max_num_seqs=8)
COST = StepCost(num_steps=100)
_numbers = count()


def request(
    tokens: list[int] | int = 64,
    tenant: str = "",
    *,
    name: str | None = None,
    weight: float = 1.0,
    n: int = 1,
    group: str | None = None,
    targets: Targets = NO_TARGETS,
    priority: int = 0,
    is_spot: bool = False,
    max_kv_share: float = 1.0,
) -> Request:
    """Return a request; a number of tokens makes a prompt that is like no other."""
    number = next(_numbers)
    token_ids = [100_000 + number] * tokens if isinstance(tokens, int) else list(tokens)
    terms = Terms(
        tenant=tenant,
        weight=weight,
        cache_group=tenant if group is None else group,
        targets=targets,
        is_spot=is_spot,
        max_kv_share=max_kv_share,
    )
    return Request(
        id=name or f"r{number}",
        token_ids=token_ids,
        params=SamplingParams(max_tokens=32, n=n),
        seed=0,
        arrived_at=0.0,
        priority=priority,
        terms=terms,
    )


def router(num_engines: int = 2, limits: EngineLimits = LIMITS, **settings) -> Router:
    made = Router(**settings)
    for number in range(num_engines):
        made.engine_joined(f"e{number}", limits, COST)
    return made


def step(
    num_tokens: int = 0, *, num_running: int = 0, num_waiting: int = 0, cost: StepCost = COST
) -> Stepped:
    """Return the state of an engine after a step of 20 ms."""
    return Stepped(
        step_id=0,
        at=0.0,
        elapsed_s=0.02,
        num_tokens=num_tokens,
        token_budget=512,
        num_scheduled=num_running,
        max_num_seqs=8,
        num_running=num_running,
        num_waiting=num_waiting,
        num_blocks_used=0,
        num_blocks=1000,
        forecast=Forecast(EngineSpeed(cost, 0.02, 0.15)),
    )


def prompt(*parts: int) -> list[int]:
    """Return a prompt with a block of 16 tokens for each number."""
    return [part for part in parts for _ in range(16)]


def serve(made: Router, name: str, num_cached: int = 0) -> None:
    """Have a request that was sent run to its first token."""
    made.admitted(name, num_cached)
    made.first_token(name)
