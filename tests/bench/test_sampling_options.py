"""Sampling options of `headway bench`: requests and records say them, wrong ones are refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from headway.bench.load.options import LoadOptions, as_plain, target_of
from headway.bench.offline.modes import MODES, Bench
from headway.bench.options import GREEDY, SamplingOptions
from headway.cli.bench import OfflineOptions
from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.executor import Capacity, Ticket
from headway.core.plan import NewRequest, StepPlan
from headway.errors import ConfigError
from headway.executors.fake import FakeExecutor
from headway.workload import OfflineWorkload, WorkItem
from tests.conftest import ROOT

URL = "http://127.0.0.1:1"
ITEM = WorkItem((1, 2, 3), 4)
WRONG = [
    ({"temperature": -1.0}, "--temperature: temperature must be a number between 0 and 100"),
    ({"temperature": float("nan")}, "--temperature: temperature must be a number"),
    ({"temperature": 1.0, "top_p": 0.0}, "--top-p: top_p must be greater than 0"),
    ({"temperature": 1.0, "top_p": 1.5}, "--top-p: top_p must be a number between 0 and 1"),
    ({"temperature": 1.0, "top_k": -2}, "--top-k: top_k must be"),
    ({"top_p": 0.9}, "--top-p needs --temperature above 0"),
    ({"top_k": 5}, "--top-k needs --temperature above 0"),
]


class Recording(FakeExecutor):
    """Keeps the requests it was given."""

    def __init__(self) -> None:
        super().__init__(Capacity(num_blocks=64, block_size=4, max_model_len=64))
        self.new: list[NewRequest] = []

    def submit(self, plan: StepPlan) -> Ticket:
        scheduled = [item for item in plan.scheduled if item.has_sample]
        self.new += [item.new for item in scheduled if item.new is not None]
        return super().submit(plan)


@pytest.mark.parametrize("options", [LoadOptions, OfflineOptions])
@pytest.mark.parametrize(("given", "said"), WRONG)
def test_wrong_values_are_refused(
    options: type[SamplingOptions], given: dict[str, float], said: str
):
    with pytest.raises(ConfigError, match=said):
        options(**given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed: int):
    with pytest.raises(ConfigError, match="--seed must be from 0 to 4294967295"):
        OfflineOptions(temperature=1.0, seed=seed)


def test_a_seed_without_sampling_is_refused():
    with pytest.raises(ConfigError, match="--seed needs --temperature above 0"):
        OfflineOptions(seed=1)


@pytest.mark.parametrize("command", [["serve", URL], ["offline", "missing.gguf"]])
def test_the_command_says_it_in_a_line(command: list[str]):
    result = subprocess.run(
        [sys.executable, "-m", "headway", "bench", *command, "--top-p", "0.9"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.strip().endswith("--top-p needs --temperature above 0")
    assert len(result.stderr.strip().splitlines()) == 1


def test_requests_over_http_have_the_fields():
    options = LoadOptions(temperature=0.8, top_p=0.95)
    body = msgspec.json.decode(target_of(URL, options).body(ITEM))
    assert (body["temperature"], body["top_p"], "top_k" in body) == (0.8, 0.95, False)
    assert as_plain(options)["top_p"] == 0.95
    greedy = msgspec.json.decode(target_of(URL, LoadOptions()).body(ITEM))
    assert (greedy["temperature"], "top_p" in greedy) == (0.0, False)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_samples_with_a_seed_per_request(mode: str):
    executor = Recording()
    sampling = SamplingOptions(temperature=0.8, top_p=0.95, top_k=40)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, prefill_floor=4)
    bench = Bench(executor, config, SystemClock(), False, sampling, 7)
    MODES[mode](bench, OfflineWorkload("tiny", (ITEM, ITEM)))
    assert [request.seed for request in executor.new] == [7, 8]
    for request in executor.new:
        params = request.params
        assert (params.temperature, params.top_p, params.top_k) == (0.8, 0.95, 40)
        assert params.ignore_eos


def test_the_settings_as_text():
    assert GREEDY.sampling_text() == "greedy"
    sampled = SamplingOptions(temperature=0.8, top_p=0.95)
    assert sampled.sampling_text() == "temperature 0.8, top_p 0.95"
    assert replace(sampled, top_k=40).sampling_text().endswith(", top_k 40")
