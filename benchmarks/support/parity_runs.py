"""Runs prompts through a real executor under a given schedule and collects the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import (
    Admitted,
    Event,
    Finished,
    Preempted,
    PromptScored,
    TokensEmitted,
)
from headway.core.executor import Executor
from headway.core.invariants import check_drained
from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason, Request, sample_id
from headway.core.scheduler import Scheduler

Tokens = list[int]


@dataclass
class Collected:
    """Tokens, prompt scores, prefix hits and preemptions of a run, by request id."""

    tokens: dict[str, Tokens] = field(default_factory=dict)
    scores: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    num_cached: dict[str, int] = field(default_factory=dict)
    num_preemptions: dict[str, int] = field(default_factory=dict)

    def consume(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEmitted):
                self.tokens.setdefault(event.request_id, []).extend(event.token_ids)
            elif isinstance(event, PromptScored):
                self.scores.setdefault(event.request_id, []).extend(event.logprobs)
            elif isinstance(event, Admitted):
                self.num_cached[event.request_id] = event.num_cached_tokens
            elif isinstance(event, Preempted):
                count = self.num_preemptions.get(event.request_id, 0)
                self.num_preemptions[event.request_id] = count + 1
            elif isinstance(event, Finished):
                assert event.reason is FinishReason.LENGTH, event

    def of(self, index: int, sample: int = 0) -> Tokens:
        return self.tokens[sample_id(str(index), sample)]


@dataclass
class Schedule:
    """Settings and disturbances of a run."""

    config: SchedulerConfig
    enable_prefix_caching: bool = False
    interfere: Callable[[EngineCore, int], None] | None = None
    """Called before every step with the number of steps done."""
    warm_up: Sequence[Tokens] = ()
    """Prompts that run first, for one token each."""


def run(
    executor: Executor,
    schedule: Schedule,
    prompts: Sequence[Tokens],
    params: Sequence[SamplingParams],
) -> Collected:
    """Run all prompts together to their end; check that every block is free."""
    collected = Collected()
    scheduler = Scheduler(schedule.config, executor.capacity(), schedule.enable_prefix_caching)
    core = EngineCore(scheduler, executor, SystemClock(), collected.consume)
    for index, prompt in enumerate(schedule.warm_up):
        core.add(new_request(f"warm-up-{index}", prompt, SamplingParams(max_tokens=1)))
    while core.has_work:
        core.step()
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        core.add(new_request(str(index), prompt, sampling))
    num_steps = 0
    while core.has_work:
        if schedule.interfere is not None:
            schedule.interfere(core, num_steps)
        core.step()
        num_steps += 1
    check_drained(scheduler)
    return collected


def run_one_by_one(
    executor: Executor,
    schedule: Schedule,
    prompts: Sequence[Tokens],
    params: Sequence[SamplingParams],
) -> Collected:
    """Run each prompt alone on the executor."""
    together = Collected()
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        alone = run(executor, schedule, [prompt], [sampling])
        together.tokens[str(index)] = alone.of(0)
    return together


def new_request(
    request_id: str, prompt: Tokens, params: SamplingParams, priority: int = 0
) -> Request:
    return Request(
        id=request_id,
        token_ids=list(prompt),
        params=replace(params, ignore_eos=True),
        seed=params.seed or 0,
        arrived_at=SystemClock().now(),  # an earlier arrival would have aged
        priority=priority,
    )


def preempt_all(at_step: int) -> Callable[[EngineCore, int], None]:
    """Return a hook that adds `max_num_seqs` requests of higher priority at one step.

    They preempt all running requests.
    """

    def interfere(core: EngineCore, num_steps: int) -> None:
        if num_steps == at_step:
            for number in range(core.scheduler.config.max_num_seqs):
                params = SamplingParams(max_tokens=1, temperature=0.0)
                core.add(new_request(f"requester-{number}", [11 + number, 12, 13], params, -1))

    return interfere
