"""Runs an hour of mixed load with faults; checks for leaks and lost requests.

    python -m benchmarks.faults.soak MODEL [--minutes 60] [--capacity R] [--json FILE] [--plot FILE]
    python -m benchmarks.faults.soak --fake --minutes 1 --capacity 8 --fault-every 10

Open loop at 80 % of the capacity (given in requests/s, or measured first). One client in ten
disconnects at a random point, one in ten requests a whole answer, one in ten two samples. Every few
seconds a client sends a request that must be refused; every two minutes a fault hits the engine
process or the API process. With --fake the only fault is a killed engine; the others need the real
engine.

At the end every request must have had exactly one end. Its client saw it complete, refused with a
status and Retry-After, failed with an error message, or disconnected on purpose. At most as many
requests may fail as there were faults that cost one request. The server's counts must balance, as
in `disconnects`. No block, descriptor or thread may be left. The memory of the API process, fitted
with a straight line after the first ten minutes (in a shorter run, after the first third), may grow
by 1 MiB in ten minutes. Most faults replace the engine process, so the report shows the memory of
each engine process and does not judge it. Tasks of the event loop are invisible from outside the
process and are not counted; a stuck task would keep its connection open, which is counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_inputs import corpus
from benchmarks.faults.cases import Case, Target
from benchmarks.faults.disconnects import (
    ClientOutcome,
    Disconnect,
    count_ends,
    find_imbalances,
    send_request,
)
from benchmarks.faults.engine_faults import INBOX, KINDS
from benchmarks.faults.exchange import exchange, problems_of
from benchmarks.faults.injection import FOLDER_VARIABLE, inject, is_pending
from benchmarks.faults.servers import DEFAULT_MAX_BODY_BYTES
from benchmarks.live.overload import measure_capacity, workload
from benchmarks.support import proc_stats
from benchmarks.support.proc_stats import Sample, draw_samples, engines_of, slope_per_s, take_sample
from benchmarks.support.servers import RunningServer, free_port, start_process
from headway.workload import Poisson, Vocabulary, WorkItem

LOAD = 0.8
FAULTS = [kind for kind in KINDS if kind not in ("SIGSTOP", "MemoryError in the step")]
FAKE_FAULTS = ["SIGKILL"]
FAULT_TIMEOUT_S = 90.0
HUNG_S = 900.0
RESTARTS = "headway_engine_restarts_total"
SETTINGS = {"max_engine_restarts": 10_000}
MAX_SLOPE_MIB = 1.0
MAX_GROWTH_MIB = 32.0
COMPLETE, REFUSED = "complete", "refused"
DISCONNECTED, FAILED = "left on purpose", "failed with a reason"


@dataclass(frozen=True, slots=True)
class Plan:
    """Duration, load, and how often faults and bad inputs occur."""

    duration_s: float
    fault_every_s: float
    faults: Sequence[str]
    vocabulary: Vocabulary
    capacity: float | None = None
    sample_every_s: float = 10.0
    bad_every_s: float = 5.0
    seed: int = 0

    @property
    def settled_s(self) -> float:
        return min(600.0, self.duration_s / 3)


@dataclass(slots=True)
class Findings:
    """Results so far."""

    ends: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    num_samples_complete: int = 0
    num_samples_left: int = 0
    num_bad: int = 0
    bad_problems: list[str] = field(default_factory=list)
    faults: list[tuple[float, str]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


class Soak:
    """Sends load, bad inputs and faults to one server, and samples its memory."""

    def __init__(self, server: RunningServer, plan: Plan, folder: Path) -> None:
        self._server = server
        self._plan = plan
        self._folder = folder
        self._began_at = time.monotonic()
        self.findings = Findings()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began_at

    async def run(self, rate: float) -> None:
        self._began_at = time.monotonic()
        others = [self._inject_faults(), self._send_bad_inputs(), self._sample()]
        tasks = [asyncio.create_task(one) for one in others]
        try:
            await self._send(rate)
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        # A fault that no process took must not hit a later run.
        for process in ("api", "engine"):
            (self._folder / process).unlink(missing_ok=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _send(self, rate: float) -> None:
        """Send every request at its time; then wait for the last answers."""
        plan = self._plan
        async with asyncio.TaskGroup() as group:
            for number, item in enumerate(
                workload(Poisson(rate), plan.vocabulary).items(plan.seed)
            ):
                if item.at >= plan.duration_s:
                    break
                await asyncio.sleep(max(0.0, item.at - self._now))
                group.create_task(self._send_one(number, item))

    async def _send_one(self, number: int, item: WorkItem) -> None:
        body, disconnect = draw_request(number, item)
        try:
            async with asyncio.timeout(HUNG_S):
                outcome = await send_request(proc_stats.origin_of(self._server), body, disconnect)
        except TimeoutError:
            outcome = ClientOutcome(error=f"no end within {HUNG_S:.0f} s")
        findings, end = self.findings, end_of(outcome)
        if end is None:
            findings.unexplained.append(f"{self._now:.0f} s: {outcome}")
            return
        findings.ends[end] += 1
        if end in (FAILED, REFUSED):
            findings.reasons[f"{outcome.status} {message_of(outcome.error)}"] += 1
        findings.num_samples_complete += body.get("n", 1) if end == COMPLETE else 0
        findings.num_samples_left += body.get("n", 1) if end == DISCONNECTED else 0

    async def _send_bad_inputs(self) -> None:
        for case in cycle(refused_cases(self._plan.seed)):
            await asyncio.sleep(self._plan.bad_every_s)
            found = await asyncio.to_thread(send_refused, case, self._server)
            self.findings.num_bad += 1
            self.findings.bad_problems += found

    async def _inject_faults(self) -> None:
        kinds = list(self._plan.faults)
        random.Random(self._plan.seed).shuffle(kinds)
        for kind in cycle(kinds):
            await asyncio.sleep(self._plan.fault_every_s)
            self.findings.faults.append((self._now, kind))
            num_restarts = await self._num_restarts()
            if kind in INBOX:
                process, fault = INBOX[kind]
                inject(self._folder, process, fault)
                await proc_stats.until(
                    lambda process=process: not is_pending(self._folder, process), FAULT_TIMEOUT_S
                )
            elif (pid := proc_stats.engine_pid(self._server)) is not None:
                os.kill(pid, signal.Signals[kind])
            if KINDS[kind] == "replaces the engine":
                await self._until_replaced(num_restarts)
            print(f"{self._now:.0f} s: {kind}", flush=True)

    async def _until_replaced(self, num_restarts: float) -> None:
        deadline = time.monotonic() + FAULT_TIMEOUT_S
        while await self._num_restarts() <= num_restarts:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the fault had no effect:\n{self._server.log[-3000:]}")
            await asyncio.sleep(0.1)

    async def _num_restarts(self) -> float:
        return (await asyncio.to_thread(proc_stats.scrape, self._server)).total(RESTARTS)

    async def _sample(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(max(0.0, number * self._plan.sample_every_s - self._now))
            number += 1
            sample = await asyncio.to_thread(take_sample, self._server, self._now)
            self.findings.samples.append(sample)
            print(
                f"{sample.at_s:.0f} s: api {sample.api.memory_bytes / proc_stats.MIB:.1f} MiB, "
                f"{sample.api.num_descriptors} descriptors, {sample.num_running:g} running, "
                f"{sample.num_waiting:g} waiting, {sample.num_restarts:g} restarts, "
                f"{dict(self.findings.ends)}, {len(self.findings.unexplained)} unexplained",
                flush=True,
            )


def refused_cases(seed: int) -> list[Case]:
    """Return small requests that every server refuses, in a drawn order."""
    cases = [
        case
        for case in corpus()
        if not case.raw and isinstance(case.body, bytes) and len(case.body) < 50_000
        if all(isinstance(status, int) and status >= 400 for status in case.expected)
    ]
    random.Random(seed).shuffle(cases)
    return cases


def send_refused(case: Case, server: RunningServer) -> list[str]:
    """Send a request that must be refused; return what was wrong with the answer."""
    answer = exchange(case, Target("127.0.0.1", server.port, DEFAULT_MAX_BODY_BYTES))
    # A full server refuses before it reads the request.
    problems = [] if answer.outcome in (429, 503) else problems_of(case, answer)
    return [f"{case.name}: {one}" for one in problems]


def draw_request(number: int, item: WorkItem) -> tuple[dict[str, Any], Disconnect]:
    """Return the body of a client's request, and when the client disconnects."""
    draw = random.Random(number)
    body: dict[str, Any] = {"prompt": item.prompt_token_ids, "max_tokens": item.num_output_tokens}
    body |= {"ignore_eos": True, "stream": True, "temperature": 0.0}
    match draw.randrange(10):
        case 0:
            is_early = draw.random() < 0.5
            return body, Disconnect(
                after_s=draw.uniform(0.0, 5.0) if is_early else None,
                after_events=None if is_early else draw.randint(1, 60),
                is_reset=draw.random() < 0.5,
            )
        case 1:
            body["stream"] = False
        case 2:
            body |= {"n": 2, "temperature": 0.8, "seed": number}
    return body, Disconnect()


