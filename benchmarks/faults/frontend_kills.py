"""Kills frontends under streams, which their clients resume at another frontend.

    python -m benchmarks.faults.frontend_kills [MODEL] [--kills 20] [--streams 16] [--seed 5]
        [--json FILE]

Two engines and two frontends, with the fake engine or with MODEL. In each round all streams run, a
random frontend is killed with SIGKILL, and its clients ask the other frontend for the rest, by the
id of the last event. Each stream is compared with an undisturbed one: the same tokens, each once,
one end. The frontend that is left has counted the tokens that the engines computed: rounds without
stop strings must compute as many as an undisturbed run. (An engine knows no text: a request with a
stop string runs on until a frontend reads it again.) The ledger must have one row per request, with
the tokens that its client got.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.fleet_loads import RUNNING, bodies, client_of, until_all_run
from benchmarks.support.fleets import Fleet
from benchmarks.support.history import History, problems
from benchmarks.support.ledgers import read_ledger
from benchmarks.support.servers import RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.percentiles import percentile

NUM_FRONTENDS = 2
COMPUTED = "vllm:iteration_tokens_total_sum"
MAX_RESUME_S = 20.0
RETRY_S = 0.02
LAST_MOMENT_S = 1.0


@dataclass
class Stream:
    """One request, and what its client saw of it."""

    body: dict[str, Any]
    history: History = field(default_factory=History)
    last_id: str = ""
    num_resumed: int = 0

    @property
    def request_id(self) -> str:
        return self.last_id.rpartition(".")[0]


@dataclass
class Round:
    """What one kill did."""

    num_streams: int
    num_resumed: int
    problems: list[str]
    pauses_s: list[float]
    """Longest gap after the kill, of each stream that was resumed."""
    num_extra_tokens: float
    """Tokens that the engines computed beyond those of an undisturbed run."""
    has_stops: bool


async def read_stream(clients: Sequence[httpx.AsyncClient], at: int, stream: Stream) -> None:
    """Read a stream at one frontend, and its rest wherever there is one."""
    options = {"include_usage": True, "resumable": True}
    body = {**stream.body, "stream": True, "stream_options": options}
    deadline = time.monotonic() + 600.0
    while not stream.history.num_done and not stream.history.errors:
        if stream.last_id:
            headers = {"Last-Event-ID": stream.last_id}
            path = f"/v1/streams/{stream.request_id}"
            request = clients[at].build_request("GET", path, headers=headers)
        else:
            request = clients[at].build_request("POST", "/v1/completions", json=body)
        with contextlib.suppress(httpx.TransportError):
            await _read(await clients[at].send(request, stream=True), stream)
        if not stream.history.num_done:
            if time.monotonic() > deadline:
                stream.history.errors.append("it was not resumed in time")
                return
            deadline = min(deadline, time.monotonic() + MAX_RESUME_S)
            at = (at + 1) % len(clients)
            stream.num_resumed += 1
            await asyncio.sleep(RETRY_S)


async def _read(response: httpx.Response, stream: Stream) -> None:
    try:
        if response.status_code != 200:
            text = (await response.aread())[:500]
            stream.history.errors.append(f"{response.status_code} {text!r}")
            return
        event_id = stream.last_id
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                event_id = line.removeprefix("id: ")
            elif line.startswith("data: "):
                stream.history.add(line.removeprefix("data: "))
                stream.last_id = event_id
    finally:
        await response.aclose()


async def run_streams(
    servers: Sequence[RunningServer],
    requests: Sequence[dict[str, Any]],
    fault: Callable[[], int] | None = None,
) -> tuple[list[Stream], float]:
    """Run all requests, over both frontends; return the streams and the time of the fault."""
    streams = [Stream(body) for body in requests]
    killed_at = 0.0
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(one)) for one in servers]
        tasks = [
            asyncio.create_task(read_stream(clients, number % len(servers), stream))
            for number, stream in enumerate(streams)
        ]
        if fault is not None:
            await asyncio.wait_for(until_all_run([one.history for one in streams]), 120)
            killed_at = time.monotonic()
            fault()
        await asyncio.gather(*tasks)
    return streams, killed_at


class Battery:
    """A fleet, its references, and the rounds so far."""

    def __init__(
        self,
        fleet: Fleet,
        start_frontend: Callable[[], RunningServer],
        requests: Sequence[dict[str, Any]],
        seed: int,
    ) -> None:
        self._fleet = fleet
        self._start_frontend = start_frontend
        self._draw = random.Random(seed)
        self._loads = [
            [one for one in requests if "stop" not in one],
            [one for one in requests if "stop" in one] * 2,
        ]
        self._references: list[list[History]] = []
        self._num_computed: list[float] = []
        self._servers = [start_frontend() for _ in range(NUM_FRONTENDS)]
        self.streams: list[Stream] = []
        """Streams of all runs."""
        self.rounds: list[Round] = []
        self.unwritten: set[str] = set()
        """Requests that ended at a frontend in the moment before it was killed."""

    async def _run_undisturbed(self, requests: Sequence[dict[str, Any]]) -> None:
        before = await self._count(self._servers[0])
        streams, _ = await run_streams(self._servers, requests)
        errors = [error for one in streams for error in one.history.errors]
        if errors:
            raise RuntimeError(errors[0])
        self.streams += streams
        self._references.append([one.history for one in streams])
        self._num_computed.append(await self._count(self._servers[0]) - before)

    async def kill(self) -> Round:
        """Kill a random frontend under one of the loads."""
        for number, server in enumerate(self._servers):
            if server.process.poll() is not None:
                self._servers[number] = self._start_frontend()
        await self._wait_up()
        number = len(self.rounds) % len(self._loads)
        if number == len(self._references):
            await self._run_undisturbed(self._loads[number])
        victim = self._draw.randrange(NUM_FRONTENDS)
        left = self._servers[victim - 1]
        before = await self._count(left)

        def kill() -> int:
            self._servers[victim].process.kill()
            return self._servers[victim].process.wait()

        streams, killed_at = await run_streams(self._servers, self._loads[number], kill)
        num_computed = await self._count(left) - before
        self.streams += streams
        pairs = zip(streams, self._references[number], strict=True)
        found = [problem for one, right in pairs for problem in problems(one.history, right)]
        resumed = [one for one in streams if one.num_resumed]
        # Rows that were on their way to disk are lost with their frontend, as with any server.
        self.unwritten |= {
            one.request_id
            for one in streams[victim::NUM_FRONTENDS]
            if not one.num_resumed and killed_at - one.history.times[-1] < LAST_MOMENT_S
        }
        self.rounds.append(
            Round(
                len(streams),
                len(resumed),
                found,
                [one.history.longest_gap_s(killed_at) for one in resumed],
                num_computed - self._num_computed[number],
                has_stops=bool(number),
            )
        )
        return self.rounds[-1]

    async def _wait_up(self) -> None:
        for server in self._servers:
            await asyncio.to_thread(server.wait_ready)
            while server.log.count(" is up: ") < len(self._fleet.engines):
                await asyncio.sleep(0.02)

    async def _count(self, server: RunningServer) -> float:
        """Return the tokens that a frontend saw the engines compute, once nothing runs."""
        await asyncio.to_thread(server.wait_for, RUNNING, 0, 60.0)
        await asyncio.to_thread(server.wait_for, "headway_kv_blocks_used", 0, 60.0)
        return await asyncio.to_thread(server.metric, COMPUTED)

    async def check_ledger(self, path: Path, timeout_s: float = 30.0) -> list[str]:
        """Return where the ledger differs from what the clients got."""
        expected = {one.request_id: one.history.num_tokens for one in self.streams}
        deadline = time.monotonic() + timeout_s
        while True:
            found = read_ledger(path)
            wrong = [
                f"{name}: {found.get(name)} output tokens in the ledger, not {number}"
                for name, number in expected.items()
                if found.get(name, None if name in self.unwritten else -1) not in (None, number)
            ]
            wrong += [f"{name}: nobody asked for it" for name in found.keys() - expected.keys()]
            if not wrong or time.monotonic() > deadline:
                return wrong
            await asyncio.sleep(0.2)


def report(battery: Battery, ledger_problems: Sequence[str]) -> dict[str, Any]:
    """Return the figures of all rounds."""
    rounds = battery.rounds
    pauses = sorted(pause for one in rounds for pause in one.pauses_s)
    plain = [one.num_extra_tokens for one in rounds if not one.has_stops]
    return {
        "kills": len(rounds),
        "streams": sum(one.num_streams for one in rounds),
        "resumed": sum(one.num_resumed for one in rounds),
        "streams_that_differ": [problem for one in rounds for problem in one.problems],
        "tokens_computed_twice": sum(plain),
        "tokens_after_stop_strings": sum(o.num_extra_tokens for o in rounds if o.has_stops),
        "ledger_problems": list(ledger_problems),
        "ended_in_the_last_moment": len(battery.unwritten),
        "pause_p50_s": round(percentile(pauses, 50), 3) if pauses else None,
        "pause_p99_s": round(percentile(pauses, 99), 3) if pauses else None,
        "rounds": [asdict(one) for one in rounds],
    }


def failures_in(figures: dict[str, Any]) -> list[str]:
    """Return what must not have happened."""
    names = ("streams_that_differ", "tokens_computed_twice", "ledger_problems")
    failures = [f"{name}: {figures[name]}" for name in names if figures[name]]
    if figures["resumed"] < figures["kills"]:
        failures.append("too few streams were resumed")
    return failures


async def run(battery: Battery, num_kills: int, ledger: Path) -> dict[str, Any]:
    for number in range(num_kills):
        one = await battery.kill()
        print(
            f"kill {number + 1}: {one.num_resumed} of {one.num_streams} streams resumed, "
            f"{len(one.problems)} problems, longest pause {max(one.pauses_s, default=0.0):.3f} s",
            file=sys.stderr,
            flush=True,
        )
    return report(battery, await battery.check_ledger(ledger))


def fake_battery(fleet: Fleet, ledger: Path, num_streams: int, seed: int) -> Battery:
    """Start a battery with the fake engine."""
    for _ in range(2):
        fleet.start_engine(step_s=0.01, num_blocks=2048)
    url = f"sqlite://{ledger}"
    return Battery(
        fleet,
        lambda: fleet.start_frontend(ledger_url=url),
        bodies(120, num_streams),
        seed,
    )


def model_battery(fleet: Fleet, model: Path, num_streams: int, seed: int) -> Battery:
    """Start a battery with the model."""
    for _ in range(2):
        flags = ("--kv-cache-memory-bytes", "128M", "--num-threads", "1")
        fleet.start_model_engine(model, *flags)
    requests = [
        {**body, "ignore_eos": True, "stop": [" the", "."], "min_tokens": 12}
        if "stop" in body
        else {**body, "ignore_eos": True}
        for body in bodies(48, num_streams)
    ]
    return Battery(
        fleet,
        lambda: fleet.start_model_frontend(model, "--max-queue-age-s", "300"),
        requests,
        seed,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        with contextlib.closing(Fleet(folder, tokenizer)) as fleet:
            if args.model is None:
                battery = fake_battery(fleet, folder / "ledger.db", args.streams, args.seed)
            else:
                battery = model_battery(fleet, args.model, args.streams, args.seed)
            figures = asyncio.run(run(battery, args.kills, folder / "ledger.db"))
    failures = failures_in(figures)
    text = json.dumps({**figures, "failures": failures}, indent=2)
    print(json.dumps({k: v for k, v in figures.items() if k != "rounds"}, indent=2))
    if args.json is not None:
        args.json.write_text(text + "\n")
    for failure in failures:
        print(failure[:2000], file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
