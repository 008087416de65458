"""Kills, stops and cuts off the engines of a fleet under streams, which must not change.

    python -m benchmarks.faults.fleet_faults [MODEL] [--faults NAME ...] [--each 10] [--streams 32]
        [--max-cut-s 6] [--seed 6] [--json FILE]

Three engines, each behind a relay, and two frontends, with the fake engine or with MODEL. In each
round all streams run at the first frontend, a fault happens, and every stream is compared with an
undisturbed one: the same tokens, each once, one end, no error. Frontend and ledger must have
counted every token once, and no request and no block may be left. A pause is the longest gap of a
stream after the fault. `noticed` is the time until the frontend has lost the engine, by its log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.support.fleet_loads import (
    PATIENT,
    bodies,
    client_of,
    read_counts,
    record_all,
    run_undisturbed,
    until_all_run,
)
from benchmarks.support.fleets import Fleet, RunningEngine
from benchmarks.support.history import History, problems, record
from benchmarks.support.ledgers import read_ledger
from benchmarks.support.relay import Relay
from benchmarks.support.servers import RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.bench.steal import StealMeter, steal_plain
from headway.percentiles import percentile

NUM_ENGINES = 3
NUM_TOKENS, NUM_MODEL_TOKENS = 120, 48
STEP_S = 0.02
HANG_S = 2.0
SLOW_S = 0.2
MAX_CUT_S = 6.0
MAX_LOST = 2
"""Engines that a request which ends engine processes may cost."""
POISON = "\x01"
POISON_TOKEN = 1
MAX_LEDGER_S = 30.0
LOST = re.compile(r"^(\S+ \S+) WARNING engine .*", re.MULTILINE)


class Rig:
    """A fleet whose engines and connections can be broken, and mended."""

    def __init__(
        self, folder: Path, model: Path | None, seed: int, max_cut_s: float = MAX_CUT_S
    ) -> None:
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        self.fleet = Fleet(folder, tokenizer)
        self.ledger = folder / "ledger.db"
        self.draw = random.Random(seed)
        self.max_cut_s = max_cut_s
        self.problems: list[str] = []
        """What a fault itself has found wrong."""
        self.num_poisons = 0
        self._model = model
        for _ in range(NUM_ENGINES):
            self._start_engine()
        ports = [int(one.address.rpartition(":")[2]) for one in self.engines]
        self.relays = [Relay(port) for port in ports]
        self.servers = [self._start_frontend() for _ in range(2)]

    @property
    def engines(self) -> list[RunningEngine]:
        return self.fleet.engines

    def _start_engine(self) -> None:
        if self._model is None:
            fake = {"step_s": STEP_S, "num_blocks": 4096, "poison_token": POISON_TOKEN}
            self.fleet.start_engine({"engine_hang_s": HANG_S}, **fake)
        else:
            flags = ("--kv-cache-memory-bytes", "256M", "--num-threads", "1")
            self.fleet.start_model_engine(self._model, *flags, "--engine-hang-s", "5")

    def _start_frontend(self) -> RunningServer:
        addresses = [relay.address for relay in self.relays]
        if self._model is None:
            # Every engine has requests: by predicted TTFT, engines of one fake speed are the same.
            ledger_url = f"sqlite://{self.ledger}"
            return self.fleet.start_frontend(
                engine=addresses, routing="least-loaded", ledger_url=ledger_url, **PATIENT
            )
        flags = [flag for address in addresses for flag in ("--engine", address)]
        flags += ["--max-queue-age-s", "300", "--max-queue-wait-s", "300"]
        flags += ["--routing", "least-loaded"]
        return self.fleet.start_model_frontend(self._model, *flags)

    async def mend(self) -> None:
        """Start what has ended, and wait until every frontend has every engine."""
        for engine in self.engines:
            with contextlib.suppress(ProcessLookupError):
                engine.kill_host(signal.SIGCONT)
            if engine.process.poll() is not None:
                engine.restart()
        for relay in self.relays:
            relay.heal()
            relay.resume()
            relay.delay(0.0)
        for number, server in enumerate(self.servers):
            if server.process.poll() is not None:
                self.servers[number] = self._start_frontend()
        for server in self.servers:
            await asyncio.to_thread(server.wait_ready)
            for relay in self.relays:
                await _wait_up(server, relay.address)

    def close(self) -> None:
        for relay in self.relays:
            relay.heal()
            relay.resume()
        self.fleet.close()
        for relay in self.relays:
            relay.close()


async def _wait_up(server: RunningServer, address: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    found = re.compile(rf"engine {re.escape(address)}( is up|: | is lost| has failed)")
    while found.findall(server.log)[-1:] != [" is up"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{address} is not up:\n{server.log[-3000:]}")
        await asyncio.sleep(0.05)


Fault = Callable[[Rig], Awaitable[None]]


async def kill_process(rig: Rig) -> None:
    """SIGKILL to an engine process."""
    rig.draw.choice(rig.engines).kill_engine()


async def kill_host(rig: Rig) -> None:
    """SIGKILL to an engine host, with its engine process."""
    rig.draw.choice(rig.engines).kill_host()


async def kill_two(rig: Rig) -> None:
    """SIGKILL to two hosts within a second."""
    first, second = rig.draw.sample(rig.engines, 2)
    first.kill_host()
    await asyncio.sleep(rig.draw.random())
    second.kill_host()


async def kill_all(rig: Rig) -> None:
    """SIGKILL to all hosts; they start again at once."""
    for engine in rig.engines:
        engine.kill_host()
    for engine in rig.engines:
        await asyncio.to_thread(engine.restart)


async def stop_process(rig: Rig) -> None:
    """SIGSTOP to an engine process, which its host replaces."""
    rig.draw.choice(rig.engines).kill_engine(signal.SIGSTOP)


async def stop_host(rig: Rig) -> None:
    """SIGSTOP to an engine host for some seconds."""
    engine = rig.draw.choice(rig.engines)
    engine.kill_host(signal.SIGSTOP)
    await asyncio.sleep(rig.draw.uniform(2.5, rig.max_cut_s))
    engine.kill_host(signal.SIGCONT)


async def end_host(rig: Rig) -> None:
    """SIGTERM to an engine host, as in an upgrade."""
    engine = rig.draw.choice(rig.engines)
    engine.kill_host(signal.SIGTERM)
    await asyncio.to_thread(engine.process.wait, 60)


async def cut(rig: Rig) -> None:
    """Connections of an engine end, and new ones are refused for some seconds."""
    relay = rig.draw.choice(rig.relays)
    relay.cut()
    await asyncio.sleep(rig.draw.uniform(0.1, rig.max_cut_s))
    relay.heal()


async def partition(rig: Rig) -> None:
    """Nothing passes between an engine and the frontends for some seconds."""
    await _stall(rig, is_one_way=False)


async def partition_one_way(rig: Rig) -> None:
    """Nothing passes from an engine to the frontends for some seconds."""
    await _stall(rig, is_one_way=True)


async def _stall(rig: Rig, is_one_way: bool) -> None:
    relay = rig.draw.choice(rig.relays)
    relay.stall(is_one_way)
    await asyncio.sleep(rig.draw.uniform(0.5, rig.max_cut_s))
    relay.resume()


async def slow_link(rig: Rig) -> None:
    """A connection is 0.2 s late, then stands still for a while that loses no engine."""
    relay = rig.draw.choice(rig.relays)
    relay.delay(SLOW_S)
    await asyncio.sleep(1.0)
    relay.stall()
    await asyncio.sleep(1.0)
    relay.resume()


async def poison(rig: Rig) -> None:
    """A request that ends every engine process that computes it, then the same at the others."""
    rig.num_poisons += 1
    body = {"prompt": f"deadly {rig.num_poisons} {POISON}", "max_tokens": 50}
    before = [engine.log.count("replacing the engine") for engine in rig.engines]
    for server in rig.servers:
        async with client_of(server) as client:
            history = await record(client, body)
        if not history.errors:
            rig.problems.append("a request that ends engine processes has no error")
    pairs = zip(rig.engines, before, strict=True)
    num_lost = sum(one.log.count("replacing the engine") > count for one, count in pairs)
    if num_lost > MAX_LOST:
        rig.problems.append(f"a request has ended the processes of {num_lost} engines")


FAULTS: dict[str, Fault] = {
    "kill-process": kill_process,
    "kill-host": kill_host,
    "kill-two": kill_two,
    "kill-all": kill_all,
    "stop-process": stop_process,
    "stop-host": stop_host,
    "end-host": end_host,
    "cut": cut,
    "partition": partition,
    "partition-one-way": partition_one_way,
    "slow-link": slow_link,
    "poison": poison,
}
BOTH = "kill-frontend-and-host"
"""The first frontend and an engine host die together; clients send again, with the seed."""


@dataclass
class Found:
    """What the rounds of one fault showed."""

    num_rounds: int = 0
    problems: list[str] = field(default_factory=list[str])
    pauses_s: list[float] = field(default_factory=list[float])
    noticed_s: list[float] = field(default_factory=list[float])

    def figures(self) -> dict[str, Any]:
        def at(values: Sequence[float], percent: float) -> float | None:
            return round(percentile(sorted(values), percent), 3) if values else None

        return {
            "rounds": self.num_rounds,
            "streams": len(self.pauses_s),
            "pause_p50_s": at(self.pauses_s, 50),
            "pause_p99_s": at(self.pauses_s, 99),
            "noticed_p50_s": at(self.noticed_s, 50),
            "noticed_most_s": at(self.noticed_s, 100),
            "problems": self.problems,
        }


class Battery:
    """Rounds of faults on one fleet."""

    def __init__(self, rig: Rig, requests: list[dict[str, Any]]) -> None:
        self._rig = rig
        self._requests = requests
        self._references: list[History] = []

    async def start(self) -> None:
        await self._rig.mend()
        self._references = await run_undisturbed(self._rig.servers[0], self._requests)

    async def run(self, name: str, found: Found) -> None:
        """Run the streams with a fault; add what it showed."""
        rig = self._rig
        await rig.mend()
        server = rig.servers[0]
        before = await read_counts(server)
        log_size = len(server.log)
        histories = [History() for _ in self._requests]
        async with client_of(server) as client:
            running = asyncio.create_task(record_all(client, self._requests, histories))
            await asyncio.wait_for(until_all_run(histories), 120)
            lost_at, lost_time = time.monotonic(), time.time()
            if name == BOTH:
                server.process.kill()
                await kill_host(rig)
                await running
                histories = await self._send_again(histories)
            else:
                await FAULTS[name](rig)
                await asyncio.wait_for(running, 300)
        found.num_rounds += 1
        pairs = zip(histories, self._references, strict=True)
        found.problems += [text for one, right in pairs for text in problems(one, right)]
        found.problems += rig.problems
        rig.problems.clear()
        if name == BOTH:
            return
        found.pauses_s += [history.longest_gap_s(lost_at) for history in histories]
        if lines := LOST.findall(server.log[log_size:]):
            found.noticed_s.append(_timestamp(lines[0]) - lost_time)
        counts = await read_counts(server)
        num_tokens = sum(history.num_tokens or 0 for history in histories)
        num_samples = sum(len(history.choices) for history in histories) + (name == "poison")
        if counts.num_tokens - before.num_tokens != num_tokens:
            found.problems.append("the frontend has counted other numbers of tokens")
        if counts.num_samples - before.num_samples != num_samples:
            found.problems.append("the frontend has counted other numbers of samples")
        if not await _are_charged(rig.ledger, histories):
            found.problems.append("the ledger has other numbers of tokens")

    async def _send_again(self, histories: Sequence[History]) -> list[History]:
        """Send what was cut off to the other frontend."""
        cut_off = [number for number, one in enumerate(histories) if not one.num_done]
        again = [History() for _ in cut_off]
        async with client_of(self._rig.servers[1]) as client:
            await record_all(client, [self._requests[number] for number in cut_off], again)
        return [
            again[cut_off.index(number)] if number in cut_off else one
            for number, one in enumerate(histories)
        ]


async def _are_charged(ledger: Path, histories: Sequence[History]) -> bool:
    """Wait until a ledger has every request once, with the tokens that its client got."""
    expected = {one.request_id: one.num_tokens for one in histories}
    deadline = time.monotonic() + MAX_LEDGER_S
    while not expected.items() <= read_ledger(ledger).items():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def _timestamp(text: str) -> float:
    """Return the time of a line of a log, which is in local time."""
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


async def run(rig: Rig, names: Sequence[str], each: int, requests: list[dict[str, Any]]) -> Any:
    battery = Battery(rig, requests)
    await battery.start()
    results = {name: Found() for name in names}
    for number in range(each):
        for name, found in results.items():
            await battery.run(name, found)
            pause_s = max(found.pauses_s[-len(requests) :], default=0.0)
            text = f"{name} {number + 1} of {each}: longest pause {pause_s:.2f} s"
            print(f"{text}, {len(found.problems)} problems", file=sys.stderr, flush=True)
    return {name: found.figures() for name, found in results.items()}


def make_requests(model: Path | None, num_streams: int) -> list[dict[str, Any]]:
    if model is None:
        return bodies(NUM_TOKENS, num_streams)
    return [
        {**body, "ignore_eos": True, "stop": [" the", "."], "min_tokens": 12}
        if "stop" in body
        else {**body, "ignore_eos": True}
        for body in bodies(NUM_MODEL_TOKENS, num_streams)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = (*FAULTS, BOTH)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--faults", nargs="+", choices=known, default=known)
    parser.add_argument("--each", type=int, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--max-cut-s", type=float, default=MAX_CUT_S, help="longest partition")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.model is not None and "poison" in args.faults:
        args.faults = [name for name in args.faults if name != "poison"]
        print("poison: only with the fake engine", file=sys.stderr)
    requests = make_requests(args.model, args.streams)
    meter = StealMeter()
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.closing(Rig(Path(name), args.model, args.seed, args.max_cut_s)) as rig,
    ):
        results = asyncio.run(run(rig, args.faults, args.each, requests))
    print("| fault | rounds | problems | pause p50 / p99 s | noticed p50 / most s |")
    print("|---|---|---|---|---|")
    for name, row in results.items():
        print(
            f"| {name} | {row['rounds']} | {len(row['problems'])} | {row['pause_p50_s']} / "
            f"{row['pause_p99_s']} | {row['noticed_p50_s']} / {row['noticed_most_s']} |"
        )
    if args.json is not None:
        record = {"faults": results, "steal": steal_plain(meter.read())}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    for name, row in results.items():
        for problem in row["problems"][:20]:
            print(f"{name}: {problem[:500]}", file=sys.stderr)
    return 1 if any(row["problems"] for row in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
