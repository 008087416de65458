"""The real model on three engines: a stream that moves has the same tokens and scores."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.fleet_loads import check, check_counts, check_fault, run_undisturbed
from benchmarks.support.fleets import Fleet
from headway.fleet.cluster_key import write_cluster_key
from tests.fleet.conftest import wait_up

pytestmark = pytest.mark.model

NUM_TOKENS = 40
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


def requests() -> list[dict[str, Any]]:
    """Twelve streams: greedy and sampled, one to three samples, stop strings, scores."""
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 2},
        {"n": 3, "logprobs": 2},
        {"logprobs": 3},
        {"stop": [" the", "\n\n"], "min_tokens": 10},
        {"repetition_penalty": 1.2},
    ]
    prompts = ["The history of bread begins", "A recipe for soup:", "Once upon a time in Bergen"]
    return [
        {
            "prompt": prompts[number % 3],
            "max_tokens": NUM_TOKENS,
            "seed": number,
            "ignore_eos": True,
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
    sent = requests() if is_full else requests()[1:6:2]
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
