"""Measures the pause of every stream after an engine kill, with the fake engine.

    python -m benchmarks.faults.recovery [--streams 16] [--step-s 0.1]

Steps take a fixed time, so the figure gives the number of steps of a recovery, whatever else runs
on the machine. `benchmarks.faults.engine_faults` measures the recovery with the real model.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.support.servers import Launcher, RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.bench.steal import StealMeter, steal_text


async def read(client: httpx.AsyncClient, number: int, received_at: dict[int, float]) -> None:
    body = {"prompt": f"prompt {number}", "max_tokens": 1500, "seed": number, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                received_at[number] = time.monotonic()


async def measure(server: RunningServer, num_streams: int) -> tuple[float, float]:
    """Return seconds until a new engine is ready, and from then until all streams continue."""
    received_at: dict[int, float] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        tasks = [asyncio.create_task(read(client, at, received_at)) for at in range(num_streams)]
        await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", num_streams, 60)
        await asyncio.sleep(4.0)
        os.kill(int(re.findall(r"^engine (\d+)$", server.log, re.MULTILINE)[-1]), signal.SIGKILL)
        killed_at = time.monotonic()
        while "the engine is back" not in server.log:
            await asyncio.sleep(0.01)
        back_at = time.monotonic()
        while min(received_at.values()) <= back_at:
            await asyncio.sleep(0.01)
        all_at = time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return back_at - killed_at, all_at - back_at


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=0.1)
    args = parser.parse_args()
    meter = StealMeter()
    with tempfile.TemporaryDirectory() as name:
        tokenizer = write_byte_level(Path(name) / "tokenizer.gguf", pre="gpt-2")
        server = Launcher(Path(name), tokenizer)(step_s=args.step_s)
        try:
            server.wait_ready()
            back_s, all_s = asyncio.run(measure(server, args.streams))
        finally:
            server.process.kill()
            server.process.wait()
    print(
        f"engine back after {back_s:.1f} s, all {args.streams} streams {all_s:.2f} s later; "
        f"{steal_text(meter.read())}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
