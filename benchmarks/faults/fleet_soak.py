"""Runs an hour of everything on a fleet: faults, clients that leave, bad inputs.

    python -m benchmarks.faults.fleet_soak [MODEL] [--faults NAME ...] [--minutes 60]
        [--streams 16] [--fault-every 20] [--seed 6] [--json FILE]

The fleet of `fleet_faults`: three engines behind relays and two frontends. Clients stream one
request after another, at either frontend; one in ten leaves at a random time. Every few seconds a
request is sent that must be refused, and every `--fault-every` seconds a fault happens, of every
kind in turn. One of them kills the first frontend, whose clients send their requests again.

Every stream that is read to its end must equal an undisturbed one, without an error, and the ledger
must have it with as many tokens. A row of a frontend that was killed before it wrote the row may be
missing; how many are is shown. At the end no request may run and no block may be in use. The memory
of the second frontend, which is never killed, fitted with a straight line after the first third,
may grow by 1 MiB in ten minutes, and it may have no more descriptors than at the start.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.fleet_faults import BOTH, FAULTS, Rig, kill_host, make_requests
from benchmarks.faults.soak import MAX_SLOPE_MIB, refused_cases, send_refused
from benchmarks.support.fleet_loads import client_of, read_counts, run_undisturbed
from benchmarks.support.history import History, problems, record
from benchmarks.support.ledgers import read_ledger
from benchmarks.support.proc_stats import MIB, slope_per_s, usage_of
from benchmarks.support.servers import RunningServer
from headway.percentiles import percentile

LEAVE_SHARE = 0.1
MAX_STAY_S = 3.0
BAD_EVERY_S, SAMPLE_EVERY_S = 5.0, 10.0
LEDGER_S = 5.0
"""Rows that a frontend may not have written when it is killed are this young."""
MAX_NEW_DESCRIPTORS = 8
NUM_SHOWN = 20


@dataclass(slots=True)
class Findings:
    """Results so far."""

    num_same: int = 0
    num_left: int = 0
    num_sent_again: int = 0
    num_bad: int = 0
    problems: list[str] = field(default_factory=list[str])
    faults: list[str] = field(default_factory=list[str])
    gaps_s: list[float] = field(default_factory=list[float])
    """The longest gap of each stream."""
    tokens: dict[str, int | None] = field(default_factory=dict[str, int | None])
    """Tokens that a client got, by request."""
    unsure: set[str] = field(default_factory=set[str])
    """Requests whose frontend was killed soon after their end."""
    memory: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Seconds, and MiB of the second frontend."""


