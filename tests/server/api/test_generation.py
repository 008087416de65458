"""A consumer that falls behind gets everything, joined."""

from __future__ import annotations

import asyncio

import pytest

from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.engine.client.outputs import SampleDelta
from headway.errors import EngineDeadError
from headway.server.api.generate.generation import Generation, GenerationSpec, coalesce

SCORES = TokenLogprobs(-1.0, 1)


def test_deltas_of_one_sample_are_joined_in_order() -> None:
    batch = [
        SampleDelta(0, "a", (1,), (SCORES,)),
        SampleDelta(1, "x", (9,), (SCORES,)),
        SampleDelta(0, "", (2,), (SCORES,)),
        SampleDelta(0, "b", finish_reason=FinishReason.STOP, stop="c"),
    ]
    assert coalesce(batch) == [
        SampleDelta(0, "ab", (1, 2), (SCORES, SCORES), FinishReason.STOP, "c"),
        SampleDelta(1, "x", (9,), (SCORES,)),
    ]
    assert coalesce([SampleDelta(0, "a", (1,)), SampleDelta(0, "b", (2,))]) == [
        SampleDelta(0, "ab", (1, 2))
    ]


async def start(made, prompts: list[list[int]]) -> Generation:
    spec = GenerationSpec("id", prompts, SamplingParams(max_tokens=20, n=2))
    generation = Generation(made.engine, spec)
    await generation.start()
    return generation


@pytest.mark.parametrize("prompts", [[[97]], [[97], [98]]])
async def test_a_request_that_ended_before_anyone_looked(local, prompts) -> None:
    made = await local("abcdef")
    generation = await start(made, prompts)
    while made.process.core.has_work:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    batches = [batch async for batch in generation.deltas()]
    assert [len(batch) for batch in batches] == [2] * len(prompts)
    seen = {delta.index: delta for batch in batches for delta in batch}
    assert {index: delta.text for index, delta in seen.items()} == {
        index: "abcdef" for index in range(2 * len(prompts))
    }
    assert {delta.finish_reason for delta in seen.values()} == {FinishReason.STOP}
    assert made.engine.num_requests == 0


async def test_what_arrived_before_the_engine_died_is_still_given(local) -> None:
    made = await local("abcdef")
    made.process.dies_after = 3
    generation = await start(made, [[97]])
    while not made.engine.has_given_up:
        await asyncio.sleep(0.01)
    batches = []
    with pytest.raises(EngineDeadError):
        async for batch in generation.deltas():
            batches += [batch]
    assert [delta.text for batch in batches for delta in batch if delta.index == 0] == ["abc"]
    await generation.close()
    assert made.engine.num_requests == 0


async def test_a_listener_that_fails_ends_no_request(local, caplog) -> None:
    made = await local("abc")

    def explode(_batch: object) -> None:
        raise RuntimeError("a bug in a metric")

    made.engine.subscribe(explode)
    response = await made.client.post("/v1/completions", json={"prompt": "x"})
    assert response.json()["choices"][0]["text"] == "abc"
    assert "an event listener failed" in caplog.text
