"""Measures the prediction error of the step-time model on a real model.

    python -m benchmarks.sim.step_times MODEL [--steps 1200] [--csv FILE]
    python -m benchmarks.sim.step_times --from FILE

Runs bursts of requests of mixed lengths through the engine core and records shape and time of every
step. Then the step-time model predicts each step from those before it. --csv writes the steps to a
file; --from reads them again without a model.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from headway.bench.steal import StealMeter, steal_text
from headway.clock import SystemClock
from headway.config import SchedulerConfig, load_config
from headway.core.engine import EngineCore
from headway.core.executor import Capacity, Executor, Ticket
from headway.core.params import SamplingParams
from headway.core.plan import StepPlan, StepResult
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.slo.steptime import StepShape, StepTimeModel, shape_of

WARM_UP = 100
Steps = list[tuple[StepShape, float]]


class RecordingExecutor:
    """Passes calls to an executor, and records shape and time of each step."""

    def __init__(self, inner: Executor) -> None:
        self.steps: Steps = []
        self._inner = inner
        self._shape = StepShape()

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def submit(self, plan: StepPlan) -> Ticket:
        self._shape = shape_of(plan)
        return self._inner.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._inner.collect(ticket)
        self.steps.append((self._shape, result.elapsed_s))
        return result

    def close(self) -> None:
        self._inner.close()


def run_model(name: str, num_steps: int, seed: int) -> Steps:
    """Run bursts of mixed size with token budgets of 128 to 1024; return the steps."""
    from headway.build import load_model

    draw = random.Random(seed)
    config = load_config({"model": name, "kv_cache_memory_bytes": "1G"})
    executor = RecordingExecutor(load_model(config).executor)
    while len(executor.steps) < num_steps:
        budget = draw.choice((128, 256, 512, 1024))
        limits = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=budget)
        scheduler = Scheduler(limits, executor.capacity(), enable_prefix_caching=False)
        core = EngineCore(scheduler, executor, SystemClock(), lambda _events: None)
        num_added, num_most = 0, draw.choice((2, 8, 24, 64, 120))
        while core.has_work or num_added < num_most:
            while num_added < num_most and draw.random() < 0.7:
                core.add(make_request(num_added, draw))
                num_added += 1
            core.step()
    return executor.steps


def make_request(number: int, draw: random.Random) -> Request:
    num_prompt = min(2000, max(8, int(draw.lognormvariate(4.8, 1.0))))
    num_output = min(60, max(2, int(draw.lognormvariate(3.0, 0.7))))
    return Request(
        id=str(number),
        token_ids=[draw.randint(100, 40_000) for _ in range(num_prompt)],
        params=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
        seed=0,
        arrived_at=0.0,
    )


def write_steps(path: Path, steps: Sequence[tuple[StepShape, float]], steal: str) -> None:
    """Write one line per step, below a comment with the steal of the run."""
    lines = [",".join([*map(str, shape), f"{1e6 * elapsed_s:.0f}"]) for shape, elapsed_s in steps]
    head = ",".join([*StepShape._fields, "elapsed_us"])
    path.write_text("\n".join([f"# {steal}", head, *lines]) + "\n")


def read_steps(path: Path) -> tuple[Steps, str]:
    """Return the steps of a file, and the steal of their run as text."""
    lines = path.read_text().splitlines()
    comments = [line.removeprefix("# ") for line in lines if line.startswith("#")]
    rows = [map(int, line.split(",")) for line in lines if line[:1].isdigit()]
    steps = [(StepShape(*shape), elapsed_us / 1e6) for *shape, elapsed_us in rows]
    return steps, comments[0] if comments else steal_text(None)


def report(steps: Steps) -> str:
    """Return the prediction errors and the fitted costs as text."""
    model, errors = StepTimeModel(), []
    for shape, elapsed_s in steps:
        errors.append(abs(model.cost.predict(shape) - elapsed_s) / elapsed_s)
        model.observe(shape, elapsed_s)
    counted = sorted(errors[WARM_UP:])
    cost = model.slow_cost
    return (
        f"{len(counted)} steps after {WARM_UP} to warm up: median error "
        f"{statistics.median(counted):.1%}, 90th percentile {counted[len(counted) * 9 // 10]:.1%}\n"
        f"a step: {1e3 * cost.constant_s:.2f} ms, + {1e6 * cost.per_decode_s:.0f} us a decode, "
        f"+ {1e6 * cost.per_prefill_token_s:.0f} us a prefill token, "
        f"+ {1e6 * cost.per_context_token_s:.2f} us a token of a decode's context, "
        f"+ {1e9 * cost.per_attended_s:.0f} ns a token attended to in prefill"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--from", dest="source", type=Path, help="read steps from this file")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="write the steps here")
    args = parser.parse_args()
    if (args.model is None) == (args.source is None):
        parser.error("either a model or --from FILE")
    if args.source is not None:
        steps, steal = read_steps(args.source)
    else:
        meter = StealMeter()
        steps = run_model(args.model, args.steps, args.seed)
        steal = steal_text(meter.read())
    if args.csv is not None:
        write_steps(args.csv, steps, steal)
    print(f"{report(steps)}\n{steal}")


if __name__ == "__main__":
    main()
