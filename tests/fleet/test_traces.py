"""`headway trace` of a frontend: a track for each of its engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from benchmarks.support.fleets import Fleet
from tests.cli.test_trace import headway
from tests.fleet.conftest import wait_up
from tests.observe.test_chrome import tracks_of

BODY = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}


async def test_steps_of_each_engine_and_the_requests_of_the_frontend(
    fleet: Fleet, tmp_path: Path
) -> None:
    for _ in range(2):
        fleet.start_engine(step_s=0.002)
    frontend = fleet.start_frontend(routing="least-loaded")
    await wait_up(fleet, frontend)
    async with httpx.AsyncClient(base_url=frontend.url, timeout=30) as client:
        answers = await asyncio.gather(
            *[client.post("/v1/completions", json=BODY) for _ in range(8)]
        )
    path = tmp_path / "trace.json"
    result = await asyncio.to_thread(headway, "--url", frontend.admin_url, "-o", str(path))
    assert result.exit_code == 0, result.output
    tracks = tracks_of(json.loads(path.read_text()))
    steps = {name: found for (group, name), found in tracks.items() if group == "engine steps"}
    assert len(steps) == 2
    assert all(name.startswith("tcp://") for name in steps)
    ids = {one.json()["id"] for one in answers}
    requests = {name: found for (group, name), found in tracks.items() if group != "engine steps"}
    assert set(requests) == ids
    ends = [one["ts"] + one["dur"] for found in steps.values() for one in found]
    for found in requests.values():
        whole = found[0]
        # The clocks of engines are those of the frontend here, within a round trip.
        assert min(ends) - 500_000 < whole["ts"] + whole["dur"] < max(ends) + 500_000