def end_of(outcome: ClientOutcome) -> str | None:
    """Return how a request ended; None for an end without an explanation."""
    if outcome.has_disconnected:
        return DISCONNECTED
    if outcome.is_complete:
        return COMPLETE
    if outcome.status in (429, 503):
        return REFUSED if outcome.retry_after else None
    return FAILED if outcome.status in (200, 500) and message_of(outcome.error) else None


def message_of(error: str) -> str:
    """Return the message of an error answer without the request id, or an empty text."""
    try:
        return json.loads(error.removeprefix("data: "))["error"]["message"].split(" (")[0]
    except (ValueError, KeyError, TypeError):
        return ""


@contextmanager
def start_faulty_server(model: Path | None, folder: Path) -> Iterator[RunningServer]:
    """Yield a server with injected faults; without a model, the fake server.

    The engine of the fake server can only be killed.
    """
    if model is None:
        with proc_stats.started(None, folder, SETTINGS, step_s=0.02) as server:
            yield server
        return
    port, admin_port = free_port(), free_port()
    settings = {"port": port, "admin_port": admin_port, **proc_stats.MODEL_SETTINGS, **SETTINGS}
    settings["ledger_url"] = f"sqlite://{folder}/ledger.db"
    os.environ[FOLDER_VARIABLE] = str(folder)
    command = [
        sys.executable,
        "-m",
        "benchmarks.faults.faulty_server",
        str(model),
        json.dumps(settings),
    ]
    server = start_process(command, port, folder / "server.log", admin_port)
    with proc_stats.ended(server):
        yield server.wait_ready()


