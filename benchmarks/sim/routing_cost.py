"""Measures the router's time per decision, with many engines and many waiting requests.

    python -m benchmarks.sim.routing_cost [--engines 8 64 1000] [--waiting 0 10000] [--json FILE]
        [--record]

A decision is an arrival and the tick after it; a report is the state after an engine's step, the
end of one of its requests, and the tick after it. Prompts have 1,024 tokens and begin with one of
24 system prompts, which most engines have. The time to hash a prompt, which grows with its length,
is part of a decision and also shown alone. The processor time of the thread counts, because other
processes run on the machine. The garbage collector runs as rarely as in the router process. With
`--record` each row is measured again with a recording under way, whose bytes are shown.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from time import process_time, thread_time

from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter
from headway.config import RecordConfig
from headway.core.events import Stepped
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.slo.forecast import EngineSpeed, Forecast
from headway.core.slo.steptime import StepCost
from headway.core.terms import Terms
from headway.percentiles import percentile_if_any
from headway.record.recording import start_recording
from headway.record.router.encoder import RouterEncoder
from headway.record.router.entries import RouterHeader
from headway.record.router.recorded import RecordedRouter
from headway.routing import RULES, EngineLimits, Router
from headway.routing.requests import RoutedRequest
from headway.routing.router import AllEngines
from headway.server import collect_rarely

NUM_PROMPT = 1024
NUM_SYSTEMS = 24
NUM_TENANTS = 100
COST = StepCost(num_steps=100)
STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of each kind of call."""

    engines: int
    waiting: int
    arrive_p50_us: float
    arrive_p99_us: float
    report_p50_us: float
    report_p99_us: float
    hash_p50_us: float
    is_recorded: bool = False
    cpu_us: float = 0.0
    """Processor time of all threads, for an arrival and a report."""
    recorded_bytes: float = 0.0
    """Bytes recorded per request: its arrival, its sending and, of some, a report."""


