"""What resumable streams cost: CPU per token of a frontend and of an engine host.

    python -m benchmarks.live.resumable_cost [--streams 32] [--tokens 400] [--rounds 6]

One engine host with the fake engine, and one frontend. Rounds with and without `resumable` take
turns, so that noise of the machine hits both alike; the figures are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from pathlib import Path
from statistics import median

import psutil

from benchmarks.support.fleet_loads import client_of, read_to_end
from benchmarks.support.fleets import Fleet
from benchmarks.support.servers import RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level


async def run_round(
    server: RunningServer, is_resumable: bool, num_streams: int, num_tokens: int
) -> None:
    """Read all streams to their end."""
    options = {"resumable": is_resumable}
    body = {"prompt": "x", "max_tokens": num_tokens, "stream": True, "stream_options": options}
    async with client_of(server) as client, asyncio.TaskGroup() as group:
        for number in range(num_streams):
            group.create_task(read_to_end(client, {**body, "seed": number}))


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tokenizer = write_byte_level(Path(name) / "tokenizer.gguf", pre="gpt-2")
        with contextlib.closing(Fleet(Path(name), tokenizer)) as fleet:
            host = fleet.start_engine(step_s=0.01, num_blocks=2048).wait_ready()
            server = fleet.start_frontend().wait_ready()
            pids = {"frontend": server.process.pid, "engine host": host.process.pid}
            costs: dict[tuple[str, bool], list[float]] = {}
            for number in range(2 * args.rounds + 1):
                is_resumable = bool(number % 2)
                before = {kind: cpu_s(pid) for kind, pid in pids.items()}
                asyncio.run(run_round(server, is_resumable, args.streams, args.tokens))
                for kind, pid in pids.items() if number else ():  # the first warms up
                    us = 1e6 * (cpu_s(pid) - before[kind]) / (args.streams * args.tokens)
                    costs.setdefault((kind, is_resumable), []).append(us)
    for kind in pids:
        plain, resumable = median(costs[kind, False]), median(costs[kind, True])
        print(f"{kind}: {plain:.1f} us per token, resumable {resumable:.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
