"""A real AsyncEngine whose engine process is an object: the core runs in the test's own loop and
answers every prompt with a script."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from headway.clock import Clock, SystemClock
from headway.config import LedgerConfig, SchedulerConfig, ServerConfig
from headway.core import invariants
from headway.core.engine import EngineCore
from headway.core.events import Event
from headway.core.executor import Capacity
from headway.core.plan import Failure, Sample, ScheduledRequest, StepPlan, TokenLogprobs
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.engine.client.async_engine import AsyncEngine
from headway.engine.process.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    batch_events,
)
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.supervisor import Supervisor
from headway.executors.fake import HIDDEN_SIZE, FakeExecutor
from headway.observe import Metrics, make_observers
from headway.server import (
    AccessControl,
    AdmissionController,
    ServedModel,
    create_context,
    make_apps,
)
from headway.server.batches.store import BatchStore
from headway.text import ChatTemplate, Tokenizer

CAPACITY = Capacity(num_blocks=64, block_size=4, max_model_len=200)
TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools {% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% endfor %}{% endfor %}"
)
"""A chat template with tools in the Hermes form, in few tokens."""


class ScriptExecutor(FakeExecutor):
    """Says the script, then end of sequence; None in the script is a failure, like a Failure."""

    def __init__(self, script: Sequence[int | Failure | None], eos_token_id: int) -> None:
        super().__init__(CAPACITY)
        self._script = script
        self._eos_token_id = eos_token_id

    def _sample(self, item: ScheduledRequest) -> Any:
        if super()._sample(item) is None:
            return None
        request = self._requests[item.request_id]
        place = item.start + len(item.token_ids) - request.num_prompt_tokens
        token_id = self._script[place] if place < len(self._script) else self._eos_token_id
        if token_id is None:
            return Failure("secret detail of the failure")
        if isinstance(token_id, Failure):
            return token_id
        if request.params.logprobs is None:
            return Sample((token_id,))
        scores = TokenLogprobs(-0.25, 2, (65, 66, 67), (-0.125, -0.5, float("-inf")))
        num_top = request.params.logprobs
        scores = TokenLogprobs(-0.25, 2, scores.top_ids[:num_top], scores.top_logprobs[:num_top])
        return Sample((token_id,), (scores,))


class LocalProcess:
    pid = 0

    def __init__(self, executor: FakeExecutor, policy: str, **settings: Any) -> None:
        config = SchedulerConfig(
            max_num_seqs=8, prefill_floor=1, kv_watermark=0.0, scheduling_policy=policy, **settings
        )
        self._events: list[Event] = []
        self.scheduler = Scheduler(config, CAPACITY)
        self.core = EngineCore(self.scheduler, executor, SystemClock(), self._events.extend)
        self.info = EngineInfo(CAPACITY, 8, 275, scheduling_policy=policy, hidden_size=HIDDEN_SIZE)
        self.plans: list[StepPlan] = []
        self.added: list[AddRequest] = []
        self.dies_after: int | None = None
        self.is_paused = False
        self._is_announced = False
        self._wake = asyncio.Event()

    async def send(self, command: object) -> None:
        if isinstance(command, AddRequest):
            self.added.append(command)
            self.core.add(
                Request(
                    id=command.id,
                    token_ids=list(command.token_ids),
                    params=command.params,
                    seed=command.seed,
                    arrived_at=command.arrived_at,
                    priority=command.priority,
                    terms=command.terms,
                    index=command.index,
                    num_prompt_tokens=command.num_prompt_tokens,
                    num_scored=command.num_scored,
                ),
                command.is_resent,
                command.waited_s,
            )
        elif isinstance(command, AbortRequests):
            for request_id in command.ids:
                self.core.abort(request_id, command.reason)
        self._wake.set()

    async def receive(self, timeout_s: float) -> object:
        for _ in range(8):  # let consumers take what the step before made
            await asyncio.sleep(0)
        if not self._is_announced:
            self._is_announced = True
            return EngineReady(self.info)
        while not self._events and (self.is_paused or not self.core.has_work):
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        if self.dies_after is not None:
            if self.dies_after == 0:
                return EngineFailed("RuntimeError: secret detail of the failure")
            self.dies_after -= 1
        if not self.is_paused:
            self.core.step()
        invariants.check(self.core.scheduler)
        batch = batch_events(self._events)
        self._events.clear()
        return batch

    def kill(self) -> None:
        pass

    async def wait(self) -> None:
        pass

    def cpu_s(self) -> float:
        return 0.0

    def unfinished_step(self) -> frozenset[str]:
        return frozenset()

    async def stop(self) -> None:
        pass


async def make_local(
    tokenizer: Tokenizer,
    script: Sequence[int | Failure | None] | str = "abc",
    policy: str = "fcfs",
    is_started: bool = True,
    clock: Clock | None = None,
    batches: BatchStore | None = None,
    **config: Any,
) -> SimpleNamespace:
    """An app over a scripted engine, with its parts. The clock is that of the gate and quotas."""
    token_ids = tokenizer.encode(script, False) if isinstance(script, str) else script
    process = LocalProcess(ScriptExecutor(token_ids, tokenizer.eos_token_ids[0]), policy)
    limits = RestartLimits(max_restarts=0)
    link = Supervisor(lambda _before: process, SystemClock(), limits)  # pyright: ignore
    engine = AsyncEngine([link], tokenizer, SystemClock())
    metrics = Metrics("tiny")
    settings = ServerConfig(**config)
    admission = AdmissionController(settings, engine, clock or SystemClock())
    template = ChatTemplate(TEMPLATE, {})
    observers = make_observers(metrics, LedgerConfig(ledger_url="none"), SystemClock())
    access = AccessControl.of(settings, admission.clock)
    model = ServedModel(("tiny", "alias/tiny"), template)
    context = create_context(engine, admission, access, model, observers, batches)
    apps = make_apps(context, access)
    if is_started:
        await engine.start()
    return SimpleNamespace(
        app=apps.public,
        apps=apps,
        admin=apps.admin,
        directory=access.tenants.directory,
        watch=access.tenants.watch,
        engine=engine,
        process=process,
        link=link,
        metrics=metrics,
        ledger=observers.ledger,
        admission=admission,
    )