class Rig:
    """A router whose engines are full, with as many waiting requests as asked for."""

    def __init__(self, num_engines: int, num_waiting: int, router: Router) -> None:
        self._draw = random.Random(0)
        self.router = router
        self.now = 0.0
        self.sent: dict[str, list[str]] = {}
        self.num_requests = 0
        for number in range(num_engines):
            limits = EngineLimits(2000, 16, 64)
            self.router.engine_joined(f"e{number}", limits, COST)
            self.sent[f"e{number}"] = []
        # Three requests for each engine, so that engines have work of ours.
        while self.router.num_waiting < num_waiting or self.num_requests < 3 * num_engines:
            self.arrive()

    def make(self) -> Request:
        self.num_requests += 1
        system = self._draw.randrange(NUM_SYSTEMS)
        own = [1000 + byte for byte in self._draw.randbytes(NUM_PROMPT // 2)]
        return Request(
            id=f"r{self.num_requests}",
            token_ids=[system] * (NUM_PROMPT // 2) + own,
            params=SamplingParams(max_tokens=128),
            seed=0,
            arrived_at=self.now,
            terms=Terms(tenant=f"t{self._draw.randrange(NUM_TENANTS)}", cache_group="all"),
        )

    def arrive(self) -> float:
        """Have a request arrive; return the seconds of the decision."""
        request = self.make()
        began = thread_time()
        self.router.arrive(request, self.now)
        sendings = self.router.tick(self.now)
        took_s = thread_time() - began
        self._note(sendings)
        self.now += 0.0001
        return took_s

    def report(self) -> float:
        """Have an engine end a step and a request; return the seconds that it takes."""
        name = self._draw.choice([name for name, ids in self.sent.items() if ids])
        ended = self.sent[name].pop(0)
        num_left = len(self.sent[name])
        forecast = Forecast(EngineSpeed(COST, STEP_S, 0.15))
        stepped = Stepped(
            0, self.now, STEP_S, 512, 512, 1, 64, num_left + 1, 0, 1000, 2000, 0.0, forecast
        )
        began = thread_time()
        self.router.observe(name, stepped, self.now)
        self.router.first_token(ended)
        self.router.finished(ended, [7] * 64)
        sendings = self.router.tick(self.now)
        took_s = thread_time() - began
        self._note(sendings)
        return took_s

    def _note(self, sendings) -> None:
        for sending in sendings:
            self.sent[sending.engine].append(sending.request.id)

    def hash(self) -> float:
        one = RoutedRequest(self.make(), 0.0)
        began = thread_time()
        one.hashes(16)
        return thread_time() - began


def measure(num_engines: int, num_waiting: int, num_rounds: int) -> Row:
    """Time arrivals and reports in turn, so that the number of waiting requests stays."""
    return _measure(Rig(num_engines, num_waiting, Router()), num_engines, num_waiting, num_rounds)


def measure_recorded(num_engines: int, num_waiting: int, num_rounds: int) -> Row:
    """Do the same with a router that is recorded."""
    header = RouterHeader(recording="cost", headway="", platform="", rule="ttft")
    with tempfile.TemporaryDirectory() as folder:
        recording = start_recording(RecordConfig(record=folder), header, RouterEncoder(b"key"))
        if recording is None:
            raise OSError(f"{folder} cannot be written")
        router = RecordedRouter(RULES["ttft"](), AllEngines())
        router.record(recording)
        rig = Rig(num_engines, num_waiting, router)
        row = _measure(rig, num_engines, num_waiting, num_rounds)
        if not recording.is_open:
            raise RuntimeError("the recording has ended; the log says why")
        recording.close()
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    return replace(row, is_recorded=True, recorded_bytes=num_bytes / rig.num_requests)


def _measure(rig: Rig, num_engines: int, num_waiting: int, num_rounds: int) -> Row:
    gc.collect()
    arrivals: list[float] = []
    reports: list[float] = []
    began = process_time()
    for _ in range(num_rounds):
        arrivals.append(1e6 * rig.arrive())
        reports.append(1e6 * rig.report())
    cpu_us = 1e6 * (process_time() - began) / num_rounds
    hashes = [1e6 * rig.hash() for _ in range(200)]
    rig.router.check()
    return Row(
        num_engines,
        num_waiting,
        percentile_if_any(arrivals, 50) or 0.0,
        percentile_if_any(arrivals, 99) or 0.0,
        percentile_if_any(reports, 50) or 0.0,
        percentile_if_any(reports, 99) or 0.0,
        percentile_if_any(hashes, 50) or 0.0,
        cpu_us=cpu_us,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 1000])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--record", action="store_true", help="also with a recording")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    collect_rarely()
    meter = StealMeter()
    rows: list[Row] = []
    print(
        "| engines | waiting | arrival p50 / p99 us | report p50 / p99 us | hashing us "
        "| CPU time of both, all threads | recorded |"
    )
    print("|---|---|---|---|---|---|---|")
    measures = [measure, measure_recorded] if args.record else [measure]
    for num_engines, num_waiting, function in product(args.engines, args.waiting, measures):
        print(f"{num_engines} engines, {num_waiting} waiting", file=sys.stderr)
        row = function(num_engines, num_waiting, args.rounds)
        rows.append(row)
        recorded = f"{row.recorded_bytes:.0f} bytes a request" if row.is_recorded else ""
        print(
            f"| {row.engines} | {row.waiting} "
            f"| {row.arrive_p50_us:.0f} / {row.arrive_p99_us:.0f} "
            f"| {row.report_p50_us:.0f} / {row.report_p99_us:.0f} | {row.hash_p50_us:.0f} "
            f"| {row.cpu_us:.0f} us | {recorded} |"
        )
    write_record({"rows": [asdict(row) for row in rows]}, meter, args.json)


if __name__ == "__main__":
    main()
