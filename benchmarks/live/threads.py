"""Measures decode steps on an idle machine and beside a process that keeps one core busy.

python -m benchmarks.live.threads MODEL [--streams 1 8 32] [--threads 1 2] [--library FILE ...]
    [--rounds 10] [--json FILE]

Each round runs greedy steps for half a second with every number of threads and every library of
kernels, first without and then beside the busy process. The table shows the median (quartiles) of
a round's mean step, and the median of its ratio to the first row of the same round.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.live.sampling import GREEDY, Steps, busy_core, make_executor, read_contexts
from headway.bench.steal import StealMeter, steal_text
from headway.executors.cpu import kernels

SECONDS = 0.5
SETTLE_S = 0.2
"""The busy process starts and finds a core in this time."""


def make_steps(
    model: str, num_streams: int, threads: Sequence[int], libraries: Sequence[Path]
) -> dict[str, Steps]:
    """Return steps of an executor for every library and number of threads."""
    made: dict[str, Steps] = {}
    contexts = read_contexts(model, num_streams)
    for library in libraries:
        kernels.LIBRARY = library.resolve()
        kernels.load_kernels.cache_clear()
        for num_threads in threads:
            executor = make_executor(model, num_streams, num_threads)
            steps = Steps(executor, contexts)
            steps.write_blocks()
            steps.decode(GREEDY, is_first=True)
            made[f"{library.stem}, {num_threads} threads"] = steps
    return made


def measure(steps: Steps) -> float:
    """Return the mean seconds of the steps of half a second."""
    seconds: list[float] = []
    while sum(seconds) < SECONDS:
        seconds.append(steps.decode(GREEDY))
    return sum(seconds) / len(seconds)


def run_rounds(made: dict[str, Steps], num_rounds: int) -> dict[str, list[float]]:
    """Return the mean step of every round, without and beside the busy process."""
    found: dict[str, list[float]] = {
        f"{name}, {how}": [] for how in ("idle", "busy") for name in made
    }
    names = list(made)
    for number in range(num_rounds):
        first = number % len(names)
        for how in ("idle", "busy"):
            with busy_core(how == "busy"):
                time.sleep(SETTLE_S)
                for name in (*names[first:], *names[:first]):
                    found[f"{name}, {how}"].append(measure(made[name]))
    return found


def summary(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return median and quartiles in ms, and the ratio to the first row."""
    base = next(iter(found.values()))
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in found.items():
        low, middle, high = (1000 * value for value in quantiles(seconds, n=4))
        ratio = median(own / other for own, other in zip(seconds, base, strict=True))
        rows[name] = {"step_ms": middle, "low": low, "high": high, "ratio": ratio}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--library", type=Path, nargs="+", default=[kernels.LIBRARY])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if len({library.stem for library in args.library}) < len(args.library):
        parser.error("--library: give the files different names, which the table shows")
    report: dict[str, Any] = {}
    for num_streams in args.streams:
        made = make_steps(args.model, num_streams, args.threads, args.library)
        meter = StealMeter()
        found = run_rounds(made, args.rounds)
        steal = meter.read()
        rows = summary(found)
        report[f"{num_streams} streams"] = {"summary": rows, "seconds": found}
        for name, row in rows.items():
            print(
                f"{num_streams:4d} streams  {name:42s} {row['step_ms']:7.1f} ms "
                f"({row['low']:.1f} - {row['high']:.1f})  {row['ratio']:.2f}x, {steal_text(steal)}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
