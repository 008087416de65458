"""Figures against values worked out by hand."""

from __future__ import annotations

import csv
import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from headway.bench.load.plot import draw_run, draw_sweep
from headway.bench.load.records import LoadRecord, Outcome, spread_tokens
from headway.bench.load.report import summary_dict, write_csv, write_json
from headway.bench.load.stats import (
    LoadSummary,
    LoadTargets,
    by_tenant,
    parse_targets,
    percentiles,
    summarize_load,
)
from headway.bench.load.sweep import Knee, SweepPoint, find_knee, run_sweep
from headway.bench.load.text import cpu_warning, knee_line, lines_of
from headway.errors import ConfigError


def answered(index: int, at: float, chunks: list[tuple[float, int]], end: float) -> LoadRecord:
    return LoadRecord(
        index=index,
        tenant="ab"[index % 2],
        scheduled_at=at,
        num_prompt_tokens=10,
        sent_at=at + 0.01,
        chunk_times=[time for time, _ in chunks],
        chunk_tokens=[num for _, num in chunks],
        ended_at=end,
        status=200,
        has_usage=True,
    )


def refused(index: int, at: float, status: int, retry_after: str | None) -> LoadRecord:
    record = answered(index, at, [], at + 0.02)
    record.status, record.retry_after, record.error = status, retry_after, f"HTTP {status}: full"
    return record


RECORDS = [
    # TTFT 1, TPOT 4 / 4 = 1, E2E 5.5, gaps 1 and 3
    answered(0, 0.0, [(1.0, 1), (2.0, 2), (5.0, 2)], 5.5),
    # TTFT 3, one token: no TPOT, E2E 3
    answered(1, 1.0, [(4.0, 1)], 4.0),
    # TTFT 2, TPOT 0.5, E2E 3, gap 1
    answered(2, 2.0, [(4.0, 1), (5.0, 2)], 5.0),
    refused(3, 3.0, 503, "1"),
    refused(4, 3.0, 429, None),
    replace(answered(5, 4.0, [(4.5, 1)], 10.0), status=200, error="timeout"),
    LoadRecord(6, "a", 9.0, 10, sent_at=9.0, chunk_times=[9.5], chunk_tokens=[1]),
]


def test_the_figures_of_a_run():
    summary = summarize_load(RECORDS)
    assert summary.outcomes == {"completed": 3, "refused": 2, "failed": 1, "unfinished": 1}
    assert summary.elapsed_s == 10.0
    assert summary.requests_per_s == pytest.approx(0.3)
    assert summary.num_output_tokens == 5 + 1 + 3
    assert summary.output_tokens_per_s == pytest.approx(0.9)
    assert summary.ttft_s == pytest.approx({50: 2.0, 95: 2.9, 99: 2.98})
    assert summary.tpot_s == pytest.approx({50: 0.75, 95: 0.975, 99: 0.995})
    assert summary.itl_s == pytest.approx({50: 1.0, 95: 2.8, 99: 2.96})
    assert summary.e2e_s == pytest.approx({50: 3.0, 95: 5.25, 99: 5.45})
    assert summary.lateness_s[50] == pytest.approx(0.01)
    assert summary.refusal_s[99] == pytest.approx(0.02)
    assert summary.refusals == {429: 1, 503: 1}
    assert summary.retry_after_share == 0.5
    assert summary.errors == {"timeout": 1}
    assert summary.unserved_share == 0.5
    assert summary.goodput is None


@pytest.mark.parametrize(
    ("text", "num_good"),
    [
        ("ttft=2.5", 2),
        ("ttft=2.0", 2),
        ("ttft=0.5", 0),
        ("tpot=0.6", 2),
        ("e2e=3", 2),
        ("ttft=2.5,tpot=0.6,e2e=10", 1),
        ("ttft=10,tpot=10,e2e=10", 3),
    ],
)
def test_goodput_is_the_share_of_all_that_ended(text: str, num_good: int):
    goodput = summarize_load(RECORDS, parse_targets(text)).goodput
    assert goodput is not None
    assert astuple(goodput) == pytest.approx((num_good / 6, num_good / 10))


def test_an_answer_without_a_token_has_missed_its_first():
    nothing = answered(0, 0.0, [], 1.0)
    for text, is_good in (("ttft=10", False), ("tpot=10", True), ("e2e=10", True)):
        assert parse_targets(text).are_met_by(nothing) == is_good


def test_targets_are_checked():
    assert parse_targets("ttft=2.0,tpot=0.2,e2e=30") == LoadTargets(2.0, 0.2, 30.0)
    for text in ("", "ttft", "ttft=x", "ttft=0", "itl=3", "2"):
        with pytest.raises(ConfigError, match="ttft=SECONDS"):
            parse_targets(text)


def test_a_run_of_nothing_has_no_figures():
    summary = summarize_load([], LoadTargets(1.0))
    assert (summary.num_requests, summary.elapsed_s, summary.requests_per_s) == (0, 0.0, 0.0)
    assert summary.ttft_s == {}
    assert summary.retry_after_share is None
    assert lines_of(summary, 0.0)[0] == "0 requests in 0.0 s: none sent"


def test_percentiles_lie_between_the_ranks():
    assert percentiles([4.0, None, 1.0, 3.0, 2.0]) == pytest.approx({50: 2.5, 95: 3.85, 99: 3.97})
    assert percentiles([None]) == {}


def test_each_tenant_has_its_own_figures():
    tenants = by_tenant(RECORDS)
    assert {name: one.num_requests for name, one in tenants.items()} == {"a": 4, "b": 3}
    assert tenants["b"].refusals == {503: 1}


