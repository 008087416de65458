"""What interactive requests notice of a batch that runs beside them.

    python -m benchmarks.live.batch_beside MODEL [--lines 1000] [--share 0.7] [--window-s 60]
        [--rounds 3] [--json FILE]

First the capacity: the most requests per second that the server answers. Then windows of Poisson
arrivals at a share of it, in turn without a batch and with one that has more lines than it can
run. Reported: TTFT and TPOT percentiles of the interactive requests of both, pooled over the
rounds, and the tokens that the batch got meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.batches import get, line, submit, until
from benchmarks.support.servers import start_model_server
from headway.percentiles import percentile

MAX_TOKENS = 32
PROMPT = "Write one sentence about the number {}."
CAPACITY_REQUESTS = 96
SETTLE_S = 2.0


@dataclass
class Window:
    """The interactive requests of some windows."""

    ttft_s: list[float] = field(default_factory=list[float])
    tpot_s: list[float] = field(default_factory=list[float])
    num_refused: int = 0
    num_batch_lines: int = 0

    def line(self, name: str) -> str:
        figures = [
            f"{kind} p{rank} {1000 * percentile(values, rank):.0f}"
            for kind, values in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s))
            for rank in (50, 99)
            if values
        ]
        return (
            f"{name}: {len(self.ttft_s)} requests, {', '.join(figures)} ms, "
            f"{self.num_refused} refused, {self.num_batch_lines} lines of the batch"
        )


async def ask(client: httpx.AsyncClient, number: int, window: Window) -> None:
    """Send one request, and record its times."""
    body = {
        "prompt": PROMPT.format(number),
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    sent = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            window.num_refused += 1
            return
        lines = response.aiter_lines()
        times = [time.monotonic() async for text in lines if text.startswith("data: {")]
    window.ttft_s.append(times[0] - sent)
    if len(times) > 1:
        window.tpot_s.append((times[-1] - times[0]) / (len(times) - 1))


async def measure_capacity(client: httpx.AsyncClient) -> float:
    """Return the requests per second of a server that is never idle."""
    begun = time.monotonic()
    await asyncio.gather(*(ask(client, number, Window()) for number in range(CAPACITY_REQUESTS)))
    return CAPACITY_REQUESTS / (time.monotonic() - begun)


async def run_window(
    client: httpx.AsyncClient, rate: float, seconds: float, window: Window, chance: random.Random
) -> None:
    tasks: list[asyncio.Task[None]] = []
    until_at = time.monotonic() + seconds
    while (now := time.monotonic()) < until_at:
        tasks.append(asyncio.create_task(ask(client, chance.randrange(10**6), window)))
        await asyncio.sleep(min(chance.expovariate(rate), until_at - now))
    await asyncio.gather(*tasks)


async def run(client: httpx.AsyncClient, options: argparse.Namespace) -> dict[str, Any]:
    capacity = await measure_capacity(client)
    rate = options.share * capacity
    alone, beside = Window(), Window()
    lines = [
        line(number, prompt=PROMPT.format(-number), max_tokens=MAX_TOKENS, ignore_eos=True)
        for number in range(options.lines)
    ]
    for number in range(options.rounds):
        seed = options.seed + number  # the same arrivals in both windows
        await run_window(client, rate, options.window_s, alone, random.Random(seed))
        batch_id = (await submit(client, lines))["id"]
        await asyncio.sleep(SETTLE_S)
        before = (await get(client, batch_id))["request_counts"]["completed"]
        await run_window(client, rate, options.window_s, beside, random.Random(seed))
        after = (await get(client, batch_id))["request_counts"]["completed"]
        beside.num_batch_lines += after - before
        await client.post(f"/v1/batches/{batch_id}/cancel")
        await until(client, batch_id, timeout_s=60)
    print(f"capacity {capacity:.2f} requests/s, {rate:.2f} sent")
    print(alone.line("alone "))
    print(beside.line("beside"))
    return {"capacity": capacity, "alone": asdict(alone), "beside": asdict(beside)}


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.7)
    parser.add_argument("--window-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ("--batch-dir", str(folder / "batches"))
        server = start_model_server(options.model, folder / "server.log", *flags).wait_ready()
        try:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
                result = await run(client, options)
        finally:
            server.stop()
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
