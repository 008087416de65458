"""Frontends and routers that record, over real engines that are killed, and `headway replay`."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx

from benchmarks.support.fleet_loads import client_of
from benchmarks.support.fleets import Fleet
from benchmarks.support.servers import RunningServer
from headway.record.entries import CLOSED
from headway.record.kinds import ROUTER
from headway.record.reader import CUT_SHORT, RecordingReader, find_recordings
from headway.record.router.entries import AdmittedEntry, ArrivedEntry, LostEntry
from tests.conftest import ROOT
from tests.fleet.conftest import NUM_BLOCKS, STEP_S, wait_up

STEM = "letters that many prompts begin with " * 4


async def talk(client: httpx.AsyncClient, number: int) -> None:
    """Have a conversation of three turns, and leave another stream after its first token."""
    context = f"{STEM}{number % 3} "
    for turn in range(3):
        body = {"prompt": context, "max_tokens": 60, "seed": number, "n": 1 + number % 2}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        context += answer.json()["choices"][0]["text"] + f" and {turn} "
    body = {"prompt": context, "max_tokens": 200, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            return


async def use(fleet: Fleet, frontends: list[RunningServer]) -> None:
    """Have conversations at all frontends, and kill an engine meanwhile."""
    async with asyncio.TaskGroup() as group:
        for frontend in frontends:
            group.create_task(_use(frontend))
        await asyncio.sleep(0.5)
        fleet.engines[0].kill_host()


async def _use(frontend: RunningServer) -> None:
    async with client_of(frontend) as client, asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(talk(client, number))


def replayed(folder: Path) -> list[int]:
    """Replay all recordings of a folder; return how many decisions of each are equal."""
    shown = headway("replay", str(folder))
    return [int(number) for number in re.findall(r": (\d+) decisions equal", shown)]


def headway(*arguments: str) -> str:
    command = [sys.executable, "-m", "headway", *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    return " ".join(shown.stdout.split())


def test_a_frontend_decides_the_same_again(fleet: Fleet, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    for _ in range(3):
        fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
    frontend = fleet.start_frontend(record=str(folder), routing="least-loaded")

    async def run() -> None:
        await wait_up(fleet, frontend)
        await use(fleet, [frontend])

    asyncio.run(run())
    assert frontend.stop() == 0, frontend.log
    (num_decisions,) = replayed(folder)
    (path,) = find_recordings([folder])
    assert num_decisions >= 2 * 8 * 4
    reader = RecordingReader.open(path, ROUTER)
    entries = list(reader.entries())
    assert reader.is_complete
    arrived = [entry for entry in entries if isinstance(entry, ArrivedEntry)]
    assert any(entry.is_resent for entry in arrived)
    assert any(entry.n == 2 for entry in arrived)
    assert sum(isinstance(entry, LostEntry) for entry in entries) == 1
    flags = ["--from", str(path), "--engines", "2", "--runs", "2", "--set", "policy=fcfs"]
    shown = headway("simulate", "smollm2-135m-2-cores", *flags)
    assert f"{sum(one.n for one in arrived if not one.is_resent)} recorded requests" in shown
    # The prefixes of the conversations were found, in the engines and in the replay.
    assert sum(isinstance(one, AdmittedEntry) and one.num_cached_tokens > 0 for one in entries) > 8


def test_frontends_and_their_router_decide_the_same_again(fleet: Fleet, tmp_path: Path) -> None:
    """Also when the router process is killed, and the frontends go on by themselves."""
    folder = tmp_path / "recordings"
    for _ in range(3):
        fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
    router = fleet.start_router("--record", str(folder))
    frontends = [
        fleet.start_frontend(record=str(folder), router=[router.address]) for _ in range(2)
    ]

    async def run() -> None:
        for frontend in frontends:
            await wait_up(fleet, frontend)
        using = asyncio.create_task(use(fleet, frontends))
        await asyncio.sleep(1.0)
        router.kill()
        await using

    asyncio.run(run())
    for frontend in frontends:
        assert frontend.stop() == 0, frontend.log
    assert min(replayed(folder)) >= 16
    paths = find_recordings([folder])
    assert all(path.name.endswith("-router.0000.rec") for path in paths)
    readers = [RecordingReader.open(path, ROUTER) for path in paths]
    kinds = [Counter(type(entry).__name__ for entry in reader.entries()) for reader in readers]
    assert sorted(reader.end for reader in readers) == [CLOSED, CLOSED, CUT_SHORT]
    assert all(found["LostEntry"] for found in kinds)
