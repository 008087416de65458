"""Blocks that leave for the offload store and come back continue as if they had stayed."""

from __future__ import annotations

import pytest
import torch

from headway.clock import SystemClock
from headway.core.params import SamplingParams
from headway.core.plan import (
    BlockCopy,
    BlockLoad,
    BlockSave,
    NewRequest,
    Sample,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from headway.executors.load import ModelExecutor
from headway.executors.step_model import Span
from headway.executors.torch.eager import EagerModel, load_decoder
from headway.executors.torch.kv_store import KVStore
from headway.executors.torch.offload_store import TensorOffloadStore
from tests.executors.cpu.test_compiled import (
    FORMS,
    TABLE,
    TOKENS,
    WIDE,
    Subject,
    case_of,
    in_chunks,
    logits_of,
    poison,
)
from tests.support.tiny import MemoryCheckpoint, tiny_spec, tiny_weights

BLOCK = 4
PROMPT = (3, 14, 15, 9, 26, 5)
NEW = NewRequest(SamplingParams(temperature=0, max_tokens=50), 0, 0, PROMPT, len(PROMPT))


def test_a_slot_holds_a_block_of_all_layers_and_nothing_else_changes():
    store = KVStore(tiny_spec(), 8, 4, torch.float32, torch.device("cpu"))
    store._data.copy_(torch.randn(store._data.shape))
    before = store._data.clone()
    offloaded = TensorOffloadStore(store.by_block(), 3)
    offloaded.save([5, 2], [0, 2])
    assert torch.equal(store._data, before)
    store.clear([5, 2])
    offloaded.load([2, 0], [7, 5])
    expected = before.clone()
    expected[:, :, 2] = 0
    expected[:, :, 7] = before[:, :, 2]
    assert torch.equal(store._data, expected)


@pytest.fixture(params=FORMS, scope="module", name="subject")
def make_subject(request) -> Subject:
    return Subject(case_of(WIDE), *request.param)


@pytest.mark.parametrize("num_tokens", [48, 50, 63])
def test_compiled_blocks_come_back_bit_for_bit(subject, num_tokens):
    model = subject.load(num_slots=8)
    logits_of(model, Span(TOKENS[:num_tokens], 0, TABLE))
    used = TABLE[: -(-num_tokens // 16)]
    slots = [6, 1, 3, 0][: len(used)]
    model.save(used, slots)
    poison(model, TABLE)
    others = [7, 11, 5, 9, 3]
    model.load(slots, others[: len(used)])
    assert torch.equal(in_chunks(model, [20], others, num_tokens), subject.expected[num_tokens:])


@pytest.fixture(name="executor")
def make_executor() -> ModelExecutor:
    spec = tiny_spec()
    decoder = load_decoder(MemoryCheckpoint(spec, tiny_weights(spec)), "fp32")
    model = EagerModel(decoder, 40, BLOCK, num_slots=4)
    model._store._data.fill_(torch.nan)
    return ModelExecutor(model, 64, SystemClock())


def step(executor: ModelExecutor, *scheduled: ScheduledRequest, **fields) -> StepResult:
    return executor.collect(executor.submit(StepPlan(1, tuple(scheduled), **fields)))


def token_of(result: StepResult) -> int:
    (outcome,) = result.outcomes
    assert isinstance(outcome, Sample), outcome
    return outcome.token_ids[0]


def second_token(executor: ModelExecutor) -> tuple[int, int]:
    """The first two tokens of PROMPT, undisturbed."""
    one = token_of(step(executor, ScheduledRequest("a", 0, PROMPT, (0, 1), True, NEW)))
    two = token_of(step(executor, ScheduledRequest("a", 6, (one,), (), True)))
    return one, two


def test_capacity_tells_of_the_slots_and_how_fast_they_are(executor):
    capacity = executor.capacity()
    assert capacity.num_slots == 4
    assert 0.0 < capacity.block_copy_s < 1.0


def test_an_executor_without_slots_measures_nothing():
    spec = tiny_spec()
    decoder = load_decoder(MemoryCheckpoint(spec, tiny_weights(spec)), "fp32")
    capacity = ModelExecutor(EagerModel(decoder, 8, BLOCK), 64, SystemClock()).capacity()
    assert (capacity.num_slots, capacity.block_copy_s) == (0, 0.0)


def test_a_request_resumes_from_its_slots_while_another_has_its_blocks(executor):
    first, expected = second_token(executor)
    thief = ScheduledRequest("b", 0, (9,) * 8, (0, 1), True, NEW)
    saves = (BlockSave(0, 2), BlockSave(1, 0))
    result = step(executor, thief, saves=saves, released_ids=("a",))
    assert 0.0 < result.copy_s < result.elapsed_s
    resumed = NewRequest(NEW.params, 0, 0, (*PROMPT, first), len(PROMPT))
    back = ScheduledRequest("a", 6, (first,), (8, 7), True, resumed)
    loads = (BlockLoad(2, 8), BlockLoad(0, 7))
    assert token_of(step(executor, back, loads=loads)) == expected


def test_copies_come_before_saves_and_loads_after_them(executor):
    """All in one plan: a fork's copy is saved, its block is taken, and it is loaded back."""
    first, expected = second_token(executor)
    resumed = NewRequest(NEW.params, 0, 0, (*PROMPT, first), len(PROMPT))
    back = ScheduledRequest("c", 6, (first,), (0, 9), True, resumed)
    result = step(
        executor,
        back,
        copies=(BlockCopy(1, 5),),
        saves=(BlockSave(5, 3),),
        loads=(BlockLoad(3, 9),),
    )
    assert token_of(result) == expected
