"""The load client against endpoints that answer, refuse, stall and hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks.support.servers import RunningServer
from headway.bench.load.http import parse_url
from headway.bench.load.measure import Plan, name_model, warm_up
from headway.bench.load.openai import Access, Target
from headway.bench.load.records import Outcome
from headway.bench.load.runner import LoadRun, RunLimits, run_load
from headway.bench.load.stats import summarize_load
from headway.errors import ConfigError
from headway.workload import (
    ClosedLoop,
    Content,
    Fixed,
    Listed,
    Poisson,
    Synthetic,
    Tenants,
    Uniform,
    Vocabulary,
    WorkItem,
)
from tests.bench.conftest import Serve
from tests.bench.endpoint import Call, spell

MakeTarget = Callable[..., Target]


def closed(concurrency: int, num_output: int = 3, num_prompt: int = 4) -> Synthetic:
    return Synthetic(ClosedLoop(concurrency), Fixed(num_prompt), Fixed(num_output))


def opened(rate: float, num_output: int = 3) -> Synthetic:
    return Synthetic(Poisson(rate), Fixed(4), Fixed(num_output))


async def test_a_record_holds_what_happened(serve: Serve, target_of: MakeTarget):
    endpoint = await serve(lambda call: spell(call, 0.02))
    run = await run_load(target_of(endpoint.url), closed(1), RunLimits(1))
    [record] = run.records
    assert record.outcome is Outcome.COMPLETED
    assert (record.status, record.error, record.finish_reason) == (200, None, "length")
    assert (record.num_prompt_tokens, record.num_output_tokens) == (4, 3)
    assert record.chunk_tokens == [1, 1, 1]
    assert record.has_usage
    times = [record.scheduled_at, record.sent_at, *record.chunk_times, record.ended_at]
    assert times == sorted(time for time in times if time is not None)
    assert all(0.01 < gap < 0.5 for gap in record.gaps_s())
    assert run.cpu_share > 0
    body = endpoint.calls[0].body
    assert len(body.pop("prompt")) == 4
    assert body == {
        "model": "m",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def test_several_tokens_in_a_chunk_are_counted_exactly(serve: Serve, target_of: MakeTarget):
    async def script(call: Call) -> None:
        call.open_stream()
        call.text("ab")
        await asyncio.sleep(0.03)
        call.text("abcd", "abcd")  # two events in one piece
        await asyncio.sleep(0.03)
        call.text("ab" * 5)
        call.end_stream(10, prompt_tokens_details={"cached_tokens": 3})

    endpoint = await serve(script)
    [record] = (await run_load(target_of(endpoint.url), closed(1, 10), RunLimits(1))).records
    assert record.num_output_tokens == 10
    assert record.chunk_tokens == [1, 4, 5]
    assert len(record.gaps_s()) == 2
    assert record.num_cached_tokens == 3
    assert record.tpot_s == pytest.approx((record.chunk_times[-1] - record.chunk_times[0]) / 9)


async def test_without_usage_events_are_counted(serve: Serve, target_of: MakeTarget):
    async def script(call: Call) -> None:
        call.open_stream()
        call.text("a", "b")
        call.end_stream()

    endpoint = await serve(script)
    run = await run_load(target_of(endpoint.url), closed(1), RunLimits(1))
    assert run.records[0].num_output_tokens == 2
    assert summarize_load(run.records).num_without_usage == 1


async def test_events_may_be_torn_anywhere(serve: Serve, target_of: MakeTarget):
    async def script(call: Call) -> None:
        call.open_stream()
        event = b'data: {"choices": [{"text": "a"}]}\r\n\r\n: comment\r\n\r\n'
        for at in range(0, len(event), 7):
            call.chunk(event[at : at + 7])
            await asyncio.sleep(0.001)
        call.end_stream(1)

    endpoint = await serve(script)
    [record] = (await run_load(target_of(endpoint.url), closed(1), RunLimits(1))).records
    assert (record.outcome, record.num_output_tokens) == (Outcome.COMPLETED, 1)


async def test_chat_sends_words_and_skips_the_opening(serve: Serve, target_of: MakeTarget):
    async def script(call: Call) -> None:
        call.open_stream()
        call.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(0.05)
        call.event({"choices": [{"delta": {"content": "a"}}]})
        call.event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        call.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})
        call.chunk(b"data: [DONE]\n\n")
        call.write(b"0\r\n\r\n")

    endpoint = await serve(script)
    target = target_of(endpoint.url, is_chat=True, ignores_eos=False, extra_body={"top_k": 5})
    [record] = (await run_load(target, closed(1, 1, 50), RunLimits(1))).records
    assert (record.num_prompt_tokens, record.num_output_tokens) == (9, 1)
    assert record.ttft_s is not None
    assert record.ttft_s > 0.04
    call = endpoint.calls[0]
    assert call.path == "/v1/chat/completions"
    assert len(call.body["messages"][0]["content"].split()) == 50
    assert "ignore_eos" not in call.body
    assert call.body["top_k"] == 5


async def test_refusals_and_failures_are_told_apart(serve: Serve, target_of: MakeTarget):
    # Connections are not kept: one that is lost when used again is replaced, not a failure.
    last = {"connection": "close"}

    async def script(call: Call) -> None:
        match call.number:
            case 0:
                call.whole(503, {"error": {"message": "full"}}, retry_after="2", **last)
            case 1:
                call.whole(429, {"error": {"message": "slow down"}}, **last)
            case 2:
                call.whole(400, {"error": {"message": "no such field"}}, **last)
            case 3:
                call.open_stream()
                call.text("a")
                await asyncio.sleep(0.02)
                call.hang_up()
            case 4:
                call.hang_up()
            case 5:
                call.open_stream()
                call.event({"error": {"message": "engine died"}})
                call.write(b"0\r\n\r\n")
            case 6:
                call.open_stream()
                call.text("a")
                call.write(b"0\r\n\r\n")
            case 7:
                call.open_stream()
                call.chunk(b"data: oops\n\n")
                call.write(b"0\r\n\r\n")
            case _:
                await spell(call)

    endpoint = await serve(script)
    run = await run_load(target_of(endpoint.url), opened(50.0), RunLimits(9))
    summary = summarize_load(run.records)
    assert summary.outcomes == {"completed": 1, "refused": 2, "failed": 6, "unfinished": 0}
    assert summary.refusals == {429: 1, 503: 1}
    assert summary.retry_after_share == 0.5
    assert {r.retry_after for r in run.records if r.status == 503} == {"2"}
    # Whether a lost connection is seen as closed or as reset is up to the system.
    assert {error.split(" in the middle")[0] for error in summary.errors} - {
        "connection closed",
        "connection reset",
    } == {
        "HTTP 400: no such field",
        "connection closed before the answer",
        "error in the stream: engine died",
        "the stream ended without [DONE] or a finish reason",
        "an event of the stream is not JSON as expected",
    }
    assert set(summary.refusal_s) == {50, 95, 99}
    assert summary.num_output_tokens == 3


async def test_nobody_listening_is_an_error_per_request(target_of: MakeTarget):
    run = await run_load(target_of("http://127.0.0.1:1"), opened(200.0), RunLimits(5))
    assert summarize_load(run.records).errors == {"connection refused": 5}


@pytest.mark.timing
async def test_a_request_that_takes_too_long_has_failed(serve: Serve, target_of: MakeTarget):
    endpoint = await serve(lambda call: asyncio.sleep(5))
    target = target_of(endpoint.url, timeout_s=0.05)
    run = await run_load(target, closed(1), RunLimits(1))
    assert run.records[0].error == "timeout"
    assert run.elapsed_s < 2


async def test_open_loop_latency_counts_from_the_scheduled_time(
    serve: Serve, target_of: MakeTarget
):
    endpoint = await serve(lambda call: spell(call, 0.05))
    limits = RunLimits(6, max_concurrency=1)
    run = await run_load(target_of(endpoint.url), opened(1000.0, 2), limits)
    assert endpoint.most_running == 1
    last = run.records[-1]
    assert last.lateness_s is not None
    assert last.ttft_s is not None
    assert last.lateness_s > 0.4
    assert last.ttft_s > last.lateness_s
    assert summarize_load(run.records).lateness_s[99] > 0.4


async def test_nothing_is_sent_early(serve: Serve, target_of: MakeTarget):
    endpoint = await serve(spell)
    run = await run_load(target_of(endpoint.url), opened(200.0), RunLimits(60))
    assert min(record.lateness_s or 0.0 for record in run.records) >= 0.0


async def test_a_closed_loop_keeps_so_many_in_flight(serve: Serve, target_of: MakeTarget):
    endpoint = await serve(lambda call: spell(call, 0.01))
    run = await run_load(target_of(endpoint.url), closed(4), RunLimits(20))
    assert len(run.records) == 20
    assert endpoint.most_running == 4
    assert endpoint.num_connections == 4


@pytest.mark.parametrize("workload", [closed(2), opened(100.0)])
async def test_a_duration_ends_the_sending(
    serve: Serve, target_of: MakeTarget, workload: Synthetic
):
    endpoint = await serve(lambda call: spell(call, 0.01))
    run = await run_load(target_of(endpoint.url), workload, RunLimits(None, 0.3))
    assert 2 < len(run.records) < 60
    assert all(record.outcome is Outcome.COMPLETED for record in run.records)
    assert all(record.scheduled_at < 0.3 for record in run.records)


async def test_callers_pause_when_nobody_answers(target_of: MakeTarget):
    run = await run_load(target_of("http://127.0.0.1:1"), closed(2), RunLimits(None, 0.25))
    assert 2 <= len(run.records) <= 8


async def test_an_interrupted_run_keeps_what_there_is(serve: Serve, target_of: MakeTarget):
    async def script(call: Call) -> None:
        await (spell(call) if call.number == 0 else asyncio.sleep(60))

    endpoint = await serve(script)
    run = LoadRun()
    task = asyncio.create_task(
        run_load(target_of(endpoint.url), closed(1), RunLimits(5), 0, run, None)
    )
    while len(run.records) < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [record.outcome for record in run.records] == [Outcome.COMPLETED, Outcome.UNFINISHED]
    assert summarize_load(run.records).outcomes["unfinished"] == 1


async def test_tenants_have_names_and_keys(serve: Serve, target_of: MakeTarget):
    endpoint = await serve(spell)
    content = Content(tenants=Tenants(3, 0.0))
    workload = Synthetic(ClosedLoop(2), Fixed(2), Fixed(1), content)
    await run_load(target_of(endpoint.url, api_keys=("a", "b")), workload, RunLimits(30))
    seen = {(call.body["user"], call.headers["authorization"]) for call in endpoint.calls}
    assert seen == {
        ("tenant-1", "Bearer a"),
        ("tenant-2", "Bearer b"),
        ("tenant-3", "Bearer a"),
    }


async def test_requests_given_one_by_one(serve: Serve, target_of: MakeTarget):
    endpoint = await serve(spell)
    items = (WorkItem((1, 2), 2, 0.0, "gold"), WorkItem((3,), 1, 0.1, "free"))
    access = {"gold": Access("secret", {"priority": -1})}
    target = target_of(endpoint.url, api_keys=("shared",), access=access)
    run = await run_load(target, Listed(items), RunLimits(10))
    assert [record.scheduled_at for record in run.records] == [0.0, 0.1]
    gold, free = endpoint.calls
    assert (gold.headers["authorization"], gold.body["priority"]) == ("Bearer secret", -1)
    assert free.headers["authorization"] == "Bearer shared"
    assert "priority" not in free.body
    await run_load(target, Listed(items, concurrency=1), RunLimits(10))
    assert [call.body["prompt"] for call in endpoint.calls[2:]] == [[1, 2], [3]]
    with pytest.raises(ConfigError, match="no rate to change"):
        Listed(items).with_rate(1.0)


async def test_warm_up_uses_prompts_of_its_own(serve: Serve, target_of: MakeTarget):
    endpoint = await serve(spell)
    plan = Plan(closed(2), RunLimits(4), num_warmup=3)
    await warm_up(target_of(endpoint.url), plan, lambda done, total: None)
    await run_load(target_of(endpoint.url), plan.workload, plan.limits, plan.seed)
    assert len({json.dumps(call.body["prompt"]) for call in endpoint.calls}) == 3 + 4


async def test_the_model_is_asked_for(serve: Serve):
    async def script(call: Call) -> None:
        answers: list[tuple[int, Any]] = [
            (200, {"data": [{"id": "first"}, {"id": "second"}]}),
            (200, {"data": []}),
            (401, {"error": {"message": "no key"}}),
        ]
        call.whole(*answers[call.number])

    endpoint = await serve(script)
    origin = parse_url(endpoint.url)
    assert await name_model(origin, ("k",), None) == "first"
    assert endpoint.calls[0].headers["authorization"] == "Bearer k"
    with pytest.raises(ConfigError, match="give one with --model"):
        await name_model(origin, (), None)
    with pytest.raises(ConfigError, match="answered 401: no key"):
        await name_model(origin, (), None)
    assert await name_model(origin, (), "mine") == "mine"
    with pytest.raises(
        ConfigError, match=r"cannot reach http://127\.0\.0\.1:1: connection refused"
    ):
        await name_model(parse_url("http://127.0.0.1:1"), (), "mine")


@pytest.mark.parametrize("is_chat", [False, True])
async def test_against_the_real_server(fake_server: RunningServer, is_chat: bool):
    origin = parse_url(fake_server.url + "/v1")
    target = Target(origin, await name_model(origin, (), None), is_chat)
    workload = Synthetic(
        Poisson(100.0), Uniform(5, 40), Uniform(2, 20), Content(Vocabulary(100, 250), Tenants(2))
    )
    run = await run_load(target, workload, RunLimits(40))
    assert {record.error for record in run.records} == {None}
    asked = [item for item, _ in zip(workload.items(0), range(40), strict=False)]
    assert [r.num_output_tokens for r in run.records] == [i.num_output_tokens for i in asked]
    if not is_chat:
        lengths = [len(item.prompt_token_ids) for item in asked]
        assert [record.num_prompt_tokens for record in run.records] == lengths
    assert all(record.has_usage for record in run.records)
    assert httpx.get(f"{fake_server.url}/health").status_code == 200
