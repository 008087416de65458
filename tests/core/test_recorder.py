"""Requests of an engine that ended continue in the next one on the KV blocks it recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headway.core.events import Admitted
from headway.core.executor import Capacity, HashedBlock
from headway.core.terms import Terms
from headway.executors.fake import FakeExecutor
from tests.support.harness import Harness, expected_output

BLOCK_SIZE = 4


class Memory:
    """Blocks of a fake executor that outlive it; contents take the place of checksums."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [[-1] * BLOCK_SIZE for _ in range(num_blocks)]
        self.records: dict[int, tuple[HashedBlock, list[int]]] = {}

    def record(self, blocks: Sequence[HashedBlock]) -> None:
        for block in blocks:
            self.records[block.block_id] = (block, self.read(block))

    def restore(self) -> list[HashedBlock]:
        return [block for block, _ in self.records.values()]

    def find_intact(self, blocks: Sequence[HashedBlock]) -> list[HashedBlock]:
        return [one for one in blocks if self.read(one) == self.records[one.block_id][1]]

    def read(self, block: HashedBlock) -> list[int]:
        return self.blocks[block.block_id][: block.num_tokens]


def engine_on(memory: Memory) -> Harness:
    executor = FakeExecutor(Capacity(len(memory.blocks), BLOCK_SIZE, 10_000))
    executor._blocks = memory.blocks
    return Harness(len(memory.blocks), BLOCK_SIZE, executor=executor, recorder=memory)


def resend(engine: Harness, before: Harness) -> None:
    """Add the live requests of an engine that ended to the next, with their output so far."""
    for request in before.scheduler.requests.values():
        engine.add(
            request.id,
            list(request.token_ids),
            max_tokens=request.params.max_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            terms=request.terms,
        )


def num_cached(engine: Harness) -> dict[str, int]:
    return {e.request_id: e.num_cached_tokens for e in engine.events if isinstance(e, Admitted)}


def test_only_the_last_token_of_each_request_is_computed_again():
    memory = Memory(64)
    engine = engine_on(memory)
    prompts = {name: engine.add(name, 13, max_tokens=20).token_ids[:13] for name in "abc"}
    for _ in range(9):
        engine.step()
    known = {name: len(request.token_ids) for name, request in engine.scheduler.requests.items()}
    assert any(number % BLOCK_SIZE != 1 for number in known.values())
    after = engine_on(memory)
    resend(after, engine)
    after.run()
    for name, prompt in prompts.items():
        assert after.output(name) == expected_output(prompt, 20)[-len(after.output(name)) :]
        assert known[name] - num_cached(after)[name] == 1


def test_a_tail_goes_to_one_request_and_is_published_when_it_is_full():
    memory = Memory(64)
    engine = engine_on(memory)
    engine.add("a", 6, max_tokens=20)
    engine.step()
    tokens = list(engine.scheduler.requests["a"].token_ids)
    after = engine_on(memory)
    for name in "bc":
        after.add(name, tokens, max_tokens=8, num_prompt_tokens=6)
    after.run()
    assert num_cached(after) == {"b": 6, "c": 4}
    assert after.output("b") == after.output("c") == expected_output(tokens[:6], 8)[1:]
    last = engine_on(memory)
    last.add("d", [*tokens[:6], *expected_output(tokens[:6], 7)])
    last.run()
    assert num_cached(last) == {"d": 12}


def test_a_block_is_compared_once_and_only_if_a_request_matches_it():
    memory = Memory(64)
    engine = engine_on(memory)
    engine.add("a", 6, max_tokens=20)
    engine.add("b", 6, max_tokens=20)
    engine.step()
    tokens = list(engine.scheduler.requests["a"].token_ids)
    compared: list[int] = []
    find_intact = memory.find_intact

    def count(blocks: Sequence[HashedBlock]) -> list[HashedBlock]:
        compared.extend(one.block_id for one in blocks)
        return find_intact(blocks)

    memory.find_intact = count
    after = engine_on(memory)
    assert compared == []
    request = after.add("a", tokens, max_tokens=20, num_prompt_tokens=6)
    for _ in range(3):
        assert after.scheduler.kv.match(request).num_tokens == 6
    assert len(compared) == 2
    after.run()
    assert num_cached(after) == {"a": 6}
    assert len(compared) == 2


def test_a_tail_of_which_more_tokens_were_computed_than_delivered_is_not_used():
    memory = Memory(64)
    engine = engine_on(memory)
    engine.add("a", 6, max_tokens=20)
    engine.step()
    tokens = list(engine.scheduler.requests["a"].token_ids)
    engine.step()
    after = engine_on(memory)
    after.add("a", tokens, max_tokens=20, num_prompt_tokens=6)
    after.run()
    assert num_cached(after) == {"a": 4}
    assert after.output("a") == expected_output(tokens[:6], 20)[1:]


def test_blocks_of_another_cache_group_are_not_shared():
    memory = Memory(64)
    engine = engine_on(memory)
    tokens = list(engine.add("a", 13, terms=Terms(cache_group="one")).token_ids)
    engine.run()
    after = engine_on(memory)
    after.add("b", tokens, terms=Terms(cache_group="two"))
    after.add("c", tokens, terms=Terms(cache_group="one"))
    after.run()
    assert (num_cached(after)["b"], num_cached(after)["c"]) == (0, 12)


@pytest.mark.parametrize("seed", range(40))
def test_engines_that_end_at_any_step_with_damaged_blocks_change_no_output(seed: int):
    draw = random.Random(seed)
    memory = Memory(draw.choice([12, 24, 64]))  # few blocks: evictions and preemptions
    engine = engine_on(memory)
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    for number in range(draw.randint(2, 6)):
        name = f"{number}"
        prompts[name] = list(engine.add(name, draw.randint(1, 15), max_tokens=16).token_ids)
        outputs[name] = []
    for _ in range(draw.randint(1, 6)):
        for _ in range(draw.randint(1, 12)):
            engine.step()
        before = engine
        for name in prompts:
            outputs[name] += before.output(name)
        for _ in range(draw.randint(0, 4)):  # a step that did not end, or any accident
            block = memory.blocks[draw.randrange(len(memory.blocks))]
            block[draw.randrange(BLOCK_SIZE)] = draw.randrange(1000)
        engine = engine_on(memory)
        resend(engine, before)
    engine.run()
    for name, prompt in prompts.items():
        outputs[name] += engine.output(name)
        assert outputs[name] == expected_output(prompt, 16)