async def run(server: RunningServer, plan: Plan, folder: Path) -> dict[str, Any]:
    target = await proc_stats.target_of(server)
    warm_up_s = 60.0 if plan.capacity is None else min(30.0, plan.duration_s / 6)
    measured = await measure_capacity(target, plan.vocabulary, warm_up_s)
    capacity = plan.capacity or measured.requests_per_s
    await proc_stats.remains_after(server, proc_stats.both_usages(server))
    usages, before = proc_stats.both_usages(server), proc_stats.scrape(server)
    print(f"capacity {capacity:.2f} requests/s, load {LOAD * capacity:.2f}", flush=True)
    soak = Soak(server, plan, folder)
    await soak.run(LOAD * capacity)
    await proc_stats.until_quiet(server)
    after = await asyncio.to_thread(proc_stats.scrape, server)
    remains = await proc_stats.remains_after(server, usages)
    findings = soak.findings
    settled = [
        (one.at_s, one.api.memory_bytes / proc_stats.MIB)
        for one in findings.samples
        if one.at_s >= plan.settled_s
    ]
    slope = slope_per_s(settled)
    reasons = "vllm:request_success_total", "finished_reason"
    counts_before = before.by_label(*reasons)
    return {
        "capacity": capacity,
        "ends": dict(findings.ends),
        "reasons": dict(findings.reasons),
        "unexplained": findings.unexplained,
        "samples_complete": findings.num_samples_complete,
        "samples_left": findings.num_samples_left,
        "bad_inputs": findings.num_bad,
        "bad_input_problems": findings.bad_problems,
        "faults": findings.faults,
        "accounts": count_ends(before, after),
        "ends_by_reason": {
            n: v - counts_before.get(n, 0.0) for n, v in after.by_label(*reasons).items()
        },
        "restarts": after.total(RESTARTS) - before.total(RESTARTS),
        "remains": remains.as_json(),
        "asyncio_tasks": "cannot be seen from outside the process",
        "slope_mib_per_10_min": None if slope is None else slope * 600,
        "engines": engines_of(findings.samples),
        "samples": [asdict(one) for one in findings.samples],
        "unsupervised": server.log.count("cannot be supervised"),
    }


