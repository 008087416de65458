"""The grammars of live requests stay compiled, so that no step compiles one."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import zmq

from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import Sink
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.scheduler import Scheduler
from headway.engine.process.grammar_queue import GrammarQueue
from headway.engine.process.loop import EngineLoop, Progress
from headway.engine.process.messages import (
    AbortRequests,
    AddRequest,
    Command,
    EngineInfo,
    EventBatch,
    Shutdown,
    decode_report,
    encode,
)
from headway.executors.fake import FakeExecutor
from headway.executors.grammar import GrammarState
from headway.text import Tokenizer, matchers
from headway.text.grammar import regex_grammar
from headway.text.matchers import Matchers

VOCAB_SIZE = 275
FIRST, SECOND, THIRD = (regex_grammar(f"{letter}+") for letter in "abc")
CAPACITY = Capacity(num_blocks=16, block_size=4, max_model_len=64)


@pytest.fixture
def num_compiled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each grammar was compiled."""
    compiled: Counter[str] = Counter()
    compile_grammar = matchers._compile  # pyright: ignore[reportPrivateUsage]

    def count(grammar: str, tokens: object) -> object:
        compiled[grammar] += 1
        return compile_grammar(grammar, tokens)  # pyright: ignore

    monkeypatch.setattr(matchers, "_compile", count)
    monkeypatch.setattr(matchers, "MAX_UNUSED", 1)
    return compiled


def add(name: str, grammar: str, prompt: int = 2, n: int = 1) -> AddRequest:
    params = SamplingParams(grammar=grammar, n=n, max_tokens=3)
    return AddRequest(name, [1] * prompt, params, 0, 0.0)


def update_mask(grammar: str, compiled: Matchers) -> None:
    """What a step does first for a request that was admitted."""
    state = GrammarState(grammar, VOCAB_SIZE, compiled)
    state.update_mask()
    assert not state.error


def test_no_step_compiles_the_grammar_of_a_request_that_waited(
    tokenizer: Tokenizer, num_compiled: Counter[str]
) -> None:
    compiled = Matchers(lambda: tokenizer, VOCAB_SIZE)
    queue = GrammarQueue(compiled)
    for name, grammar in (("a", FIRST), ("b", SECOND), ("c", THIRD)):
        assert queue.add(add(name, grammar))
        assert select.select([queue], [], [], 30)[0]
        assert len(queue.take()) == 1
    update_mask(FIRST, compiled)
    queue.release_ended({"a", "b"})
    update_mask(FIRST, compiled)  # again, after a preemption
    update_mask(SECOND, compiled)
    assert num_compiled == {FIRST: 1, SECOND: 1, THIRD: 1}
    queue.release_ended(frozenset())
    kept = [one for one in (FIRST, SECOND, THIRD) if compiled.is_compiled(one)]
    assert len(kept) == 1, "grammars that nobody uses are bounded"


def test_a_grammar_used_by_several_requests_is_kept_for_the_last(
    tokenizer: Tokenizer, num_compiled: Counter[str]
) -> None:
    compiled = Matchers(lambda: tokenizer, VOCAB_SIZE)
    for _ in range(2):
        compiled.keep(FIRST)
    compiled.check(FIRST)
    compiled.release(FIRST)
    for grammar in (SECOND, THIRD):
        compiled.check(grammar)
    assert compiled.is_compiled(FIRST) and not compiled.is_compiled(SECOND)
    compiled.release(FIRST)
    assert compiled.is_compiled(FIRST) and not compiled.is_compiled(THIRD)
    assert num_compiled == {FIRST: 1, SECOND: 1, THIRD: 1}


class CountingCompiler:
    """Compiles nothing; counts the requests that use each grammar."""

    def __init__(self) -> None:
        self.num_users: Counter[str] = Counter()
        self.num_kept: Counter[str] = Counter()
        self.compiled: set[str] = set()

    def prepare(self) -> None:
        pass

    def is_compiled(self, grammar: str) -> bool:
        return grammar in self.compiled

    def matcher(self, grammar: str) -> object:
        self.compiled.add(grammar)
        return None

    def keep(self, grammar: str) -> None:
        self.num_users[grammar] += 1
        self.num_kept[grammar] += 1

    def release(self, grammar: str) -> None:
        self.num_users[grammar] -= 1


class LoopThread:
    """An EngineLoop with the fake executor in a thread, and its two sockets."""

    def __init__(self, address: str, compiler: CountingCompiler) -> None:
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = self._context.socket(zmq.PULL)
        self._commands.bind(f"{address}.commands")
        self._reports.bind(f"{address}.reports")
        loop = EngineLoop(address)
        loop.use_grammars(GrammarQueue(compiler))
        self._thread = threading.Thread(target=loop.run, args=(self._make_core,))
        self._thread.start()

    def _make_core(self, sink: Sink, _progress: Progress) -> tuple[EngineCore, EngineInfo]:
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, kv_watermark=0.0), CAPACITY)
        core = EngineCore(scheduler, FakeExecutor(CAPACITY), SystemClock(), sink)
        return core, EngineInfo(CAPACITY, 4, VOCAB_SIZE)

    def send(self, command: Command) -> None:
        self._commands.send(encode(command))

    def wait_end(self, *names: str) -> None:
        """Wait until these requests have finished or were refused."""
        missing = set(names)
        while missing:
            assert self._reports.poll(10_000), f"no end of {missing}"
            report = decode_report(self._reports.recv())
            if isinstance(report, EventBatch):
                missing -= {one.request_id for one in (*report.finished, *report.refused)}

    def stop(self) -> None:
        self.send(Shutdown())
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._context.destroy(linger=0)


def test_the_engine_lets_a_grammar_go_when_its_request_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    compiler = CountingCompiler()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w"):
        monkeypatch.setattr(sys, "stdin", stdin)
        loop = LoopThread(f"ipc://{tmp_path}/e", compiler)
        try:
            loop.send(add("two", "one", n=2))
            loop.send(add("too-long", "one", prompt=100))
            loop.send(add("aborted", "other"))
            loop.send(AbortRequests(["aborted"], FinishReason.ABORT))
            loop.wait_end("two", "two#1", "too-long", "aborted")
        finally:
            loop.stop()
    assert compiler.num_kept == {"one": 2, "other": 1}
    assert compiler.num_users == {"one": 0, "other": 0}
