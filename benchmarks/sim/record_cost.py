"""Measures what a recording costs: CPU time of the engine's thread and of all, bytes per step.

    python -m benchmarks.sim.record_cost [--steps 50] [--rounds 20] [--json FILE]

The executor sleeps for 20 ms a step, as it computes without the interpreter's lock, and returns
fixed results. Each engine is in a steady state: the running set is full and decodes, finished
requests are replaced, and prompts share prefixes. Short rounds run the engines with and without a
recording in turn, so that a slow moment of the machine affects both; the figures are the lowest of
all rounds. What only the whole process used is the time of the thread that writes, while the
executor computes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.sim.scheduler_cost import BLOCK_SIZE, PREFILL_TOKENS, STEM, fixed_result
from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter
from headway.clock import SystemClock
from headway.config import RecordConfig, SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import Event
from headway.core.executor import Capacity, Ticket
from headway.core.params import SamplingParams
from headway.core.plan import StepPlan, StepResult
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.terms import Terms
from headway.record.core import RecordedCore
from headway.record.encoder import CallEncoder
from headway.record.entries import RecordingHeader
from headway.record.recording import start_recording

RUNNING = (64, 256)
STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """Least of all rounds, per step."""

    running: int
    is_recorded: bool
    thread_us: float
    cpu_us: float
    file_bytes: float


class SleepingExecutor:
    """Sleeps for a step and returns a fixed result."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._plan = StepPlan(0, ())

    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> Ticket:
        self._plan = plan
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        del ticket
        time.sleep(STEP_S)
        return fixed_result(self._plan)

    def close(self) -> None:
        pass


class Load:
    """An engine whose running set is full; with a folder, it is recorded."""

    def __init__(self, num_running: int, folder: Path | None) -> None:
        self._rng = random.Random(0)
        self._num_running = num_running
        self._num_added = 0
        self._folder = folder
        config = SchedulerConfig(
            max_num_seqs=num_running, max_num_batched_tokens=num_running + PREFILL_TOKENS
        )
        capacity = Capacity(num_running * 32, BLOCK_SIZE, 4096)
        self._executor = SleepingExecutor(capacity)
        self._clock = SystemClock()
        self._core = self._make_core(Scheduler(config, capacity))
        for _ in range(40):
            self.step()

    def _make_core(self, scheduler: Scheduler) -> EngineCore:
        def drop(events: Sequence[Event]) -> None:
            del events

        if self._folder is None:
            return EngineCore(scheduler, self._executor, self._clock, drop)
        header = RecordingHeader(
            recording="cost",
            headway="",
            platform="",
            model="",
            numerics="",
            scheduler=scheduler.config,
            capacity=scheduler.capacity,
            enable_prefix_caching=True,
        )
        encoder = CallEncoder(b"key", scheduler.capacity.block_size)
        recording = start_recording(RecordConfig(record=str(self._folder)), header, encoder)
        if recording is None:
            raise OSError(f"{self._folder} cannot be written")
        return RecordedCore(scheduler, self._executor, self._clock, drop, None, recording)

    def step(self) -> None:
        scheduler, rng = self._core.scheduler, self._rng
        for _ in range(self._num_running + 4 - len(scheduler.requests)):
            self._num_added += 1
            own = rng.randrange(1 << 30)
            stem = STEM if rng.random() < 0.5 else []
            tenant = str(self._num_added % 4)
            self._core.add(
                Request(
                    id=f"cmpl-{self._num_added:032d}",
                    token_ids=[*stem, *range(own, own + rng.randint(16, 240))],
                    params=SamplingParams(max_tokens=rng.randint(32, 256)),
                    seed=0,
                    arrived_at=self._clock.now(),
                    terms=Terms(tenant=tenant, cache_group=tenant),
                )
            )
        self._core.step()

    @property
    def file_bytes(self) -> int:
        files = [] if self._folder is None else self._folder.iterdir()
        return sum(file.stat().st_size for file in files)

    def measure(self, num_steps: int) -> Row:
        file_bytes = self.file_bytes
        thread_s, cpu_s = time.thread_time(), time.process_time()
        for _ in range(num_steps):
            self.step()
        thread_s, cpu_s = time.thread_time() - thread_s, time.process_time() - cpu_s
        return Row(
            self._num_running,
            self._folder is not None,
            1e6 * thread_s / num_steps,
            1e6 * cpu_s / num_steps,
            (self.file_bytes - file_bytes) / num_steps,
        )

    def close(self) -> None:
        self._core.close()


def summarize(rows: Sequence[Row]) -> Row:
    return Row(
        rows[0].running,
        rows[0].is_recorded,
        min(row.thread_us for row in rows),
        min(row.cpu_us for row in rows),
        statistics.median(row.file_bytes for row in rows),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="steps per engine and round")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    args = parser.parse_args()
    meter, results = StealMeter(), list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for running in RUNNING:
            loads = [Load(running, None), Load(running, Path(folder) / str(running))]
            rounds = [
                [load.measure(args.steps) for load in loads]
                for _ in track(range(args.rounds), f"{running} running")
            ]
            results += [summarize(rows) for rows in zip(*rounds, strict=True)]
            for load in loads:
                load.close()
    print("running  recorded  thread us/step  CPU us/step  bytes/step")
    for row in results:
        word = "yes" if row.is_recorded else "no"
        print(
            f"{row.running:7d} {word:>9} {row.thread_us:15.0f} {row.cpu_us:12.0f} "
            f"{row.file_bytes:11.0f}"
        )
    for plain, recorded in zip(results[::2], results[1::2], strict=True):
        thread, cpu = recorded.thread_us - plain.thread_us, recorded.cpu_us - plain.cpu_us
        print(
            f"{plain.running} running: {thread:+.0f} us of the engine's thread, {cpu:+.0f} us of "
            f"CPU: {thread / STEP_S / 1e6:.2%} and {cpu / STEP_S / 1e6:.2%} of a 20 ms step"
        )
    write_record({"rows": [asdict(row) for row in results]}, meter, args.json)


if __name__ == "__main__":
    main()
