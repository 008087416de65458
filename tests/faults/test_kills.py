"""A slice of benchmarks.faults.kills: the real model, killed under streams."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.kills import measure, start_server
from benchmarks.support.servers import RunningServer
from headway.executors.cpu import kernels

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(kernels.best_isa() is None, reason="the compiled kernels are not built"),
]

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = start_server(model_path, tmp_path_factory.mktemp("kills"), 4, "--standby")
    yield server.wait_ready()
    server.stop()


async def test_a_killed_engine_costs_no_prompt(server: RunningServer) -> None:
    args = argparse.Namespace(kills=1, damage=False, seed=0)
    result = await measure(server, 4, "sampled", args)
    assert result.num_wrong == 0
    assert result.num_recomputed < BLOCK_SIZE


async def test_damaged_blocks_are_computed_again(server: RunningServer) -> None:
    args = argparse.Namespace(kills=2, damage=True, seed=7)
    result = await measure(server, 4, "greedy", args)
    assert result.num_wrong == 0
    assert result.num_recomputed > 0
