"""The real model on three engines: a stream that moves has the same tokens and scores."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.frontend_kills import Stream, read_stream
from benchmarks.support.fleet_loads import (
    check,
    check_counts,
    check_fault,
    client_of,
    run_undisturbed,
    until_all_run,
)
from benchmarks.support.fleets import Fleet
from benchmarks.support.history import problems
from headway.fleet.network.cluster_key import write_cluster_key
from tests.fleet.conftest import wait_up
from tests.grammar.test_outputs import PERSON

pytestmark = pytest.mark.model

NUM_TOKENS = 40
GREEDY = {"temperature": 0}
INTEGER = {"type": "integer"}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def requests() -> list[dict[str, Any]]:
    """Greedy and sampled streams: one to three samples, stop strings, scores, a schema."""
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"n": 3, "logprobs": 2},
        {"logprobs": 3},
        {"stop": [" the", "\n\n"], "min_tokens": 10},
        {"repetition_penalty": 1.2},
        {"structured_outputs": {"json": PERSON}, "n": 2},
    ]
    prompts = ["The history of bread begins", "A recipe for soup:", "Once upon a time in Bergen"]
    return [
        {
            "prompt": prompts[number % 3],
            "max_tokens": NUM_TOKENS,
            "seed": number,
            "ignore_eos": "structured_outputs" not in kind,
            **kind,
            **sampling,
        }
        for number, (kind, sampling) in enumerate(
            (kind, sampling) for kind in kinds for sampling in (GREEDY, SAMPLED)
        )
    ]


async def test_streams_of_the_model_survive_the_loss_of_engines(
    fleet: Fleet, model_path: Path, tmp_path: Path, is_full: bool
) -> None:
    sent = requests() if is_full else [*requests()[1:6:2], requests()[-1]]
    key = tmp_path / "cluster.key"
    write_cluster_key(key)
    flags = ("--cluster-key-file", str(key))
    for _ in range(3 if is_full else 2):
        fleet.start_model_engine(
            model_path, *flags, "--kv-cache-memory-bytes", "64M", "--num-threads", "1"
        )
    server = fleet.start_model_frontend(model_path, *flags, "--max-queue-age-s", "300")
    await wait_up(fleet, server)
    references = await run_undisturbed(server, sent)
    assert len({one for history in references for one in history.fingerprints}) == 1
    lost_at = 0.0

    async def kill_engine_process() -> None:
        nonlocal lost_at
        lost_at = time.monotonic()
        fleet.engines[0].kill_engine()

    histories = await check_fault(server, sent, references, kill_engine_process)
    gaps = [history.longest_gap_s(lost_at) for history in histories]
    print(f"longest gap {max(gaps):.2f} s")
    if not is_full:
        await check_counts(server, references, histories)
        return

    async def kill_host() -> None:
        fleet.engines[1].kill_host()

    again = await check_fault(server, sent, references, kill_host)
    check(await run_undisturbed(server, sent), references)
    await check_counts(server, references, histories, again, references)
    await asyncio.to_thread(server.stop)


@pytest.mark.full
async def test_a_stream_with_a_schema_is_adopted(
    fleet: Fleet, model_path: Path, tmp_path: Path
) -> None:
    """Its frontend dies in the middle of the output; another one delivers the rest."""
    key = tmp_path / "cluster.key"
    write_cluster_key(key)
    flags = ("--cluster-key-file", str(key))
    fleet.start_model_engine(model_path, *flags, "--kv-cache-memory-bytes", "64M")
    servers = [fleet.start_model_frontend(model_path, *flags) for _ in range(2)]
    body = {
        "prompt": "A list of numbers as JSON: ",
        "max_tokens": 200,
        "structured_outputs": {"json": {"type": "array", "items": INTEGER, "minItems": 60}},
        "temperature": 0.8,
        "seed": 4,
    }
    for server in servers:
        await wait_up(fleet, server)
    async with client_of(servers[0]) as first, client_of(servers[1]) as second:
        reference, stream = Stream(body), Stream(body)
        await read_stream([first, second], 0, reference)
        task = asyncio.create_task(read_stream([first, second], 0, stream))
        await until_all_run([stream.history])
        servers[0].process.kill()
        await asyncio.wait_for(task, 60)
    assert stream.num_resumed and not problems(stream.history, reference.history)
