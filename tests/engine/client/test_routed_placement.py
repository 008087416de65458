"""Two engines behind a router: which one has a request, and that none waits for ever."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest

from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.clock import SystemClock
from headway.config import ROUTINGS, SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import Event, Routed
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.terms import Targets, Terms
from headway.engine.client.async_engine import AsyncEngine, FailoverRules
from headway.engine.client.eligible import EligibleEngines
from headway.engine.client.replica import EngineReplica
from headway.engine.client.routed_placement import RoutedPlacement
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import (
    AbortRequests,
    AddRequest,
    EngineInfo,
    QuarantinedDigest,
    batch_events,
)
from headway.engine.supervise.loss import EngineLoss
from headway.engine.supervise.supervisor import EngineOwner
from headway.executors.fake import FakeExecutor
from headway.routing import RULES
from headway.text import Tokenizer

CAPACITY = Capacity(num_blocks=256, block_size=16, max_model_len=2048)
MAX_NUM_SEQS = 4


class StepLink:
    """A link to an engine core that steps when the test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.info: EngineInfo | None = EngineInfo(CAPACITY, MAX_NUM_SEQS, 1000, numerics="one")
        self.is_up = self.is_hung = self.is_connected = False
        self.restart_listeners = []
        self.owner: EngineOwner | None = None
        self.got: list[str] = []
        self.room = True
        self._start()

    def _start(self) -> None:
        self._events: list[Event] = []
        config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=256)
        executor = FakeExecutor(CAPACITY)
        self.core = EngineCore(
            Scheduler(config, CAPACITY), executor, SystemClock(), self._events.extend
        )

    def has_room(self, num_tokens: int) -> bool:
        return self.room

    def adopt(self, _request_id: str, _tenant: str) -> Awaitable[bool]:
        return asyncio.sleep(0, result=False)

    def share_quarantine(self, _entries: Sequence[QuarantinedDigest]) -> Awaitable[bool]:
        return asyncio.sleep(0, result=False)

    async def load(self, progress: object = None) -> None:
        self.is_up = self.is_connected = True

    async def run(self, owner: EngineOwner) -> None:
        self.owner = owner
        await owner.on_engine_up()
        await asyncio.Event().wait()

    async def send(self, command: object) -> None:
        if isinstance(command, AddRequest):
            self.got.append(command.id)
            request = Request(
                id=command.id,
                token_ids=list(command.token_ids),
                params=command.params,
                seed=command.seed,
                arrived_at=command.arrived_at,
                terms=command.terms,
                index=command.index,
                num_prompt_tokens=command.num_prompt_tokens,
            )
            self.core.add(request, command.is_resent, command.waited_s)
        elif isinstance(command, AbortRequests):
            for request_id in command.ids:
                self.core.abort(request_id, command.reason)

    async def step(self) -> bool:
        """Run a step and report it; return whether there was one."""
        has_stepped = self.core.step()
        if self._events and self.owner is not None:
            report = batch_events(self._events)
            self._events.clear()
            await self.owner.on_report(report)
        return has_stepped

    async def die(self) -> None:
        self.is_up = self.is_connected = False
        self._start()
        assert self.owner is not None
        await self.owner.on_engine_down(EngineLoss())

    def kill(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("routed") / "tokenizer.gguf"
    return Tokenizer.from_gguf(write_byte_level(path, pre="gpt-2"))


class Rig:
    """An AsyncEngine over two engines, with the events that its listeners get."""

    def __init__(self, tokenizer: Tokenizer, rule: str) -> None:
        self.links = [StepLink("a"), StepLink("b")]
        self.engine = AsyncEngine(
            self.links,
            tokenizer,
            SystemClock(),
            make_placement=partial(RoutedPlacement, rule=rule),
            failover=FailoverRules(max_wait_s=0.0),
        )
        self.routed: list[Routed] = []
        self.num_waiting: list[int] = []
        self.engine.subscribe(lambda batch: self.routed.extend(batch.routed))
        self.engine.subscribe(
            lambda batch: self.num_waiting.extend(one.num_waiting for one in batch.stepped)
        )
        self._number = 0

    async def submit(self, tokens: list[int], max_tokens: int = 4, tenant: str = ""):
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        terms = Terms(tenant=tenant, cache_group=tenant)
        return await self.engine.submit(f"r{self._number}", tokens, params, terms=terms)

    async def step(self) -> bool:
        return any([await link.step() for link in self.links])

    async def finish(self, *streams: RequestStream) -> list[list[int]]:
        """Step until these requests have ended; return their output."""
        for _ in range(400):
            if not any(one.unfinished_ids for one in streams):
                break
            await self.step()
        outputs = [one.samples[one.request_id].token_ids for one in streams]
        for stream in streams:
            assert not stream.unfinished_ids, "a request waits for ever"
            await self.engine.abort(stream)
        return outputs

    def link_of(self, stream: RequestStream) -> str:
        return next(link.name for link in self.links if stream.request_id in link.got)


@asynccontextmanager
async def rig(tokenizer: Tokenizer, rule: str = "ttft") -> AsyncIterator[Rig]:
    made = Rig(tokenizer, rule)
    await made.engine.start()
    while any(link.owner is None for link in made.links):
        await asyncio.sleep(0)
    try:
        yield made
    finally:
        await made.engine.close()


def prompt(*parts: int) -> list[int]:
    return [part for part in parts for _ in range(16)]


class AnyEngine:
    """Lets every engine have every request."""

    def may_wait_for(self, stream: RequestStream, replica: object) -> bool:
        return True

    def may_send(self, stream: RequestStream, replica: object) -> bool:
        return True


def test_what_was_to_be_sent_to_a_lost_engine_is_sent_to_another(tokenizer):
    placement = RoutedPlacement(AnyEngine(), "ttft")  # pyright: ignore
    params = SamplingParams(max_tokens=4)
    commands = [AddRequest(f"r{n}", prompt(n, n), params, 0, 0.0) for n in range(6)]
    streams = [RequestStream(command, tokenizer) for command in commands]
    first, second = (
        EngineReplica(StepLink(name), None, 10.0)  # pyright: ignore
        for name in "ab"
    )
    placement.engine_changed(first, True, 0.0)
    for stream in streams:
        placement.add(stream, 0.0)
    placed = placement.next_send(0.0)
    assert placed is not None and placed.replica is first
    assert len(placement) == 5
    # The others are about to be sent to the first engine too.
    placement.engine_changed(first, False, 0.1)
    placement.engine_changed(second, True, 0.1)
    for stream in streams:
        if stream not in placement:
            placement.add(stream, 0.1)
    sent = []
    while (placed := placement.next_send(0.2)) is not None:
        assert placed.replica is second
        sent.append(placed.stream.request_id)
    assert len(sent) == len(set(sent)) >= MAX_NUM_SEQS
    for stream in streams:
        placement.remove(stream)
    assert len(placement) == 0 and not placement._streams and not placement._router._requests


def test_every_setting_is_a_rule():
    assert set(ROUTINGS) <= set(RULES)


def test_a_server_with_one_engine_does_not_load_the_router():
    code = "import sys, headway.build_server, headway.engine.client.async_engine; "
    code += "sys.exit('headway.routing' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_conversation_stays_with_its_engine(tokenizer):
    async with rig(tokenizer) as made:
        contexts = {number: prompt(number, number + 50, number + 60) for number in range(4)}
        homes: dict[int, set[str]] = {number: set() for number in contexts}
        for turn in range(3):
            streams = [await made.submit(context) for context in contexts.values()]
            outputs = await made.finish(*streams)
            for number, stream, output in zip(contexts, streams, outputs, strict=True):
                homes[number].add(made.link_of(stream))
                assert (stream.num_cached_tokens or 0) >= 48 * bool(turn)
                contexts[number] = [*contexts[number], *output, *prompt(number + 70 + turn)]
        assert [len(engines) for engines in homes.values()] == [1] * 4
        assert set.union(*homes.values()) == {"a", "b"}
        assert {one.reason for one in made.routed[4:]} == {"prefix"}


async def test_what_is_held_back_waits_in_sight_and_is_sent_later(tokenizer):
    async with rig(tokenizer) as made:
        streams = [await made.submit(prompt(*range(n, n + 16))) for n in range(0, 400, 20)]
        num_sent = sum(len(link.got) for link in made.links)
        assert num_sent < len(streams) == len(made.engine.waiting)
        await made.step()
        assert made.num_waiting[-1] >= len(streams) - sum(len(link.got) for link in made.links)
        await made.finish(*streams)
        assert sorted(one.request_id for one in made.routed) == sorted(
            one.request_id for one in streams
        )
        assert max(one.waited_s for one in made.routed) > 0.0
        assert len(made.engine.waiting) == 0


async def test_an_aborted_request_is_never_sent(tokenizer):
    async with rig(tokenizer) as made:
        streams = [await made.submit(prompt(*range(n, n + 16))) for n in range(0, 200, 20)]
        held = [one for one in streams if not one.is_sent]
        await made.engine.abort(held[0])
        held_id = held[0].request_id
        await made.finish(*[one for one in streams if one is not held[0]])
        assert all(held_id not in link.got for link in made.links)


async def test_requests_of_a_lost_engine_continue_in_the_other(tokenizer):
    async with rig(tokenizer) as made:
        streams = [await made.submit(prompt(*range(n, n + 16)), 20) for n in range(0, 200, 20)]
        for _ in range(6):
            await made.step()
        reference = await _undisturbed(tokenizer)
        await made.links[0].die()
        assert await made.finish(*streams) == reference
        assert "failover" in {one.reason for one in made.routed}


async def _undisturbed(tokenizer: Tokenizer) -> list[list[int]]:
    async with rig(tokenizer) as made:
        streams = [await made.submit(prompt(*range(n, n + 16)), 20) for n in range(0, 200, 20)]
        return await made.finish(*streams)


async def test_requests_wait_while_all_engines_are_lost(tokenizer):
    async with rig(tokenizer) as made:
        streams = [await made.submit(prompt(n)) for n in range(3)]
        for link in made.links:
            await link.die()
        waiting = await made.submit(prompt(9))
        await made.links[1].load()
        owner = made.links[1].owner
        assert owner is not None
        await owner.on_engine_up()
        await made.finish(*streams, waiting)


async def test_an_engine_without_room_is_passed_over_until_it_has_some(tokenizer):
    async with rig(tokenizer) as made:
        for link in made.links:
            link.room = False
        stream = await made.submit(prompt(1))
        assert not stream.is_sent
        for link in made.links:
            link.room = True
        await made.engine.fail_overdue()  # called at intervals by the server
        await made.finish(stream)


async def test_a_retired_engine_gets_nothing_more(tokenizer):
    async with rig(tokenizer) as made:
        streams = [await made.submit(prompt(*range(n, n + 16))) for n in range(0, 200, 20)]
        made.engine.retire_engine("a")
        num_sent = len(made.links[0].got)
        streams += [await made.submit(prompt(n)) for n in range(5)]
        await made.finish(*streams)
        assert len(made.links[0].got) == num_sent
        await made.engine.leave_retired()
        assert [one.link.name for one in made.engine.engines] == ["b"]


async def test_a_request_does_not_wait_for_a_retired_engine_alone(tokenizer, monkeypatch):
    """Not even if the forecast of the other engine ruled its targets out."""
    async with rig(tokenizer) as made:
        first, other = made.links
        monkeypatch.setattr(EligibleEngines, "_feasible", lambda _, __, engines: list(engines)[:1])
        first.room = False
        terms, params = Terms(targets=Targets(deadline_s=1e6)), SamplingParams(max_tokens=4)
        stream = await made.engine.submit("hurried", prompt(1), params, terms=terms)
        assert not stream.is_sent, "it waits for the first engine"
        made.engine.retire_engine("a")
        await made.engine.fail_overdue()  # called at intervals by the server
        assert stream.is_sent and other.got
        late = await made.engine.submit("late", prompt(2), params, terms=terms)
        assert late.is_sent, "the retired engine is not asked"
        await made.finish(stream, late)


async def test_a_flood_of_one_tenant_does_not_hold_up_another(tokenizer):
    async with rig(tokenizer) as made:
        flood = [
            await made.submit(prompt(*range(n, n + 16)), tenant="f") for n in range(0, 600, 20)
        ]
        calm = await made.submit(prompt(*range(700, 716)), tenant="c")
        await made.finish(calm)
        num_ended = sum(not one.unfinished_ids for one in flood)
        assert num_ended <= 2 * 2 * MAX_NUM_SEQS
        await made.finish(*flood)


@pytest.mark.parametrize("rule", ROUTINGS)
async def test_every_rule_serves_every_request(tokenizer, rule):
    async with rig(tokenizer, rule) as made:
        streams = [await made.submit(prompt(n % 3, n)) for n in range(24)]
        await made.finish(*streams)
        assert {made.link_of(one) for one in streams} == {"a", "b"}
