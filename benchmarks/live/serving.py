"""Measures the cost of HTTP: the same requests offline and as streams.

python -m benchmarks.live.serving MODEL [--rounds 3] [--clients 64] [--requests 256]
    [--json out.json]

The server and the offline engine have the same settings. Rounds are interleaved; each offline run
has its own process while the server idles. Client, API process and engine share the machine, so the
report shows the CPU share of each during the streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.support.records import write_record
from benchmarks.support.servers import RunningServer, start_model_server
from headway.bench.load.http import parse_url
from headway.bench.load.measure import name_model
from headway.bench.load.openai import Target
from headway.bench.load.records import Outcome
from headway.bench.load.runner import RunLimits, run_load
from headway.bench.offline.modes import Bench
from headway.bench.steal import StealMeter
from headway.build import load_model
from headway.clock import SystemClock
from headway.config import load_config
from headway.workload import Listed, WorkItem
from headway.workload.mixed import mixed

SETTINGS = {"kv_cache_memory_bytes": "2G", "enable_prefix_caching": False}


@dataclass(frozen=True, slots=True)
class Streamed:
    """One round over HTTP: tokens/s, and CPU share of each process."""

    tokens_per_s: float
    client_share: float
    api_share: float
    engine_share: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    batch = mixed(args.requests).items
    if not Path(args.model).exists():
        raise SystemExit(f"error: there is no {args.model}; scripts/get-test-model prints a path")
    if args.offline:
        print(json.dumps(run_offline(args.model, args.requests, args.clients)))
        return
    offline: list[float] = []
    streamed: list[Streamed] = []
    meter = StealMeter()
    with serving(args.model, args.clients) as server:
        asyncio.run(stream(server, batch[: args.clients], args.clients))  # to warm up
        for number in range(args.rounds):
            command = [sys.executable, "-m", "benchmarks.live.serving", args.model, "--offline"]
            command += ["--requests", str(args.requests), "--clients", str(args.clients)]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            offline.append(float(json.loads(out)))
            streamed.append(asyncio.run(stream(server, batch, args.clients)))
            print(
                f"round {number + 1}: offline {offline[-1]:.0f} tokens/s, streamed "
                f"{streamed[-1].tokens_per_s:.0f}; CPU: client "
                f"{streamed[-1].client_share:.2f}, API {streamed[-1].api_share:.2f}, engine "
                f"{streamed[-1].engine_share:.2f}",
                flush=True,
            )
    ratios = [one.tokens_per_s / other for one, other in zip(streamed, offline, strict=True)]
    print(
        f"offline {median(offline):.0f}, streamed {median(s.tokens_per_s for s in streamed):.0f} "
        f"output tokens/s; ratio {median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"
    )
    document = {
        "clients": args.clients,
        "requests": args.requests,
        "offline_tokens_per_s": offline,
        "streamed": [asdict(one) for one in streamed],
        "ratios": ratios,
    }
    write_record(document, meter, args.json)


def run_offline(model: str, num_requests: int, max_num_seqs: int) -> float:
    """Run offline twice; return the output tokens/s of the second run."""
    config = load_config({"model": model, "max_num_seqs": max_num_seqs, **SETTINGS})
    loaded = load_model(config)
    bench = Bench(loaded.executor, config.scheduler, SystemClock(), False)
    bench.run_continuous(mixed(min(num_requests, max_num_seqs)))
    return bench.run_continuous(mixed(num_requests)).output_tokens_per_s


@contextmanager
def serving(model: str, max_num_seqs: int) -> Iterator[RunningServer]:
    """Yield `headway serve` on a free port; then stop it."""
    flags = ["--max-num-seqs", str(max_num_seqs), "--kv-cache-memory-bytes", "2G"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = start_model_server(Path(model), log, "--no-enable-prefix-caching", *flags)
        try:
            yield server.wait_ready()
        finally:
            server.stop()


def cpu_s(server: RunningServer) -> tuple[float, float]:
    """Return the CPU seconds so far of the API process and of the engine process."""
    api = psutil.Process(server.process.pid)
    own, engines = api.cpu_times(), [child.cpu_times() for child in api.children()]
    return own.user + own.system, sum(times.user + times.system for times in engines)


async def stream(server: RunningServer, batch: Sequence[WorkItem], num_clients: int) -> Streamed:
    """Stream all requests with `num_clients` clients in a closed loop."""
    origin = parse_url(server.url)
    model = await name_model(origin, (), None)
    api_s, engine_s = cpu_s(server)
    started_at = time.perf_counter()
    run = await run_load(
        Target(origin, model),
        Listed(tuple(batch), num_clients),
        RunLimits(num_requests=len(batch)),
    )
    elapsed_s = time.perf_counter() - started_at
    api_end_s, engine_end_s = cpu_s(server)
    failed = [record for record in run.records if record.outcome is not Outcome.COMPLETED]
    if failed:
        raise SystemExit(f"{len(failed)} of {len(run.records)} requests failed")
    return Streamed(
        sum(record.num_output_tokens for record in run.records) / run.elapsed_s,
        run.cpu_share,
        (api_end_s - api_s) / elapsed_s,
        (engine_end_s - engine_s) / elapsed_s,
    )


if __name__ == "__main__":
    main()
