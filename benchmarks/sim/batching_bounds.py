"""Counts the tokens that static and continuous batching compute, without a model.

    python -m benchmarks.sim.batching_bounds [WORKLOAD]

The counts depend on the workload and the limits alone, so they bound the gain of any executor.
"""

from __future__ import annotations

import sys

from headway.bench.offline.modes import Bench
from headway.bench.records import RunRecord
from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.executors.fake import FakeExecutor
from headway.workload import parse_workload

FEW_ROWS = 8


def count(run: RunRecord, num_output_tokens: int, is_static: bool) -> dict[str, int]:
    num_tokens = sum(step.num_tokens for step in run.steps)
    if is_static:  # a prefill step computes whole prompts, every other step one token a row
        prompts = sum(step.num_tokens for step in run.steps if step.num_tokens > run.max_num_seqs)
    else:
        prompts = num_tokens - (num_output_tokens - len(run.requests))
    few = sum(step.num_live_rows <= FEW_ROWS for step in run.steps)
    return {
        "steps": len(run.steps),
        "prompt tokens computed": prompts,
        "decode rows computed": num_tokens - prompts,
        f"steps that serve {FEW_ROWS} requests or fewer": few,
    }


def main() -> None:
    work = parse_workload(sys.argv[1] if len(sys.argv) > 1 else "mixed-64")
    executor = FakeExecutor(Capacity(8192, 16, 8192))
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512)
    bench = Bench(executor, config, SystemClock(), enable_prefix_caching=False)
    static = count(bench.run_static(work), work.num_output_tokens, is_static=True)
    continuous = count(bench.run_continuous(work), work.num_output_tokens, is_static=False)
    for name, ours in continuous.items():
        ratio = static[name] / ours
        print(f"{name:42s} static {static[name]:6d}  continuous {ours:6d}  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
