"""What viewers of the dashboard cost: output tokens per second with some and with none.

    python -m benchmarks.live.viewers MODEL [--viewers 8] [--streams 64] [--tokens 64] [--rounds 5]
        [--json FILE] [--memory-minutes 60]

Rounds with and without viewers take turns, and which comes first changes from pair to pair, so that
noise of the machine hits both alike. Each round sends the same streams and waits for all. Reported:
the median and the extremes of both, of the ratios of the pairs, and the CPU seconds of the API
process. With --memory-minutes: the memory of the API process at the beginning, in the middle and at
the end of rounds that take so long, all with viewers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil

from benchmarks.support.fleet_loads import client_of, read_to_end
from benchmarks.support.records import write_record
from benchmarks.support.servers import RunningServer, start_model_server
from headway.bench.steal import StealMeter

STREAM = "/dashboard/api/stream"
PROMPT = "Write a short story about the number {}."


@dataclass
class Rounds:
    """The rounds with one number of viewers."""

    tokens_per_s: list[float] = field(default_factory=list[float])
    cpu_s: list[float] = field(default_factory=list[float])

    def line(self, name: str) -> str:
        speed, cpu = self.tokens_per_s, self.cpu_s
        return (
            f"{name}: {median(speed):.1f} tokens/s ({min(speed):.1f} - {max(speed):.1f}), "
            f"{median(cpu):.2f} CPU s of the API process"
        )


@asynccontextmanager
async def watching(server: RunningServer, num_viewers: int) -> AsyncIterator[list[int]]:
    """Read the stream of the dashboard with some viewers; yield the bytes that came."""
    num_bytes = [0]

    async def watch(client: httpx.AsyncClient) -> None:
        async with client.stream("GET", STREAM) as response:
            response.raise_for_status()
            async for piece in response.aiter_raw():
                num_bytes[0] += len(piece)

    async with httpx.AsyncClient(base_url=server.admin_url, timeout=None) as client:
        viewers = [asyncio.create_task(watch(client)) for _ in range(num_viewers)]
        yield num_bytes
        for viewer in viewers:
            viewer.cancel()
        failures = await asyncio.gather(*viewers, return_exceptions=True)
    for failure in failures:
        if not isinstance(failure, asyncio.CancelledError):
            raise RuntimeError(f"a viewer ended: {failure!r}")


async def run_round(server: RunningServer, options: argparse.Namespace, rounds: Rounds) -> None:
    process = psutil.Process(server.process.pid)
    body = {"max_tokens": options.tokens, "ignore_eos": True, "stream": True}
    before, begun = process.cpu_times(), time.monotonic()
    async with client_of(server) as client, asyncio.TaskGroup() as group:
        for number in range(options.streams):
            prompt = PROMPT.format(number)
            group.create_task(read_to_end(client, {**body, "prompt": prompt, "seed": number}))
    after, elapsed_s = process.cpu_times(), time.monotonic() - begun
    rounds.tokens_per_s.append(options.streams * options.tokens / elapsed_s)
    rounds.cpu_s.append(after.user + after.system - before.user - before.system)


async def run(server: RunningServer, options: argparse.Namespace) -> dict[str, object]:
    none, some = Rounds(), Rounds()
    await run_round(server, options, Rounds())  # warms up
    num_bytes = 0
    for number in range(options.rounds):
        pair = [(0, none), (options.viewers, some)]
        for num_viewers, rounds in pair if number % 2 else reversed(pair):
            async with watching(server, num_viewers) as received:
                await run_round(server, options, rounds)
            num_bytes += received[0]
    pairs = zip(some.tokens_per_s, none.tokens_per_s, strict=True)
    ratios = [with_viewers / without for with_viewers, without in pairs]
    rss = psutil.Process(server.process.pid).memory_info().rss
    print(none.line("no viewers"))
    print(some.line(f"{options.viewers} viewers"))
    print(f"ratio: {median(ratios):.4f} ({min(ratios):.4f} - {max(ratios):.4f})")
    print(f"{num_bytes / 1e6:.1f} MB to viewers; the API process has {rss / 2**20:.0f} MiB")
    return {
        "none": asdict(none),
        "viewers": asdict(some),
        "ratios": ratios,
        "num_bytes": num_bytes,
        "rss": rss,
    }


async def run_for_memory(server: RunningServer, options: argparse.Namespace) -> dict[str, object]:
    """Watch rounds for some minutes; report the memory of the API process over them."""
    process, samples = psutil.Process(server.process.pid), list[tuple[float, int]]()
    await run_round(server, options, Rounds())  # warms up
    begun, rounds = time.monotonic(), Rounds()
    async with watching(server, options.viewers) as received:
        while not samples or samples[-1][0] < 60 * options.memory_minutes:
            samples.append((time.monotonic() - begun, process.memory_info().rss))
            await run_round(server, options, rounds)
    samples.append((time.monotonic() - begun, process.memory_info().rss))
    for name, (at_s, rss) in (
        ("beginning", samples[0]),
        ("middle", samples[len(samples) // 2]),
        ("end", samples[-1]),
    ):
        print(f"{name}: {rss / 2**20:.1f} MiB after {at_s / 60:.1f} min")
    num_requests = options.streams * len(rounds.tokens_per_s)
    print(f"{num_requests} requests, {received[0] / 1e6:.1f} MB to {options.viewers} viewers")
    return {"samples": samples, "num_requests": num_requests, "num_bytes": received[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--viewers", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-minutes", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    meter = StealMeter()
    with tempfile.TemporaryDirectory() as folder:
        server = start_model_server(options.model, Path(folder) / "server.log")
        try:
            server.wait_ready()
            measure = run_for_memory if options.memory_minutes else run
            report = asyncio.run(measure(server, options))
        finally:
            server.stop()
    write_record(report, meter, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
