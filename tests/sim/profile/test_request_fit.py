"""Step times fitted to latencies of requests: they are found, and nothing else is looked at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.sim.others_runs import errors_of, read_run, start_of
from benchmarks.sim.request_fit import (
    Arrival,
    Costs,
    ServingRun,
    fit_requests,
    simulate_run,
)
from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.slo.steptime import StepShape
from headway.sim.fleet import EngineSpec
from headway.sim.profile.machine import StepFit

TRUE = Costs(StepFit((1, 64, 512), (0.010, 0.014, 0.060, 0.0, 2e-7, 2e-8)), 0.015)
START = Costs(StepFit((1, 64, 512), (0.017, 0.010, 0.090, 0.0, 1e-7, 3e-8)), 0.005)
SPEC = EngineSpec(
    SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=512, mode="fixed"),
    Capacity(num_blocks=2000, block_size=16, max_model_len=4096),
)


def make_run(num_engines: int = 1) -> ServingRun:
    rng = Random(3)
    at, arrivals = 0.0, list[Arrival]()
    for _ in range(60):
        at += rng.expovariate(14.0)
        arrivals.append(Arrival(at, rng.randrange(40, 900), rng.randrange(15, 50)))
    return ServingRun(tuple(arrivals), SPEC, num_engines)


def test_a_fit_to_half_of_the_requests_predicts_the_others():
    run = make_run()
    measured = simulate_run(run, TRUE).latencies()
    before = errors_of(simulate_run(run, START).latencies(), measured, range(30, 60))
    assert max(abs(error) for _, error in before) > 0.2
    found = fit_requests(run, measured, range(30), START, num_rounds=10)
    after = errors_of(simulate_run(run, found.costs).latencies(), measured, range(30, 60))
    assert max(abs(error) for _, error in after) < 0.03
    shape = StepShape(8, 300, 4000, 60_000)
    assert found.costs.fit.predict(shape) == pytest.approx(TRUE.fit.predict(shape), rel=0.05)


def test_a_fit_does_not_look_at_the_requests_held_out():
    run = make_run()
    measured = simulate_run(run, TRUE).latencies()
    chosen = range(30)
    wrong = [*measured[:30], *[replace(one, ttft_s=9.0, e2e_s=99.0) for one in measured[30:]]]
    one = fit_requests(run, measured, chosen, START, num_rounds=2)
    other = fit_requests(run, wrong, chosen, START, num_rounds=2)
    assert one == other


@pytest.mark.parametrize("num_engines", [1, 2])
def test_the_time_of_a_request_is_the_sum_of_the_steps_it_saw(num_engines: int):
    run = make_run(num_engines)
    simulated = simulate_run(run, TRUE)
    rows, idle = simulated.equations(range(60))
    seconds = rows @ TRUE.values + idle
    latencies = simulated.latencies()
    assert seconds[0::2] == pytest.approx([one.ttft_s for one in latencies])
    assert seconds[1::2] == pytest.approx([one.e2e_s - one.ttft_s for one in latencies])
    assert np.all(idle > -1e-9)


def test_a_run_is_read_with_its_settings(tmp_path: Path):
    rows = [
        {
            "input_toks": 30, "output_toks": 5, "arrival_time": 1000.0 + number,
            "queued_ts": 50.002 + number, "first_token_ts": 50.1 + number,
            "last_token_ts": 50.5 + number,
        }
        for number in (1, 0)
    ]  # fmt: skip
    path = tmp_path / "vllm-X-Y.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    engine = {
        "data_parallel_size": 2, "max_num_seqs": 128, "max_num_batched_tokens": 2048,
        "max_model_len": None,
    }  # fmt: skip
    (tmp_path / "vllm-X-Y.meta.json").write_text(
        json.dumps({"engine_kwargs": engine, "kv_cache": {"num_gpu_blocks": 77, "block_size": 16}})
    )
    found = read_run(path)
    assert [one.at for one in found.run.arrivals] == [0.0, 1.0]
    first = found.latencies[0]
    assert (first.ttft_s, first.e2e_s, first.num_output) == pytest.approx((0.098, 0.498, 5))
    assert found.run.num_engines == 2
    assert found.run.spec.scheduler.max_num_seqs == 128
    assert found.run.spec.capacity.num_blocks == 77
    assert start_of(found.name).fit.predict(StepShape(1)) > 0.0
