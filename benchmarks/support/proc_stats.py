"""Resources of a server by its metrics and the operating system, and whether it released them.

Memory is RssAnon + VmSwap: what the process allocated, wherever the kernel stores it. Mapped
weights and shared libraries are excluded.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import uvloop

from benchmarks.support.records import write_record
from benchmarks.support.servers import Launcher, RunningServer, start_model_server
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.bench.load.http import HttpClient, Origin
from headway.bench.load.openai import Target, first_model
from headway.bench.steal import StealMeter
from headway.percentiles import percentile
from headway.workload import Vocabulary

T = TypeVar("T")
MIB = 2**20
MODEL_SETTINGS = {"deterministic": True, "kv_cache_memory_bytes": "512M"}
LETTERS = Vocabulary(97, 123)
"""Token ids that the vocabulary of the fake server has."""
QUIET_S = 60.0
SETTLE_S = 15.0
"""Longer than the server keeps an idle connection."""
_SERIES = re.compile(r"^([^{ ]+)(?:\{(.*)\})? ([^ ]+)$")


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory, descriptors and threads of one process."""

    memory_bytes: int
    num_descriptors: int
    num_threads: int


def usage_of(pid: int) -> Usage:
    """Return the usage of a process.

    Raises ProcessLookupError or FileNotFoundError if the process has ended.
    """
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    if "RssAnon" not in fields:
        raise ProcessLookupError(f"{pid} is a zombie")
    kib = sum(int(fields[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return Usage(kib * 1024, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def engine_pid(server: RunningServer) -> int | None:
    """Return the id of the engine process; None while it is being replaced."""
    children = psutil.Process(server.process.pid).children()
    return children[0].pid if children else None


def both_usages(server: RunningServer) -> dict[str, Usage]:
    """Return the usage of the API process and, if it exists, of the engine process."""
    found = {"api": usage_of(server.process.pid)}
    pid = engine_pid(server)
    if pid is not None:
        with suppress(FileNotFoundError, ProcessLookupError):
            found["engine"] = usage_of(pid)
    return found


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics at one moment: (name, labels) and value of every series."""

    series: Sequence[tuple[str, str, float]]

    def total(self, name: str) -> float:
        """Return the sum of all series of a metric."""
        return sum(value for found, _, value in self.series if found == name)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        values: dict[str, float] = {}
        for found, labels, value in self.series:
            match = re.search(rf'{label}="([^"]*)"', labels)
            if found == name and match:
                values[match[1]] = values.get(match[1], 0.0) + value
        return values

    def num_up_to(self, histogram: str, bound: float) -> float:
        """Return the observations of a histogram up to one of its bounds."""
        buckets = self.by_label(f"{histogram}_bucket", "le")
        return next((v for le, v in buckets.items() if float(le) == bound), 0.0)


def scrape(server: RunningServer, key: str = "") -> Scrape:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = httpx.get(f"{server.admin_url}/metrics", headers=headers, timeout=30)
    answer.raise_for_status()
    lines = answer.text.splitlines()
    matches = [_SERIES.match(line) for line in lines if not line.startswith("#")]
    return Scrape([(m[1], m[2] or "", float(m[3])) for m in matches if m])


async def until(is_so: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> bool:
    """Wait until a condition holds, checked in a thread; return False at the timeout."""
    deadline = time.monotonic() + timeout_s
    while not await asyncio.to_thread(is_so):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(every_s)
    return True


async def until_quiet(server: RunningServer, timeout_s: float = QUIET_S, key: str = "") -> bool:
    """Wait until no request runs or waits; return False at the timeout."""

    def is_quiet() -> bool:
        found = scrape(server, key)
        return not (
            found.total("vllm:num_requests_running") or found.total("vllm:num_requests_waiting")
        )

    return await until(is_quiet, timeout_s)


def blocks_in_use(server: RunningServer) -> float:
    """Return the KV blocks in use of a server without requests.

    A small request runs first. After an abort of the last request the metric is set to 0, not
    counted, and would not show a leak.
    """
    body = {"prompt": [97, 98, 99], "max_tokens": 2, "ignore_eos": True, "temperature": 0.0}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    return scrape(server).total("headway_kv_blocks_used")


@dataclass(slots=True)
class Remains:
    """Resources of a server without requests, before and after a load."""

    before: dict[str, Usage]
    after: dict[str, Usage] = field(default_factory=dict)
    num_running: float = 0.0
    num_waiting: float = 0.0
    num_blocks: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


THREAD_SLACK = 6
"""Threads that the API process starts at its first long input."""
DESCRIPTOR_SLACK = 4


async def remains_after(server: RunningServer, before: dict[str, Usage]) -> Remains:
    """Return the resources in use, once requests and idle connections have ended."""
    remains = Remains(before)
    await until_quiet(server)
    most = before["api"].num_descriptors
    await until(lambda: usage_of(server.process.pid).num_descriptors <= most, SETTLE_S, 0.5)
    remains.num_blocks = await asyncio.to_thread(blocks_in_use, server)
    found = await asyncio.to_thread(scrape, server)
    remains.num_running = found.total("vllm:num_requests_running")
    remains.num_waiting = found.total("vllm:num_requests_waiting")
    remains.after = both_usages(server)
    return remains


def leaks_in(
    remains: Mapping[str, Any], max_growth_mib: float, processes: Sequence[str]
) -> list[str]:
    """Return the leaks in `Remains.as_json`; memory counts for `processes` only."""
    counted = ("num_running", "num_waiting", "num_blocks")
    found = [f"{name} is {remains[name]:g} when quiet" for name in counted if remains[name]]
    for process in processes:
        before, after = remains["before"][process], remains["after"].get(process)
        if after is None:
            found.append(f"the {process} process has ended")
            continue
        grown = (after["memory_bytes"] - before["memory_bytes"]) / MIB
        if grown > max_growth_mib:
            found.append(f"{process}: memory grew by {grown:.1f} MiB")
        for name, slack in (("descriptors", DESCRIPTOR_SLACK), ("threads", THREAD_SLACK)):
            was, now = before[f"num_{name}"], after[f"num_{name}"]
            if now > was + slack:
                found.append(f"{process}: {was} {name} became {now}")
    return found


@contextmanager
def started(
    model: Path | None,
    folder: Path,
    settings: Mapping[str, object],
    for_model: Mapping[str, object] | None = None,
    key: str = "",
    **fake_engine: Any,
) -> Iterator[RunningServer]:
    """Yield a server with the model, or the fake server without one; then stop it.

    If the settings contain API keys, `key` is one of them.
    """
    if model is None:
        launcher = Launcher(folder, write_byte_level(folder / "tokenizer.gguf", pre="gpt-2"))
        server = launcher(server=dict(settings), **fake_engine)
    else:
        given = {**(for_model or {}), **settings}
        server = start_model_server(model, folder / "server.log", *flags_of(given))
    with ended(server):
        yield server.wait_ready(key)


def flags_of(settings: Mapping[str, object]) -> list[str]:
    """Return settings as flags of `headway serve`."""
    flags = list[str]()
    for name, value in settings.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            flags += [f"--{dashed}", str(value)]
    return flags


@contextmanager
def ended(server: RunningServer) -> Iterator[None]:
    try:
        yield
    finally:
        if server.process.poll() is None:
            server.process.terminate()
            try:
                server.process.wait(60)
            except Exception:
                server.process.kill()
                server.process.wait()


def origin_of(server: RunningServer) -> Origin:
    return Origin("127.0.0.1", server.port)


async def target_of(server: RunningServer, key: str = "") -> Target:
    """Return the target of the load client for a server."""
    client, keys = HttpClient(origin_of(server)), (key,) if key else ()
    try:
        return Target(client.origin, await first_model(client, keys), api_keys=keys)
    finally:
        client.close()


def battery_parser(about: str | None, can_fake: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all batteries: model, --fake, --json."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("model", type=Path, nargs="?" if can_fake else None, help="a GGUF file")
    if can_fake:
        parser.add_argument(
            "--fake", action="store_true", help="use the fake server, without a model"
        )
    parser.add_argument("--json", type=Path, help="write the report here")
    return parser


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments, with the steal meter of the run as `meter`."""
    args = parser.parse_args()
    if (args.model is None) != getattr(args, "fake", False):
        parser.error("give a model or --fake")
    if args.model is not None and not args.model.exists():
        parser.error(f"there is no model at {args.model}; scripts/get-test-model fetches one")
    args.meter = StealMeter()
    return args


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Return count, median, p99 and maximum of values."""
    if not values:
        return {"count": 0, "p50": None, "p99": None, "max": None}
    return {
        "count": len(values),
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "max": max(values),
    }


@dataclass(frozen=True, slots=True)
class Sample:
    """Usage and metrics of both processes at one moment."""

    at_s: float
    api: Usage
    engine_pid: int | None
    engine: Usage | None
    num_tokens: float
    num_running: float
    num_waiting: float
    num_restarts: float


def take_sample(server: RunningServer, at_s: float) -> Sample:
    seen, usages = scrape(server), both_usages(server)
    return Sample(
        at_s=at_s,
        api=usages["api"],
        engine_pid=engine_pid(server) if "engine" in usages else None,
        engine=usages.get("engine"),
        num_tokens=seen.total("vllm:generation_tokens_total"),
        num_running=seen.total("vllm:num_requests_running"),
        num_waiting=seen.total("vllm:num_requests_waiting"),
        num_restarts=seen.total("headway_engine_restarts_total"),
    )


def slope_per_s(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the slope of a least-squares line; None for fewer than three points."""
    if len(points) < 3:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    variance = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / variance


def engines_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return lifetime and first, largest and last memory of each engine process."""
    lives: dict[int, list[tuple[float, int]]] = {}
    for one in samples:
        if one.engine is not None and one.engine_pid is not None:
            lives.setdefault(one.engine_pid, []).append((one.at_s, one.engine.memory_bytes))
    return [
        {
            "seen_s": life[-1][0] - life[0][0],
            "memory_mib": [
                value / MIB
                for value in (life[0][1], max(memory for _, memory in life), life[-1][1])
            ],
        }
        for life in lives.values()
    ]


def draw_samples(
    path: Path, samples: Sequence[Mapping[str, Any]], marks: Sequence[tuple[float, str]]
) -> None:
    """Draw memory of both processes and throughput over time, with faults as marks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True)
    for panel, name in zip(panels, ("api", "engine"), strict=False):
        known = [one for one in samples if one[name] is not None]
        values = [one[name]["memory_bytes"] / MIB for one in known]
        panel.plot([one["at_s"] / 60 for one in known], values, ".-", color="#2a7f62")
        panel.set(title=f"memory of the {name} process", ylabel="MiB")
        # The axis spans at least 4 MiB, so that constant memory looks constant.
        middle = (min(values) + max(values)) / 2
        half = max(2.0, 0.6 * (max(values) - min(values)))
        panel.set_ylim(middle - half, middle + half)
    pairs = list(pairwise(samples))
    speeds = [(b["num_tokens"] - a["num_tokens"]) / (b["at_s"] - a["at_s"]) for a, b in pairs]
    panels[2].plot([b["at_s"] / 60 for _, b in pairs], speeds, ".-", color="#3b6ea5")
    panels[2].set(title="throughput", ylabel="output tokens/s", xlabel="minutes")
    panels[2].set_ylim(bottom=0)
    for panel in panels:
        panel.grid(alpha=0.3)
        for number, (at_s, _) in enumerate(marks):
            label = "fault" if number == 0 else None
            panel.axvline(at_s / 60, color="#b0413e", linewidth=0.8, alpha=0.5, label=label)
    if marks:
        panels[0].legend(loc="upper left")
    figure.savefig(path, dpi=110, format="png")


def run_client(main: Coroutine[Any, Any, T]) -> T:
    """Run a client on the cheapest event loop, since it shares the machine."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def conclude(report: dict[str, Any], failures: Sequence[str], args: argparse.Namespace) -> int:
    """Write the report, print the failures, and return the exit code."""
    write_record({**report, "failures": list(failures)}, args.meter, args.json)
    for failure in failures:
        print("FAILED:", failure)
    print("failed" if failures else "passed")
    return 1 if failures else 0
