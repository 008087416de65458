"""The long properties.

python -m tests.properties.slow [--examples N] [--steps N] [--walk N] [--isolation N]
"""

from __future__ import annotations

import argparse
import sys
import time

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.properties.isolation import draw_scenario, judge_scenario
from tests.properties.machine import EngineMachine
from tests.properties.walk import walk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000, help="state machine runs")
    parser.add_argument("--steps", type=int, default=100, help="actions in each run")
    parser.add_argument("--walk", type=int, default=1_000_000, help="steps of the random walk")
    parser.add_argument("--isolation", type=int, default=500, help="isolation scenarios")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random walk")
    args = parser.parse_args()
    if args.examples:
        run_machine(args.examples, args.steps)
    if args.walk:
        run_walk(args.walk, args.seed)
    return run_isolation(args.isolation) if args.isolation else 0


def run_machine(num_examples: int, num_steps: int) -> None:
    started_at = time.monotonic()
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    elapsed_s = time.monotonic() - started_at
    print(f"machine: examples={num_examples} steps={num_steps} in {elapsed_s:.0f} s", flush=True)


def run_walk(num_steps: int, seed: int) -> None:
    started_at = time.monotonic()
    tally = walk(num_steps, seed, progress_s=15.0)
    elapsed_s = time.monotonic() - started_at
    print(f"walk: {tally.summary()} in {elapsed_s:.0f} s, no violation", flush=True)


def run_isolation(num_scenarios: int) -> int:
    """Judge the scenarios; 1 if any of them breaks isolation."""
    started_at, worst, broken = time.monotonic(), 0.0, list[int]()
    for seed in range(num_scenarios):
        verdict = judge_scenario(draw_scenario(seed))
        worst = max(worst, verdict.worst_ratio)
        if verdict.worst_ratio > 1.0 or verdict.wrongly_refused:
            broken.append(seed)
            print(f"isolation: seed={seed} {verdict}", flush=True)
    elapsed_s = time.monotonic() - started_at
    print(
        f"isolation: scenarios={num_scenarios} broken={len(broken)} worst={worst:.3f} of the bound "
        f"in {elapsed_s:.0f} s",
        flush=True,
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
