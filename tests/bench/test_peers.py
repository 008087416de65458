"""The comparison with other engines: what a run must be, and what the report says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import report, results
from benchmarks.peers.contenders import parse_variant
from benchmarks.peers.results import Result, groups
from benchmarks.peers.runner import SAMPLINGS, Item, Runs, Sampling, Stream
from headway.bench.steal import Steal, steal_plain
from tests.conftest import ROOT

ITEMS = [Item([1, 2], 3), Item([4], 3)]


class FakeBackend:
    """Makes tokens from the seed, or the same tokens whatever the seed."""

    def __init__(self, is_sampling: bool = True, num_missing: int = 0) -> None:
        self._is_sampling = is_sampling
        self._num_missing = num_missing

    def details(self) -> dict[str, Any]:
        return {"precision": "fp64"}

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        pass

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        seed = sampling.seed if self._is_sampling and not sampling.is_greedy else 0
        return [Stream([seed] * (item.num_output - self._num_missing), 1.0, 2.0) for item in items]


def measure(backend: FakeBackend, sampling: str) -> dict[str, Any]:
    runs = Runs(backend)
    runs.prepare("smoke", sampling, ITEMS, is_warmed_up=True)
    return runs.measure("smoke", sampling, ITEMS)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_run_has_figures(sampling: str):
    assert measure(FakeBackend(), sampling)["num_output_tokens"] == 6


def test_an_engine_that_ignores_the_sampling_fails():
    with pytest.raises(RuntimeError, match="it does not sample"):
        measure(FakeBackend(is_sampling=False), "sampled")
    measure(FakeBackend(is_sampling=False), "greedy")


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_lengths_are_forced(sampling: str):
    with pytest.raises(RuntimeError, match="2 tokens instead of 3"):
        measure(FakeBackend(num_missing=1), sampling)


def test_no_two_runs_share_a_seed():
    seeds = [Sampling(0.8, 0.95, seed).seed_of(index) for seed in (1, 2) for index in range(64)]
    assert len(set(seeds)) == 128


def result(contender: str, sampling: str, tokens_per_s: float, steal: float) -> Result:
    figures = {
        "output_tokens_per_s": tokens_per_s,
        "first_token_ids": [1, 2],
        "steal": steal_plain(Steal.of(steal)),
        "details": {"precision": f"{contender} bits"},
    }
    return Result(1, "mixed-64", contender, figures, None, "now", sampling)


RESULTS = [
    result("headway", "greedy", 500.0, 0.01),
    result("other", "greedy", 250.0, 0.051),
    result("headway", "sampled", 400.0, 0.0),
    result("other", "sampled", 100.0, 0.0),
]


def test_speeds_compare_runs_of_the_same_sampling():
    speeds = {
        (row["sampling"], row["contender"]): row["speed"]
        for row in report.as_plain(RESULTS)
        if row["metric"] == "output_tokens_per_s"
    }
    assert speeds["greedy", "other"] == 0.5
    assert speeds["sampled", "other"] == 0.25


def test_the_report_states_precision_and_marks_steal():
    text = report.as_text(RESULTS)
    assert "mixed-64, sampled: output tokens/s" in text
    assert "other bits" in text
    assert "mixed-64, greedy, other, round 1: steal 5.1 %: repeat it" in text
    assert text.count("repeat it") == 1
    assert text.count("first tokens equal") == 1


def test_lines_without_sampling_and_steal_are_greedy(tmp_path: Path):
    file = tmp_path / "old.jsonl"
    file.write_text(
        '{"round": 1, "workload": "single", "contender": "headway", "figures": {"tpot_ms": 8.0}, '
        '"reason": null, "started": "then"}\n'
    )
    [group] = groups(results.read(file))
    assert group.title == "single, greedy"
    [row] = results.rows(group, results.metrics_of("single")[0])
    assert (row.steal, row.precision) == (None, None)


def test_headway_runs_from_this_checkout():
    variables = dict(parse_variant("dtype=bf16").variables)
    assert variables == {"HEADWAY_DTYPE": "bf16", "PYTHONPATH": str(ROOT / "src")}
