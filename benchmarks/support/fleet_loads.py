"""Load for fleets: streams of every kind, and their histories with and without a fault."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.support.history import History, problems, record
from benchmarks.support.servers import RunningServer

NUM_STREAMS = 32
NUM_KINDS = 8
RUNNING = "vllm:num_requests_running"
PATIENT = {"max_queue_wait_s": 300.0, "max_queue_age_s": 300.0}
"""Settings of a frontend: on a busy machine too, no request is refused for its wait."""


def bodies(max_tokens: int = 250, num_streams: int = NUM_STREAMS) -> list[dict[str, Any]]:
    """Streams of eight kinds: one to three samples, stop strings, log-probabilities."""
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"stop": ["qq", "zx"]},
        {"logprobs": 2},
        {"temperature": 0},
        {"n": 3, "logprobs": 1, "stop": ["abc"]},
        {"temperature": 0.7, "top_p": 0.9},
        {"min_tokens": 20, "stop": ["e"]},
    ]
    common = {"max_tokens": max_tokens}
    return [
        {"prompt": f"prompt {number} {'x' * (number % 5)}", "seed": number, **common, **kind}
        for number, kind in enumerate(kinds * (num_streams // NUM_KINDS))
    ]


async def record_all(
    client: httpx.AsyncClient, requests: Sequence[dict[str, Any]], histories: list[History]
) -> None:
    async with asyncio.TaskGroup() as group:
        for body, history in zip(requests, histories, strict=True):
            group.create_task(record(client, body, history))


def client_of(server: RunningServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


async def read_to_end(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Read a stream without looking at it; raise RuntimeError if it is refused."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for _ in response.aiter_raw():
            pass


async def run_undisturbed(server: RunningServer, requests: list[dict[str, Any]]) -> list[History]:
    histories = [History() for _ in requests]
    async with client_of(server) as client:
        await record_all(client, requests, histories)
    assert not any(history.errors for history in histories), histories[0].errors
    return histories


async def until_all_run(histories: Sequence[History], num_events: int = 5) -> None:
    """Wait until every stream has begun; raise RuntimeError if one has failed."""
    while min(len(history.times) for history in histories) < num_events:
        if errors := [error for history in histories for error in history.errors]:
            raise RuntimeError(errors[0])
        await asyncio.sleep(0.01)


async def check_fault(
    server: RunningServer,
    requests: list[dict[str, Any]],
    references: Sequence[History],
    fault: Callable[[], Awaitable[None]],
) -> list[History]:
    """Run the streams with a fault; check that each equals its reference."""
    histories = [History() for _ in requests]
    async with client_of(server) as client:
        running = asyncio.create_task(record_all(client, requests, histories))
        await asyncio.wait_for(until_all_run(histories), 60)
        await fault()
        await running
    check(histories, references)
    return histories


def check(histories: Sequence[History], references: Sequence[History]) -> None:
    """Check that every history equals its reference."""
    pairs = enumerate(zip(histories, references, strict=True))
    found = {number: problems(history, reference) for number, (history, reference) in pairs}
    wrong = {number: problem for number, problem in found.items() if problem}
    assert not wrong, wrong


@dataclass(frozen=True)
class Counts:
    """What a frontend has counted since its start."""

    num_samples: float = 0
    num_tokens: float = 0


NONE = Counts()


async def read_counts(server: RunningServer) -> Counts:
    """Return the counts once nothing runs."""
    await asyncio.to_thread(server.wait_for, RUNNING, 0, 30.0)
    await asyncio.to_thread(server.wait_for, "headway_kv_blocks_used", 0, 30.0)
    return Counts(
        await asyncio.to_thread(server.metric, "vllm:request_success_total"),
        await asyncio.to_thread(server.metric, "vllm:generation_tokens_total"),
    )


async def check_counts(
    server: RunningServer, *runs: Sequence[History], num_failed: int = 0, before: Counts = NONE
) -> None:
    """Check that every sample has ended once, and every token was counted once."""
    num_samples = sum(len(history.choices) for run in runs for history in run) + num_failed
    num_tokens = sum(history.num_tokens or 0 for run in runs for history in run)
    counts = await read_counts(server)
    assert counts.num_samples - before.num_samples == num_samples
    assert counts.num_tokens - before.num_tokens == num_tokens
