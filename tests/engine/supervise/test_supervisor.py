"""What goes wrong in the API process costs an engine, or one request, and never all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import headway.engine.supervise.supervisor as supervisor_module
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.clock import SystemClock
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.engine.client.async_engine import AsyncEngine
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import EngineInfo, EngineReady, EventBatch
from headway.engine.supervise.loss import EngineLoss
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.supervisor import Supervisor
from headway.errors import EngineDeadError, EngineError, HeadwayError
from headway.text import Tokenizer
from tests.support.local_engine import LocalProcess, ScriptExecutor

SCRIPT = "the quick brown fox jumps over it"


class Process:
    """Ready at once, then empty reports."""

    is_alive = True

    def __init__(self) -> None:
        self._is_ready = False
        self.calls: list[str] = []

    def activate(self) -> None:
        self.calls.append("activate")

    async def receive(self, _timeout_s: float) -> object:
        await asyncio.sleep(0)
        if not self.is_alive:
            raise EngineDeadError("the engine process ended")
        if self._is_ready:
            return EventBatch()
        self._is_ready = True
        return EngineReady(EngineInfo(Capacity(1, 16, 16), 1, 10))

    def kill(self) -> None:
        self.calls.append("kill")

    async def wait(self) -> None: ...

    async def stop(self) -> None:
        self.calls.append("stop")

    def unfinished_step(self) -> frozenset[str]:
        return frozenset({"somebody"})


class EngineOwner:
    """Fails over every report."""

    def __init__(self) -> None:
        self.downs: list[EngineLoss] = []
        self.error: EngineError | None = None

    def has_work_in_engine(self) -> bool:
        return False

    async def on_engine_up(self) -> None: ...

    async def on_report(self, report: EventBatch) -> None:
        raise KeyError("a fault")

    async def on_engine_down(self, loss: EngineLoss) -> int:
        self.downs.append(loss)
        return 0

    def on_give_up(self, error: EngineError) -> None:
        self.error = error


async def test_an_exception_over_a_report_is_a_failure_within_the_restart_budget() -> None:
    processes: list[Process] = []

    def launch(_before: EngineInfo | None) -> Any:
        processes.append(Process())
        return processes[-1]

    def fail(_kind: str, _num_requests: int) -> None:
        raise ValueError("a fault in a listener")

    supervisor, owner = (
        Supervisor(launch, SystemClock(), RestartLimits(max_restarts=3)),
        EngineOwner(),
    )
    supervisor.restart_listeners.append(fail)
    await supervisor.load()
    await asyncio.wait_for(supervisor.run(owner), 10)
    assert len(processes) == 4
    # Nothing was wrong with the step that the engine was computing.
    assert owner.downs == [EngineLoss()] * 4
    assert "more than 3 times" in str(owner.error)


async def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    num_launches = 0

    def launch(_before: EngineInfo | None) -> Any:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 2:
            raise PermissionError("a fault in the launch")
        return Process()

    supervisor, owner = (
        Supervisor(launch, SystemClock(), RestartLimits(max_restarts=2)),
        EngineOwner(),
    )
    await supervisor.load()
    await asyncio.wait_for(supervisor.run(owner), 10)
    assert num_launches == 3


async def test_a_standby_takes_over_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STANDBY_DELAY_S", 0.0)
    launched: list[Process] = []
    standbys: list[Process] = []

    def launch(_before: EngineInfo | None) -> Any:
        launched.append(Process())
        return launched[-1]

    def launch_standby(before: EngineInfo | None) -> Any:
        assert before is not None, "a standby has the resolved settings of the engine"
        standbys.append(Process())
        standbys[-1].is_alive = len(standbys) != 2  # the second is killed while it waits
        if len(standbys) == 4:
            raise EngineError("no memory for another process")
        return standbys[-1]

    limits = RestartLimits(max_restarts=5)
    supervisor, owner = Supervisor(launch, SystemClock(), limits, launch_standby), EngineOwner()
    await supervisor.load()
    await asyncio.wait_for(supervisor.run(owner), 10)
    # Six engines failed over a report; those that were launched replaced a standby that was dead
    # or could not be started.
    assert len(launched) == 3
    assert [process.calls[:1] for process in standbys] == [
        ["activate"],
        ["stop"],
        ["activate"],
        [],
        ["activate"],
        [],
    ]
    await supervisor.stop()
    assert standbys[-1].calls == ["kill", "stop"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(write_byte_level(tmp_path / "tokenizer.gguf", pre="gpt-2"))


@pytest.fixture
async def engine(tokenizer: Tokenizer):
    def launch(_before: EngineInfo | None) -> Any:
        executor = ScriptExecutor(tokenizer.encode(SCRIPT, False), tokenizer.eos_token_ids[0])
        return LocalProcess(executor, "fcfs")

    link = Supervisor(launch, SystemClock(), RestartLimits(max_restarts=2))
    engine = AsyncEngine([link], tokenizer, SystemClock())
    await engine.start()
    yield engine
    await engine.close()


async def begin(engine: AsyncEngine, name: str, **params: Any) -> RequestStream:
    return await engine.submit(name, [65, 66, 67], SamplingParams(max_tokens=100, **params))


async def read(engine: AsyncEngine, stream: RequestStream) -> str:
    text = ""
    async for deltas in engine.deltas(stream):
        text += "".join(delta.text for delta in deltas if delta.index == 0)
    return text


def fail_once(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, after: int) -> None:
    """Have a method raise once, at a certain call."""
    method, num_calls = getattr(target, name), 0

    def faulty(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == after:
            raise KeyError("a fault")
        return method(*args)

    monkeypatch.setattr(target, name, faulty)


@pytest.mark.parametrize("method", ["count_tokens", "finish_sample"])
async def test_a_request_whose_event_raises_fails_alone(engine, monkeypatch, method: str) -> None:
    streams = [await begin(engine, name) for name in ("a", "b", "c")]
    fail_once(monkeypatch, streams[1], method, 1)
    answers = await asyncio.gather(*(read(engine, it) for it in streams), return_exceptions=True)
    assert answers[0] == answers[2] == SCRIPT
    assert isinstance(answers[1], HeadwayError)
    assert engine.is_ready and not engine.num_requests
    assert await read(engine, await begin(engine, "d")) == SCRIPT


@pytest.mark.parametrize("after", [2, 5, 20])
@pytest.mark.parametrize("place", ["listeners", "report"])
async def test_after_an_exception_in_a_report_streams_go_on_in_the_next_engine(
    engine, monkeypatch, place: str, after: int
) -> None:
    restarts: list[str] = []
    engine.subscribe_restarts(lambda kind, _num_requests: restarts.append(kind))
    streams = [await begin(engine, name, n=n) for name, n in (("a", 1), ("b", 3), ("c", 1))]
    if place == "listeners":  # when every event of the report has been handled
        fail_once(monkeypatch, engine._listeners, "notify", after)
    else:  # before any
        fail_once(monkeypatch, engine, "on_report", after)
    answers = await asyncio.gather(*(read(engine, stream) for stream in streams))
    assert answers == [SCRIPT] * 3
    assert restarts == ["failed"]
    assert [stream.num_output_tokens for stream in streams] == [34, 102, 34]


async def test_a_fault_in_the_forecast_ends_no_request(engine, monkeypatch) -> None:
    fail_once(monkeypatch, engine.engines[0].forecast_reader, "observe", 1)
    streams = [await begin(engine, name) for name in ("a", "b")]
    answers = await asyncio.gather(*(read(engine, it) for it in streams))
    assert answers == [SCRIPT] * 2
    assert engine.is_ready


async def test_a_request_that_cannot_be_sent_fails_alone(engine, monkeypatch) -> None:
    streams = [await begin(engine, name) for name in ("a", "b", "c")]
    fail_once(monkeypatch, streams[1], "commands", 1)
    fail_once(monkeypatch, engine, "on_report", 3)
    answers = await asyncio.gather(*(read(engine, it) for it in streams), return_exceptions=True)
    assert answers[0] == answers[2] == SCRIPT
    assert isinstance(answers[1], HeadwayError)
