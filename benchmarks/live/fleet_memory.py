"""How much memory a frontend needs per engine and per stream.

    python -m benchmarks.live.fleet_memory [--engines 32] [--streams 500] [--prompt-chars 2000]

A frontend begins with one engine, then finds the others in its file; then streams begin that last
until all have been counted. Engines are fake and in processes of their own: the memory is that of
the frontend, RssAnon + VmSwap.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.support.fleet_loads import client_of, read_to_end
from benchmarks.support.fleets import Fleet
from benchmarks.support.proc_stats import usage_of
from benchmarks.support.records import write_record
from benchmarks.support.servers import RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.bench.steal import StealMeter

SETTLE_S = 5.0
STEP_S = 2.0
"""Long steps: streams stay, and make little."""


def settled_bytes(server: RunningServer) -> int:
    time.sleep(SETTLE_S)
    return usage_of(server.process.pid).memory_bytes


def wait_for(server: RunningServer, text: str, count: int) -> None:
    """Wait until the log has a text that often."""
    deadline = time.monotonic() + 60
    while server.log.count(text) < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"error: {count} times {text!r} expected in the log:\n{server.log}")
        time.sleep(0.1)


async def with_streams(server: RunningServer, num_streams: int, num_chars: int) -> int:
    """Return the memory while that many streams are open."""
    async with client_of(server) as client:
        bodies = [
            {"prompt": f"{at:5}".ljust(num_chars, "x"), "max_tokens": 500, "stream": True}
            for at in range(num_streams)
        ]
        tasks = [asyncio.create_task(read_to_end(client, body)) for body in bodies]
        await asyncio.sleep(2 * SETTLE_S)
        failed = [task for task in tasks if task.done()]
        if failed:
            failed[0].result()
            raise SystemExit(f"error: {len(failed)} streams ended early")
        num_bytes = usage_of(server.process.pid).memory_bytes
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return num_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, default=32)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--prompt-chars", type=int, default=2000, help="one token each")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    meter = StealMeter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        listed = folder / "engines.txt"
        with contextlib.closing(Fleet(folder, tokenizer)) as fleet:
            settings = {"step_s": STEP_S, "num_blocks": 4096, "max_model_len": 4096}
            for _ in range(args.engines):
                fleet.start_engine(**settings)
            addresses = [engine.wait_ready().address for engine in fleet.engines]
            listed.write_text(addresses[0])
            limits = {
                "max_num_queued_reqs": args.streams,
                "max_num_queued_tokens": args.streams * (args.prompt_chars + 1),
                "max_queue_wait_s": 600.0,
                "max_queue_age_s": 600.0,
            }
            frontend = fleet.start_frontend(discover=f"file:{listed}", **limits).wait_ready()
            with_one = settled_bytes(frontend)
            listed.write_text("\n".join(addresses))
            wait_for(frontend, "is up", args.engines)
            with_all = settled_bytes(frontend)
            with_load = asyncio.run(with_streams(frontend, args.streams, args.prompt_chars))
    per_engine = (with_all - with_one) / (args.engines - 1)
    per_stream = (with_load - with_all) / args.streams
    print(f"a frontend with one engine: {with_one / 2**20:.0f} MiB")
    print(f"each further engine: {per_engine / 1024:.0f} KiB")
    print(f"each stream with a prompt of {args.prompt_chars} tokens: {per_stream / 1024:.0f} KiB")
    figures = {"one_engine": with_one, "per_engine": per_engine, "per_stream": per_stream}
    write_record({"engines": args.engines, "streams": args.streams, **figures}, meter, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