def test_shares_of_the_prefix_cache():
    some = [replace(RECORDS[0], num_cached_tokens=5), replace(RECORDS[1], num_cached_tokens=0)]
    assert summarize_load([*some, RECORDS[2]]).cached_share == 0.25
    assert summarize_load(RECORDS).cached_share is None


@pytest.mark.parametrize(
    ("total", "weights", "given"),
    [(6, [1, 1, 1], [2, 2, 2]), (10, [2, 8, 10], [1, 4, 5]), (3, [0, 0], [3, 0]), (3, [], [])],
)
def test_tokens_are_divided_by_weight(total: int, weights: list[int], given: list[int]):
    assert spread_tokens(total, weights) == given


def test_no_token_is_lost_by_rounding():
    for total in range(20):
        assert sum(spread_tokens(total, [3, 1, 7, 2])) == total


def point(rate: float, tokens_per_s: float, p95: float, num_refused: int = 0) -> SweepPoint:
    summary = summarize_load([])
    latencies = {50: p95 / 2, 95: p95, 99: p95 * 2}
    outcomes = {**summary.outcomes, "completed": 100 - num_refused, "refused": num_refused}
    made: LoadSummary = replace(
        summary, output_tokens_per_s=tokens_per_s, ttft_s=latencies, outcomes=outcomes
    )
    return SweepPoint(rate, made, 0.1)


CURVES = {
    "latency": [point(1, 10, 0.1), point(2, 20, 0.15), point(4, 38, 0.9), point(8, 40, 9)],
    "throughput": [point(1, 10, 0.1), point(2, 20, 0.15), point(4, 22, 0.2)],
    "refusals": [point(1, 10, 0.1), point(2, 20, 0.1), point(4, 40, 0.1, num_refused=2)],
    "none": [point(1, 10, 0.001), point(2, 20, 0.05), point(4, 40, 0.09)],
    "at once": [point(1, 10, 0.1, num_refused=50)],
}


@pytest.mark.parametrize(
    ("name", "rate", "why"),
    [
        ("latency", 2, "p95 TTFT 0.90 s, above 0.30 s"),
        ("throughput", 2, r"+10% output tokens/s for +100% requests/s"),
        ("refusals", 2, "2% refused or failed"),
        ("none", 4, None),
        ("at once", None, "50% refused or failed"),
    ],
)
def test_the_knee_comes_before_the_first_saturated_rate(
    name: str, rate: float | None, why: str | None
):
    assert find_knee(CURVES[name]) == Knee(rate, why)
    assert (why or "no rate was saturated") in knee_line(Knee(rate, why))


def test_a_run_shorter_than_its_answers_says_nothing_of_throughput():
    first, second, last = CURVES["throughput"]
    first = replace(first, summary=replace(first.summary, e2e_s={95: 10.0}))
    for elapsed_s, is_found in ((29.0, False), (30.0, True)):
        second = replace(second, summary=replace(second.summary, elapsed_s=60.0))
        summary = replace(last.summary, elapsed_s=elapsed_s, e2e_s={95: 60.0})
        knee = find_knee([first, second, replace(last, summary=summary)])
        assert (knee.why is not None) == is_found


def test_a_target_takes_the_place_of_the_lowest_rate():
    assert find_knee(CURVES["latency"], 1.0) == Knee(4, "p95 TTFT 9.00 s, above 1.00 s")


async def test_an_automatic_sweep_doubles_until_saturated():
    curve = {one.rate: one for one in CURVES["latency"]}
    points: list[SweepPoint] = []

    async def measure(rate: float) -> SweepPoint:
        return curve[rate]

    await run_sweep(measure, None, 1.0, points)
    assert [one.rate for one in points] == [1, 2, 4]
    points.clear()
    await run_sweep(measure, (1, 8), 1.0, points)
    assert [one.rate for one in points] == [1, 8]


def test_a_client_at_its_limit_says_so():
    assert cpu_warning(0.8) is None
    assert "81% of a core" in (cpu_warning(0.81) or "")


def test_files(tmp_path: Path):
    write_json(tmp_path / "a.json", {"summary": summary_dict(summarize_load(RECORDS))})
    summary = json.loads((tmp_path / "a.json").read_text())["summary"]
    assert summary["ttft_s"]["p50"] == 2.0
    write_csv(tmp_path / "a.csv", [(None, RECORDS), (2.0, RECORDS[:1])])
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(RECORDS) + 1
    assert rows[0]["chunk_times"] == "1.0 2.0 5.0"
    assert rows[0]["chunk_tokens"] == "1 2 2"
    assert [rows[i]["outcome"] for i in (0, 3, 5, 6)] == [
        Outcome.COMPLETED, Outcome.REFUSED, Outcome.FAILED, Outcome.UNFINISHED,
    ]  # fmt: skip
    assert (rows[-1]["rate"], rows[-1]["ttft_s"]) == ("2.0", "1.0")
    for path in (tmp_path, tmp_path / "missing" / "a"):
        with pytest.raises(ConfigError, match="cannot write"):
            write_json(path, {})
        with pytest.raises(ConfigError, match="cannot write"):
            write_csv(path, [])


def test_pictures(tmp_path: Path):
    draw_run(tmp_path / "run.png", "a run", RECORDS)
    draw_run(tmp_path / "nothing.png", "nothing", [])
    draw_sweep(tmp_path / "sweep.png", "a sweep", CURVES["latency"], Knee(2, "so"))
    for name in ("run", "nothing", "sweep"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