def failures_in(report: Mapping[str, Any]) -> list[str]:
    """Return the failures that a report shows."""
    failures = proc_stats.leaks_in(report["remains"], MAX_GROWTH_MIB, ("api",))
    failures += find_imbalances(report["accounts"])
    if report["unexplained"]:
        failures.append(
            f"{len(report['unexplained'])} unexplained ends: {report['unexplained'][:3]}"
        )
    num_victims = sum("one request" in KINDS[kind] for _, kind in report["faults"])
    if report["ends"].get(FAILED, 0) > num_victims:
        failures.append(f"{report['ends'][FAILED]} requests failed; {num_victims} were targets")
    reasons, done = report["ends_by_reason"], report["samples_complete"]
    num_good = reasons.get("stop", 0) + reasons.get("length", 0)
    if not done <= num_good <= done + report["samples_left"]:
        failures.append(f"clients have {done} samples, the server counts {num_good:g}")
    if report["bad_input_problems"]:
        failures.append(f"bad inputs: {report['bad_input_problems'][:3]}")
    slope = report["slope_mib_per_10_min"]
    if slope is not None and slope > MAX_SLOPE_MIB:
        failures.append(f"the API process grows by {slope:.2f} MiB in 10 minutes")
    if report["unsupervised"]:
        failures.append("the engine could not be supervised")
    return failures


def table(report: Mapping[str, Any]) -> str:
    rows = {
        "requests, by how they ended for the client": report["ends"],
        "samples, by how they ended for the server": report["ends_by_reason"],
        "counts of the server": report["accounts"],
        "errors that clients received": report["reasons"],
        "faults": dict(Counter(kind for _, kind in report["faults"])),
        "restarts": report["restarts"],
        "bad inputs": report["bad_inputs"],
        "engine processes seen": len(report["engines"]),
        "API process, MiB per 10 minutes": report["slope_mib_per_10_min"],
        "API process before": report["remains"]["before"]["api"],
        "API process after": report["remains"]["after"]["api"],
    }
    return "\n".join(f"{name}: {value}" for name, value in rows.items())


def main() -> int:
    parser = proc_stats.battery_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--capacity", type=float, help="requests/s; default: measured first")
    parser.add_argument("--fault-every", type=float, default=120.0, help="seconds")
    parser.add_argument("--plot", type=Path, help="draw the picture here")
    args = proc_stats.arguments(parser)
    vocabulary = proc_stats.LETTERS if args.fake else Vocabulary()
    faults = FAKE_FAULTS if args.fake else FAULTS
    plan = Plan(args.minutes * 60, args.fault_every, faults, vocabulary, args.capacity)
    with (
        tempfile.TemporaryDirectory() as name,
        start_faulty_server(args.model, Path(name)) as server,
    ):
        report = proc_stats.run_client(run(server, plan, Path(name)))
    print(table(report))
    if args.plot:
        draw_samples(args.plot, report["samples"], report["faults"])
    return proc_stats.conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