class Soak:
    """Clients, bad inputs and faults on one fleet, until a time has passed."""

    def __init__(
        self, rig: Rig, requests: Sequence[dict[str, Any]], faults: Sequence[str], seed: int
    ) -> None:
        self.findings = Findings()
        self._rig = rig
        self._requests = requests
        self._faults = list(faults)
        self._references: list[History] = []
        self._seed = seed
        self._began_at = time.monotonic()
        self._is_over = False
        self._up = list(rig.servers)
        """Frontends that take requests."""
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._killed: set[str] = set()
        """URLs of frontends that were killed."""
        self._ended: list[tuple[str, str, float]] = []
        """URL of the frontend, request and time of the streams that have just ended."""

    @property
    def now(self) -> float:
        return time.monotonic() - self._began_at

    async def run(self, minutes: float, num_streams: int, fault_every_s: float) -> int:
        """Run everything; return how many descriptors the second frontend has gained."""
        rig = self._rig
        await rig.mend()
        self._references = await run_undisturbed(rig.servers[0], list(self._requests))
        pid = rig.servers[1].process.pid
        before = usage_of(pid).num_descriptors
        self._began_at = time.monotonic()
        others = [self._send_bad_inputs(), self._sample(), self._cause_faults(fault_every_s)]
        tasks = [asyncio.create_task(one) for one in others]
        clients = [asyncio.create_task(self._stream(number)) for number in range(num_streams)]
        await asyncio.wait(
            [*tasks, *clients], timeout=60 * minutes, return_when=asyncio.FIRST_EXCEPTION
        )
        self._is_over = True
        await asyncio.gather(*tasks, *clients)
        await rig.mend()
        for client in self._clients.values():
            await client.aclose()
        for server in rig.servers:
            await read_counts(server)  # raises if something is left
        await self._check_ledger()
        return usage_of(pid).num_descriptors - before

    async def _stream(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/{number}")
        while not self._is_over:
            at, server = draw.randrange(len(self._requests)), draw.choice(self._up)
            if draw.random() < LEAVE_SHARE:
                await self._leave(server, self._requests[at], draw.uniform(0.0, MAX_STAY_S))
            else:
                await self._read(server, at)

    async def _leave(self, server: RunningServer, body: dict[str, Any], after_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(record(self._client_of(server), body), after_s)
        self.findings.num_left += 1

    async def _read(self, server: RunningServer, at: int) -> None:
        """Read a stream to its end, a second time if its frontend was killed; compare it."""
        findings = self.findings
        history = await record(self._client_of(server), self._requests[at])
        if history.errors and server.url in self._killed:
            findings.num_sent_again += 1
            server = self._rig.servers[1]
            history = await record(self._client_of(server), self._requests[at])
        found = problems(history, self._references[at])
        findings.problems += [f"{self.now:.0f} s: {one}" for one in found]
        if found:
            await asyncio.sleep(0.1)
            return
        findings.num_same += 1
        findings.gaps_s.append(history.longest_gap_s(0.0))
        findings.tokens[history.request_id] = history.num_tokens
        if server.url in self._killed:
            findings.unsure.add(history.request_id)
        else:
            self._ended.append((server.url, history.request_id, self.now))

    def _client_of(self, server: RunningServer) -> httpx.AsyncClient:
        if server.url not in self._clients:
            self._clients[server.url] = client_of(server)
        return self._clients[server.url]

    async def _send_bad_inputs(self) -> None:
        for case in cycle(refused_cases(self._seed)):
            await self._pause(BAD_EVERY_S)
            if self._is_over:
                return
            found = await asyncio.to_thread(send_refused, case, self._rig.servers[1])
            self.findings.num_bad += 1
            self.findings.problems += found

    async def _cause_faults(self, every_s: float) -> None:
        rig = self._rig
        random.Random(self._seed).shuffle(self._faults)
        for name in cycle(self._faults):
            await self._pause(every_s)
            if self._is_over:
                return
            print(f"{self.now:.0f} s: {name}; {self._describe()}", file=sys.stderr, flush=True)
            self.findings.faults.append(name)
            if name == BOTH:
                await self._kill_frontend()
            else:
                await FAULTS[name](rig)
            self.findings.problems += rig.problems
            rig.problems.clear()
            await rig.mend()
            self._up = list(rig.servers)

    async def _kill_frontend(self) -> None:
        server = self._rig.servers[0]
        self._killed.add(server.url)
        self._up = self._rig.servers[1:]
        server.process.kill()
        await asyncio.to_thread(server.process.wait, 20)
        self.findings.unsure |= {
            request_id
            for url, request_id, ended_at in self._ended
            if url == server.url and self.now - ended_at < LEDGER_S
        }
        self._ended.clear()
        await kill_host(self._rig)

    async def _sample(self) -> None:
        pid = self._rig.servers[1].process.pid
        while not self._is_over:
            self.findings.memory.append((self.now, usage_of(pid).memory_bytes / MIB))
            await self._pause(SAMPLE_EVERY_S)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than the soak."""
        until = self.now + seconds
        while not self._is_over and self.now < until:
            await asyncio.sleep(min(0.2, seconds))

    async def _check_ledger(self) -> None:
        """Wait for the rows of all streams; name those that are missing or have other tokens."""
        findings = self.findings
        deadline = time.monotonic() + 30
        while True:
            rows = await asyncio.to_thread(read_ledger, self._rig.ledger)
            wrong = [
                name
                for name, num_tokens in findings.tokens.items()
                if rows.get(name, num_tokens if name in findings.unsure else None) != num_tokens
            ]
            if not wrong or time.monotonic() > deadline:
                break
            await asyncio.sleep(1.0)
        findings.problems += [
            f"ledger: {name} has {rows.get(name)} tokens, its client {findings.tokens[name]}"
            for name in wrong
        ]
        findings.unsure -= rows.keys()

    def _describe(self) -> str:
        found = self.findings
        memory = found.memory[-1][1] if found.memory else 0.0
        return (
            f"{found.num_same} streams the same, {found.num_left} left, {found.num_sent_again} "
            f"sent again, {len(found.problems)} problems, {memory:.1f} MiB"
        )


def report_of(findings: Findings, num_new_descriptors: int) -> dict[str, Any]:
    """Return the figures of a soak."""
    end = findings.memory[-1][0] if findings.memory else 0.0
    slope = slope_per_s([one for one in findings.memory if one[0] >= end / 3])
    gaps = sorted(findings.gaps_s)
    return {
        "seconds": round(end),
        "streams_same": findings.num_same,
        "tokens": sum(tokens or 0 for tokens in findings.tokens.values()),
        "left": findings.num_left,
        "sent_again": findings.num_sent_again,
        "bad_inputs": findings.num_bad,
        "faults": dict(Counter(findings.faults)),
        "rows_lost_with_a_frontend": len(findings.unsure),
        "longest_gap_p50_s": round(percentile(gaps, 50), 3) if gaps else None,
        "longest_gap_p99_s": round(percentile(gaps, 99), 3) if gaps else None,
        "frontend_mib": [
            round(one[1], 1) for one in findings.memory[:: max(1, len(findings.memory) // 20)]
        ],
        "slope_mib_per_10_min": None if slope is None else round(600 * slope, 2),
        "new_descriptors": num_new_descriptors,
        "problems": findings.problems,
    }


def failures_in(report: Mapping[str, Any]) -> list[str]:
    """Return the failures that a report shows."""
    failures = [str(one)[:500] for one in report["problems"]]
    slope = report["slope_mib_per_10_min"]
    if slope is not None and slope > MAX_SLOPE_MIB:
        failures.append(f"the second frontend grows by {slope:.2f} MiB in 10 minutes")
    if report["new_descriptors"] > MAX_NEW_DESCRIPTORS:
        failures.append(f"the second frontend has {report['new_descriptors']} more descriptors")
    if not report["streams_same"]:
        failures.append("no stream was read to its end")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    known = (*FAULTS, BOTH)
    parser.add_argument("--faults", nargs="+", choices=known, default=known)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--fault-every", type=float, default=20.0, help="seconds")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    faults = [name for name in args.faults if name != "poison" or args.model is None]
    with (
        tempfile.TemporaryDirectory() as name,
        contextlib.closing(Rig(Path(name), args.model, args.seed)) as rig,
    ):
        soak = Soak(rig, make_requests(args.model, 32), faults, args.seed)
        gained = asyncio.run(soak.run(args.minutes, args.streams, args.fault_every))
    report = report_of(soak.findings, gained)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for key, value in report.items():
        print(f"{key}: {value if key != 'problems' else len(value)}")
    failures = failures_in(report)
    for failure in failures[:NUM_SHOWN]:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
