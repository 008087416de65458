"""What cannot be promised is refused in the API process at once, and by the engine if it must."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headway.core.deadlines import Lead, Shares
from headway.core.params import SamplingParams
from headway.core.steptime import StepCost, StepShape
from headway.core.terms import Targets, Terms
from headway.engine.messages import AddRequest
from headway.engine.streams import RequestStream
from headway.errors import DeadlineError
from headway.server.errors import refusal_reason, translate
from headway.text import Tokenizer
from tests.support.local_engine import make_local

SLOW = StepCost(0.01, 1e-3, 0.05, 0.0, 0.0)
"""A prompt token takes 50 ms: one of 30 takes a second and a half."""
PARAMS = SamplingParams(max_tokens=4)
HURRIED = Terms(tier="chat", targets=Targets(ttft_s=1.0))


async def slow_engine(tokenizer: Tokenizer, policy: str = "deadline") -> SimpleNamespace:
    """One that believes that its steps are slow, and has said so."""
    local = await make_local(tokenizer, "abc", policy)
    for number in range(300):
        shape = StepShape(number % 7, 8 * (number % 5))
        local.process.scheduler.pacer.model.observe(shape, SLOW.predict(shape))
    await answer(local, "first", Terms())
    return local


async def answer(local: SimpleNamespace, name: str, terms: Terms, num_prompt: int = 2) -> int:
    stream = await local.engine.submit(name, [65] * num_prompt, PARAMS, terms=terms)
    return sum(
        [len(one.token_ids) async for deltas in local.engine.deltas(stream) for one in deltas]
    )


@pytest.mark.timing
async def test_the_hopeless_is_refused_before_the_engine_hears_of_it(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    local.process.is_paused = True  # as if in the middle of a long step
    num_added = len(local.process.added)
    began_at = time.monotonic()
    with pytest.raises(DeadlineError, match="the first token is expected in") as caught:
        await local.engine.submit("late", [65] * 60, PARAMS, terms=HURRIED)
    assert time.monotonic() - began_at < 0.05
    assert caught.value.retry_after_s >= 1
    assert len(local.process.added) == num_added
    assert local.engine.num_requests == 0
    await local.engine.close()


async def test_those_on_their_way_count(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    local.process.is_paused = True
    await local.engine.submit("a", [65] * 10, PARAMS, terms=HURRIED)
    with pytest.raises(DeadlineError):
        for name in "bcdef":
            await local.engine.submit(name, [65] * 10, PARAMS, terms=HURRIED)
    await local.engine.close()


async def test_what_its_tenant_owes_others_counts_here_too(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer, "fair")
    local.process.is_paused = True
    pace, terms = local.process.scheduler.pace, replace(HURRIED, tenant="t")
    for excess in (-1000.0, 30.0):
        shares = Shares({"t": Lead(excess, 1.0, 1.0)})
        step = SimpleNamespace(pace=replace(pace, shares=shares))
        local.engine._outlook.observe(SimpleNamespace(stepped=[step], idled=[]))
        if excess < 0:
            await local.engine.submit("fine", [65] * 2, PARAMS, terms=terms)
        else:
            with pytest.raises(DeadlineError):
                await local.engine.submit("late", [65] * 2, PARAMS, terms=terms)
    local.engine._outlook.observe(SimpleNamespace(stepped=[], idled=[object()]))
    await local.engine.submit("later", [65] * 2, PARAMS, terms=terms)
    await local.engine.close()


async def test_what_can_be_kept_is_let_in(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    assert await answer(local, "fine", HURRIED) > 0
    assert await answer(local, "patient", Terms(), num_prompt=60) > 0
    await local.engine.close()


async def test_nothing_is_refused_where_the_line_does_not_heed_targets(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer, "fcfs")
    assert await answer(local, "a", HURRIED, num_prompt=60) > 0
    await local.engine.close()


async def test_nothing_is_refused_before_the_engine_has_told_its_pace(tokenizer: Tokenizer):
    local = await make_local(tokenizer, "abc", "deadline")
    assert await answer(local, "a", HURRIED, num_prompt=60) > 0
    await local.engine.close()


async def test_a_refusal_by_the_engine_reaches_the_caller_as_the_same_error(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    local.engine._outlook.reset()
    with pytest.raises(DeadlineError) as caught:
        await answer(local, "late", HURRIED, num_prompt=60)
    assert caught.value.retry_after_s >= 1
    assert local.engine.num_requests == 0
    await local.engine.close()


async def test_a_refusal_by_the_engine_is_counted_where_it_is_answered(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    local.engine._outlook.reset()
    with pytest.raises(DeadlineError):
        await answer(local, "late", HURRIED, num_prompt=60)
    assert b'reason="deadline"' not in local.metrics.render()
    await local.engine.close()


async def test_what_a_tenant_has_in_the_cache_is_not_counted_as_work(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    mine, hurried = Terms(cache_group="t"), replace(HURRIED, cache_group="t")
    with pytest.raises(DeadlineError):
        await answer(local, "unknown", hurried, num_prompt=60)
    await answer(local, "in no hurry", mine, num_prompt=60)
    assert await answer(local, "cached", hurried, num_prompt=60) > 0
    with pytest.raises(DeadlineError):
        await answer(local, "another", replace(HURRIED, cache_group="u"), num_prompt=60)
    await local.engine.close()


async def test_one_that_the_last_engine_had_is_not_refused_by_the_next(tokenizer: Tokenizer):
    stream = RequestStream(AddRequest("a", [65] * 60, PARAMS, 0, 0.0, terms=HURRIED), tokenizer)
    first, again = stream.commands(0.0), stream.commands(0.0)
    assert [one.is_resent for one in (*first, *again)] == [False, True]
    local = await slow_engine(tokenizer)
    await local.process.send(again[0])
    assert "a" in local.process.scheduler.requests
    await local.engine.close()


def test_it_is_answered_with_503_and_when_to_come_back():
    answered = translate(DeadlineError("the first token is expected in 9 s", 8))
    assert (answered.status, answered.code) == (503, "deadline_not_feasible")
    assert answered.headers == {"Retry-After": "8"}
    assert refusal_reason(DeadlineError("late", 8)) == "deadline"
