"""A small engine for tests: a fake executor, a virtual clock, and every event kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core import invariants
from headway.core.engine import EngineCore
from headway.core.events import Event, Finished, TokensEmitted
from headway.core.executor import BlockRecorder, Capacity, Executor
from headway.core.params import SamplingParams
from headway.core.plan import ScheduledRequest, StepPlan
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.executors.fake import FakeExecutor, next_token

SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "prefill_floor": 1,
    "kv_watermark": 0.0,
}
T = TypeVar("T")


def make_request(
    request_id: str = "a",
    prompt: int | Sequence[int] = 4,
    max_tokens: int = 8,
    **fields: Any,
) -> Request:
    """A request; a prompt given as a length has tokens no other such prompt shares."""
    names = ("n", "min_tokens", "stop_token_ids", "prompt_logprobs", "is_embedding")
    params = {name: fields.pop(name) for name in names if name in fields}
    return Request(
        id=request_id,
        token_ids=own_tokens(request_id, prompt) if isinstance(prompt, int) else list(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),
        seed=fields.pop("seed", 7),
        arrived_at=fields.pop("arrived_at", 0.0),
        **fields,
    )


def own_tokens(request_id: str, length: int) -> list[int]:
    base = int.from_bytes(request_id.encode()[:4]) * 1000
    return list(range(base, base + length))


def expected_output(
    prompt: Sequence[int], num_tokens: int, seed: int = 7, index: int = 0
) -> list[int]:
    """What the fake executor must produce if no block is ever corrupted."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context, seed, index))
    return context[len(prompt) :]


class Harness:
    """EngineCore with its parts in reach; the invariants are checked around every action."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        executor: Executor | None = None,
        recorder: BlockRecorder | None = None,
        **settings: Any,
    ) -> None:
        max_model_len, num_slots = (
            settings.pop("max_model_len", 10_000),
            settings.pop("num_slots", 0),
        )
        self.capacity = Capacity(num_blocks, block_size, max_model_len, num_slots)
        self.scheduler = Scheduler(
            SchedulerConfig(**{**SMALL, **settings}), self.capacity, enable_prefix_caching
        )
        self.clock = VirtualClock()
        self.events: list[Event] = []
        self.executor = executor or FakeExecutor(self.capacity)
        self.core = self.make_core(recorder)

    def make_core(self, recorder: BlockRecorder | None) -> EngineCore:
        sink = self.events.extend
        return EngineCore(self.scheduler, self.executor, self.clock, sink, recorder)

    def add(self, request_id: str, prompt: int | Sequence[int] = 4, **fields: Any) -> Request:
        request = make_request(request_id, prompt, arrived_at=self.clock.now(), **fields)
        self.core.add(request)
        self.check()
        return request

    def abort(self, request_id: str) -> bool:
        was_here = self.core.abort(request_id)
        self.check()
        return was_here

    def begin(self) -> StepPlan | None:
        plan = self.core.begin_step()
        self.check()
        if plan is not None:
            invariants.check_plan(self.scheduler, plan)
        return plan

    def end(self) -> None:
        self.core.end_step()
        self.check()

    def step(self) -> dict[str, ScheduledRequest]:
        """One step; what it scheduled, by request id, in the plan's order."""
        plan = self.begin()
        if plan is None:
            return {}
        self.end()
        return {item.request_id: item for item in plan.scheduled}

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def until(self, is_reached: Callable[[], bool]) -> None:
        """Step until something holds, which must happen before the work ends."""
        while not is_reached():
            if not self.step():
                raise AssertionError("the engine is idle and it has not happened")

    def run(self, max_steps: int = 2000) -> None:
        """To the end, which must come, and with every block free."""
        for _ in range(max_steps):
            if not self.core.has_work:
                invariants.check_drained(self.scheduler)
                return
            if not self.step():
                raise AssertionError("work is present and nothing was scheduled")
        raise AssertionError(f"still busy after {max_steps} steps")

    def advance(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)

    def check(self) -> None:
        invariants.check(self.scheduler)

    @property
    def running(self) -> list[str]:
        return [request.id for request in self.scheduler.running]

    @property
    def waiting(self) -> set[str]:
        return {request.id for request in self.scheduler.waiting}

    @property
    def num_free(self) -> int:
        return self.scheduler.kv.pool.num_free

    def seen(self, kind: type[T], request_id: str | None = None) -> list[T]:
        """The events of a kind so far, in order."""
        return [
            event
            for event in self.events
            if isinstance(event, kind)
            and request_id in (None, getattr(event, "request_id", request_id))
        ]

    def output(self, request_id: str) -> list[int]:
        emitted = self.seen(TokensEmitted, request_id)
        return [token_id for event in emitted for token_id in event.token_ids]

    def finish(self, request_id: str) -> Finished:
        """The one Finished event of a request."""
        (event,) = self.seen(Finished, request_id)
        return event
