"""Infeasible targets are refused by the API process at once, or by the engine after its step."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headway.core.events import Idled, Stepped
from headway.core.params import SamplingParams
from headway.core.slo.forecast import DemandSample, Forecast, TenantForecast
from headway.core.slo.forecast_reader import ForecastReader
from headway.core.slo.steptime import StepCost, StepShape
from headway.core.terms import Targets, Terms
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import (
    AddRequest,
    EngineInfo,
    EventBatch,
    decode_report,
    encode,
)
from headway.errors import DeadlineError
from headway.server.http.errors import refusal_reason, translate
from headway.text import Tokenizer
from tests.core.slo.paced import Paced, crowded
from tests.support.apps import client_of
from tests.support.local_engine import make_local

SLOW = StepCost(0.01, 1e-3, 0.05, 0.0, 0.0)
"""A prompt token takes 50 ms: one of 30 takes a second and a half."""
PARAMS = SamplingParams(max_tokens=4)
COUNTER = "headway_requests_refused_total{"
HURRIED = Terms(tier="chat", targets=Targets(ttft_s=1.0))


async def slow_engine(tokenizer: Tokenizer, policy: str = "deadline") -> SimpleNamespace:
    """An engine that believes that its steps are slow, and has said so; it caches no prefixes."""
    local = await make_local(tokenizer, "abc", policy)
    local.link.info = replace(local.process.info, has_prefix_cache=False)
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


async def test_one_aborted_before_it_is_sent_counts_no_more(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    local.process.is_paused = True
    local.link.is_up = False  # as while the engine is replaced
    for number in range(20):
        stream = await local.engine.submit(f"a{number}", [65] * 10, PARAMS, terms=HURRIED)
        assert not stream.is_sent
        await local.engine.abort(stream)
    local.link.is_up = True
    await local.engine.submit("b", [65] * 10, PARAMS, terms=HURRIED)
    await local.engine.close()


def report_forecast(local: SimpleNamespace, forecast: Forecast) -> None:
    """Report a step with this forecast to the API process."""
    reader = local.engine.engines[0].forecast_reader
    reader.observe([Idled(0.0, 0, forecast)], local.engine._clock.now())


async def test_what_its_tenant_owes_others_counts_here_too(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer, "fair")
    local.process.is_paused = True
    forecast, terms = local.process.scheduler.forecast(0.0), replace(HURRIED, tenant="t")
    report_forecast(local, replace(forecast, tenants={"t": TenantForecast(1.0, owed_s=0.1)}))
    await local.engine.submit("fine", [65] * 2, PARAMS, terms=terms)
    report_forecast(local, replace(forecast, tenants={"t": TenantForecast(1.0, owed_s=1.5)}))
    with pytest.raises(DeadlineError):
        await local.engine.submit("late", [65] * 2, PARAMS, terms=terms)
    idled = Idled(0.0, 0, local.process.scheduler.forecast(0.0))
    local.engine.engines[0].forecast_reader.observe([idled], 0.0)
    await local.engine.submit("later", [65] * 2, PARAMS, terms=terms)
    await local.engine.close()


async def test_demand_of_others_leaves_a_tenant_its_share_here_too(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer, "fair")
    local.process.is_paused = True
    full = DemandSample([0, 0, 20_000], [20_000], {})
    forecast = replace(local.process.scheduler.forecast(0.0), demand=full)
    terms = replace(HURRIED, tenant="t")
    at = forecast.made_at
    own = {"t": TenantForecast(0.5, full, made_at=at), "u": TenantForecast(0.5, made_at=at)}
    report_forecast(local, replace(forecast, tenants=own))
    with pytest.raises(DeadlineError):
        await local.engine.submit("over", [65] * 2, PARAMS, terms=terms)
    await local.engine.submit("within", [65] * 2, PARAMS, terms=replace(terms, tenant="u"))
    await local.engine.submit("unknown", [65] * 2, PARAMS, terms=replace(terms, tenant="v"))
    await local.engine.close()


async def test_a_prompt_counts_as_cached_and_the_engine_decides(
    tokenizer: Tokenizer,
):
    local = await slow_engine(tokenizer)
    local.process.info = replace(local.process.info, has_prefix_cache=True)
    local.link.info = local.process.info
    mine, hurried = Terms(cache_group="t"), replace(HURRIED, cache_group="t")
    local.process.is_paused = True
    late = await local.engine.submit("late", [65] * 60, PARAMS, terms=hurried)
    local.process.is_paused = False
    local.process._wake.set()
    with pytest.raises(DeadlineError):
        async for _ in local.engine.deltas(late):
            pass
    await answer(local, "in no hurry", mine, num_prompt=60)
    assert await answer(local, "cached", hurried, num_prompt=60) > 0
    await local.engine.close()


@pytest.mark.timing
def test_an_early_refusal_costs_the_same_however_many_requests_are_open():
    readers = {num_open: reader_of(num_open) for num_open in (250, 5000)}
    terms = Terms(tenant="t49", targets=Targets(deadline_s=50_000.0))
    least_s = dict.fromkeys(readers, 1.0)
    for number in range(30):
        for num_open, (reader, info) in readers.items():
            command = AddRequest(f"x{number}", [1] * 8, PARAMS, 0, 0.0, terms=terms)
            began_at = time.process_time()
            reader.check(command, info, 0.0)
            least_s[num_open] = min(least_s[num_open], time.process_time() - began_at)
            reader.remove(command.id)
    assert least_s[5000] < 2 * least_s[250], "linear in the open requests, it would be 20"


def reader_of(num_open: int) -> tuple[ForecastReader, EngineInfo]:
    """A reader with the forecast of an engine with this many open requests."""
    engine = crowded(num_open)
    reader = ForecastReader()
    reader.observe([Idled(0.0, 0, engine.scheduler.forecast(0.0))], 0.0)
    return reader, EngineInfo(engine.capacity, 8, 100, scheduling_policy="fair")


def test_the_forecast_survives_the_wire():
    engine = Paced(scheduling_policy="fair", max_num_seqs=2)
    for number in range(6):
        engine.ask(f"a{number}", 100, 10, tenant="a", deadline_s=20.0, tpot_s=0.1)
    engine.step()
    stepped = engine.seen(Stepped)
    decoded = decode_report(encode(EventBatch(stepped=stepped)))
    assert isinstance(decoded, EventBatch)
    assert decoded.stepped == stepped


async def test_what_can_be_kept_is_let_in(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    assert await answer(local, "fine", HURRIED) > 0
    assert await answer(local, "patient", Terms(), num_prompt=60) > 0
    await local.engine.close()


async def test_nothing_is_refused_where_the_policy_ignores_targets(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer, "fcfs")
    assert await answer(local, "a", HURRIED, num_prompt=60) > 0
    await local.engine.close()


async def test_nothing_is_refused_before_the_first_forecast(tokenizer: Tokenizer):
    local = await make_local(tokenizer, "abc", "deadline")
    assert await answer(local, "a", HURRIED, num_prompt=60) > 0
    await local.engine.close()


async def test_a_refusal_by_the_engine_reaches_the_caller_as_the_same_error(tokenizer: Tokenizer):
    local = await slow_engine(tokenizer)
    local.engine.engines[0].forecast_reader.reset()
    with pytest.raises(DeadlineError) as caught:
        await answer(local, "late", HURRIED, num_prompt=60)
    assert caught.value.retry_after_s >= 1
    assert local.engine.num_requests == 0
    await local.engine.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_refusal_by_the_engine_is_counted_once(tokenizer: Tokenizer, is_streamed: bool):
    local = await slow_engine(tokenizer)
    local.engine.engines[0].forecast_reader.reset()
    num_added = len(local.process.added)
    body = {"prompt": [65] * 60, "max_tokens": 4, "ttft_ms": 1000, "stream": is_streamed}
    async with client_of(local.app) as public, client_of(local.admin) as admin:
        refused = await public.post("/v1/completions", json=body)
        metrics = (await admin.get("/metrics")).text
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "deadline_not_feasible"
    assert len(local.process.added) == num_added + 1, "it was the engine that refused it"
    (line,) = [one for one in metrics.splitlines() if one.startswith(COUNTER)]
    assert 'reason="deadline"' in line and line.endswith(" 1.0")
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
