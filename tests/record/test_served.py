"""`headway serve --record` with the real model, an engine that is killed, and `headway replay`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults.kills import engine_pid
from benchmarks.support.servers import RunningServer, start_model_server
from headway.record.entries import AbortEntry, AddEntry, BeginEntry, Entry
from headway.record.kinds import ENGINE
from headway.record.reader import RecordingReader, find_recordings
from tests.conftest import ROOT

pytestmark = pytest.mark.model

STEM = "The scheduler decides which requests run in a step and how many of their tokens. " * 3
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}


def bodies() -> list[dict[str, Any]]:
    """Streams that share a prefix, of two samples each; one has a grammar, one a stop string."""
    # Long enough to be there when the engine is killed, however late that is.
    plain = {"max_tokens": 150, "n": 2, "ignore_eos": True}
    return [
        *({"prompt": f"{STEM}{number}", **plain} for number in range(3)),
        {"prompt": "A name:", "max_tokens": 30, "structured_outputs": {"json": SCHEMA}},
        {"prompt": STEM, "max_tokens": 30, "stop": [" the", "\n"]},
    ]


async def read(client: httpx.AsyncClient, fields: dict[str, Any]) -> int:
    """The number of chunks of a stream that ends well."""
    body = {**fields, "stream": True, "seed": 5}
    num_chunks = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            assert '"error"' not in line, line
            num_chunks += line.startswith("data: {")
    return num_chunks


async def leave(client: httpx.AsyncClient) -> None:
    """Read a little of a long stream and disconnect."""
    body = {"prompt": STEM, "max_tokens": 500, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            return


async def use(server: RunningServer) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        tasks = [asyncio.create_task(read(client, fields)) for fields in bodies()]
        await leave(client)
        await asyncio.to_thread(server.wait_at_least, "vllm:generation_tokens_total", 80)
        os.kill(engine_pid(server), signal.SIGKILL)
        assert all(await asyncio.gather(*tasks))
        assert await read(client, {"prompt": STEM, "max_tokens": 20})


def entries_of(path: Path) -> list[Entry]:
    return list(RecordingReader.open(path, ENGINE).entries())


def test_every_plan_of_both_engines_is_the_same_again(model_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    flags = ("--record", str(folder), "--kv-cache-memory-bytes", "64M")
    server = start_model_server(model_path, tmp_path / "server.log", *flags).wait_ready()
    try:
        asyncio.run(use(server))
    finally:
        code = server.stop()
    assert code == 0, server.log
    command = [sys.executable, "-m", "headway", "replay", str(folder)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    counts = [int(number) for number in re.findall(r": (\d+) steps equal", shown.stdout)]
    assert len(counts) == 2
    assert min(counts) > 10
    assert shown.stdout.count("its process was killed") == 1
    killed, last = map(entries_of, find_recordings([folder]))
    adds = [entry for entry in killed if isinstance(entry, AddEntry)]
    assert max(entry.n for entry in adds) == 2
    assert any(isinstance(entry, AbortEntry) for entry in killed)
    assert any(entry.is_resent and entry.tail for entry in last if isinstance(entry, AddEntry))
    assert sum(isinstance(entry, BeginEntry) and bool(entry.digest) for entry in last) == counts[1]
