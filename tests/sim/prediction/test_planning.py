"""Plans and verdicts: the rate that is carried, the engines that are needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise, takewhile
from math import ceil
from random import Random
from statistics import fmean, stdev

import pytest

from headway.errors import ConfigError
from headway.sim.prediction import planning, verdict
from headway.sim.prediction.figures import Figures, Interval, Prediction, Runs, predict, summarize
from headway.sim.prediction.planning import (
    CarriedRate,
    Goal,
    Study,
    carried_rate,
    engines_needed,
)
from headway.sim.prediction.served import ServedLoad, ServedRequest
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.settings import parse_term_changes
from headway.sim.prediction.setup import Setup
from headway.sim.prediction.verdict import Regime, judge, regime_of, saturated_rate
from headway.workload import (
    Bounds,
    ClosedLoop,
    Diurnal,
    Fixed,
    Gamma,
    Listed,
    OnOff,
    Poisson,
    Replay,
    Scale,
    Synthetic,
    Trace,
    TraceRow,
    Uniform,
    WorkItem,
    Workload,
)
from tests.sim.support import load, make_profile

SETUP = Setup.of(make_profile())


def test_the_rate_that_is_carried_keeps_the_target_and_more_does_not():
    goal = Goal(95, ttft_s=0.15)
    study = Study(SETUP, load(1.0), goal, 100, Runs(3))
    carried = carried_rate(study)
    assert carried.sure <= carried.likely <= carried.saturated.middle
    assert study.ratio(carried.sure).high <= 1.0
    assert study.ratio(1.3 * carried.likely).middle > 1.0
    needed = engines_needed(study, 3 * carried.sure, carried)
    assert needed.num_engines in (3, 4)
    assert needed.ratio.high <= 1.0


@pytest.mark.parametrize(
    ("unlucky", "num_runs", "is_kept"),
    [
        ((), 57, True),
        ((3,), 57, True),
        ((3, 30, 40), 57, False),
        ((1, 2, 3), 19, False),
        ((0, 1, 2, 3, 4), 5, False),
    ],
)
def test_a_few_slow_runs_are_decided_by_more_of_them(
    monkeypatch: pytest.MonkeyPatch, unlucky: tuple[int, ...], num_runs: int, is_kept: bool
):
    def predict_seeds(_setup: Setup, _load: Workload, _limits: Limits, runs: Runs) -> Prediction:
        figures = [summarize_one(0.9 + seed / 1000 + (seed in unlucky)) for seed in runs.seeds]
        return Prediction(tuple(ServedLoad() for _ in runs.seeds), tuple(figures))

    monkeypatch.setattr(planning, "predict", predict_seeds)
    study = Study(SETUP, load(1.0), Goal(99, ttft_s=1.0), 100, Runs(19))
    found = study.predict(1.0)
    assert len(found.figures) == len(found.loads) == num_runs
    assert (found.interval(study.goal.ratio).high <= 1.0) is is_kept


def summarize_one(ttft_s: float) -> Figures:
    request = ServedRequest(None, 0.0, 10, 5, first_token_at=ttft_s, finished_at=2 * ttft_s)
    return summarize([request])


def test_a_target_that_cannot_be_kept_is_refused():
    with pytest.raises(ConfigError, match="cannot be kept"):
        carried_rate(Study(SETUP, load(1.0), Goal(99, ttft_s=0.005), 100, Runs(2)))
    with pytest.raises(ConfigError, match="a target is needed"):
        Goal(99)


def test_a_load_is_judged_by_what_can_be_served():
    most = saturated_rate(SETUP, load(1.0), Runs(3))
    assert regime_of(0.5 * most.low, most) is Regime.STABLE
    assert regime_of(0.9 * most.low, most) is Regime.NEAR_THE_KNEE
    assert regime_of(1.1 * most.high, most) is Regime.OVERLOADED
    closed = Synthetic(ClosedLoop(2), Uniform(20, 60), Uniform(5, 15))
    runs = Runs(2)
    assert judge(SETUP, closed, predict(SETUP, closed, Limits(30), runs), runs) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("b.ttft_s=0.03", "because their targets cannot be met"),
        ("b.max_kv_share=0.005", "because they are larger than the KV cache or the KV quota"),
    ],
)
@pytest.mark.parametrize("concurrency", [None, 10])
def test_a_load_with_refused_requests_is_said_to_be_and_why(
    change: str, words: str, concurrency: int | None
):
    items = tuple(
        WorkItem(tuple(range(100 + number, 140 + number)), 10, 0.01 * number, "ab"[number % 2])
        for number in range(60)
    )
    setup = replace(SETUP, term_changes=parse_term_changes([change]))
    load, runs = Listed(items, concurrency), Runs(2)
    found = predict(setup, load, Limits(60), runs)
    share = 100 * found.figures[0].num_refused / 60
    assert 0 < share <= 50
    judged = judge(setup, load, found, runs)
    assert judged is not None and judged.regime is Regime.REFUSING
    assert judged.text.startswith("refusing: ")
    assert f" of the requests are refused, {words}" in judged.text


def test_requests_faster_than_can_be_served_wait_ever_longer():
    most = saturated_rate(SETUP, load(1.0), Runs(3)).middle
    over = serve_load(SETUP, load(2 * most), Limits(400)).requests
    waits = [one.ttft_s or 0.0 for one in over]
    assert sum(waits[300:]) > 3 * sum(waits[:100])


def ramp(num_requests: int = 1200) -> Trace:
    """Return a trace whose last tenth comes ten times as fast, with requests of one size."""
    num_slow = num_requests * 9 // 10
    times = [1.0 * number for number in range(num_slow)]
    times += [times[-1] + 0.1 * (number + 1) for number in range(num_requests - num_slow)]
    return Trace(tuple(TraceRow(at, 40, 10) for at in times))


def test_a_load_that_varies_is_planned_by_its_busiest_stretch():
    days = Synthetic(Diurnal(10.0, 1.0), Uniform(20, 60), Uniform(5, 15))
    assert days.busiest(600.0).arrivals == Poisson(10.0)
    short = replace(days, arrivals=Diurnal(10.0, 1.0, 60.0))
    assert short.busiest(600.0) == short
    for on, found in ((3600.0, Poisson(8.0)), (60.0, OnOff(8.0, 60.0, 60.0))):
        bursts = replace(days, arrivals=OnOff(8.0, on, on))
        assert bursts.busiest(600.0).arrivals == found
    assert load(3.0).busiest(600.0) == load(3.0)
    busiest = Replay(ramp()).busiest(10.0)
    assert busiest.mean_rate == pytest.approx(10.0, rel=0.02)
    assert Replay(ramp()).mean_rate < 1.2
    # Twice as fast, ten seconds are twenty of the trace.
    assert Replay(ramp()).with_rate(2 * Replay(ramp()).mean_rate).busiest(6.0).mean_rate > 19.0


def test_the_busiest_stretch_of_a_trace_counts_its_silence_and_the_tokens_that_are_sent():
    batch = [TraceRow(0.01 * number, 40, 10) for number in range(50)]
    hourly = Trace((*batch, TraceRow(3600.0, 40, 10)))
    busiest = Replay(hourly).busiest(600.0)
    assert busiest.mean_rate == pytest.approx(50 / 600)
    times = [item.at for item in islice(busiest.items(0), 51)]
    assert times[49] < 1.0 and times[50] == pytest.approx(600.0)  # again and again
    once = Replay(Trace((TraceRow(0.0, 40, 10), TraceRow(900.0, 40, 10)))).busiest(600.0)
    assert once.mean_rate == pytest.approx(1 / 600)
    # A prompt that is cut later does not make its stretch the busiest.
    cut = Replay(
        Trace((TraceRow(0.0, 10**6, 1), *(replace(one, at=900 + one.at) for one in batch)))
    )
    assert len(cut.busiest(60.0).trace.rows) == 1
    bounded = replace(cut, scale=Scale(prompt=Bounds(1, 100)))
    assert len(bounded.busiest(60.0).trace.rows) == 50
    coarse = Trace(tuple(TraceRow(3.0 * number, 40, 10) for number in range(20)), bucket_s=3.0)
    assert len(Replay(coarse).busiest(1.0).trace.rows) == 1


def test_runs_of_a_trace_begin_at_other_requests():
    rows = tuple(TraceRow(0.5 * number, 20 + number, 5) for number in range(40))
    study = Study(SETUP, Replay(Trace(rows)), Goal(50, ttft_s=10.0), 10, Runs(4))
    served = [one.requests for one in study.predict(2.0).loads]
    assert len({one[0].num_prompt_tokens for one in served}) == 4
    begun = Replay(Trace(rows)).begun_at(0.75).trace
    assert [row.num_prompt_tokens for row in begun.rows] == [*range(50, 60), *range(20, 50)]
    assert [row.at for row in begun.rows] == sorted(row.at for row in begun.rows)
    assert begun.mean_rate == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_part_of_a_load_keeps_its_times(share: float):
    def counts(workload: Synthetic | Replay) -> list[int]:
        """Return the requests of each half second of the first minutes."""
        found = [0] * 400
        for item in takewhile(lambda one: one.at < 200.0, workload.items(3)):
            found[int(2 * item.at)] += 1
        return found

    rows = tuple(TraceRow(5.0 * (n // 40) + 0.01 * (n % 40), 40, 10) for n in range(1600))
    trace = Replay(Trace(rows), is_endless=True)
    bursts = [n for n, number in enumerate(counts(trace)) if number]
    some = counts(trace.part(share))
    assert {n for n, number in enumerate(some) if number} <= set(bursts)
    assert sum(some) == pytest.approx(share * 1600, rel=0.15)
    assert trace.part(share).mean_rate == pytest.approx(share * trace.mean_rate)
    assert trace.part(share).with_rate(3.0).mean_rate == pytest.approx(3.0)
    shared = Replay(Trace(tuple(replace(row, hash_ids=(1,)) for row in rows))).part(share)
    assert len(list(shared.items(0))) == 1600
    gamma = replace(load(1.0), arrivals=Gamma(8.0, 3.0)).part(share)
    drawn = Random(1)
    kept = [at for at in islice(Gamma(8.0, 3.0).times(Random(0)), 40_000) if drawn.random() < share]
    gaps = [late - soon for soon, late in pairwise(kept)]
    assert isinstance(gamma.arrivals, Gamma) and gamma.arrivals.rate == 8.0 * share
    assert gamma.arrivals.cv == pytest.approx(stdev(gaps) / fmean(gaps), rel=0.1)


def test_a_trace_is_judged_by_its_busiest_minutes(monkeypatch: pytest.MonkeyPatch):
    replay = Replay(ramp())
    most = saturated_rate(SETUP, replay, Runs(1)).middle
    # 0.3 of what can be served on average, ten times as much at the end.
    rate = 0.3 * most
    late = replay.with_rate(rate)
    found = predict(SETUP, late, Limits(1200), Runs(1))
    slow_s = found.loads[0].requests[1079].scheduled_at
    for stretch_s, regime in ((1200 / rate - slow_s, Regime.OVERLOADED), (1e4, Regime.STABLE)):
        monkeypatch.setattr(verdict, "STRETCH_S", stretch_s)
        found_verdict = judge(SETUP, late, found, Runs(1))
        assert found_verdict is not None and found_verdict.regime is regime
    monkeypatch.undo()
    once = Replay(Trace(tuple(TraceRow(0.0, 40, 10) for _ in range(30))))
    of_once = judge(SETUP, once, predict(SETUP, once, Limits(30), Runs(1)), Runs(1))
    assert of_once is not None
    assert of_once.text.startswith("overloaded: all requests arrive at once")
    few = Replay(Trace((TraceRow(0.0, 40, 10),)))
    assert judge(SETUP, few, predict(SETUP, few, Limits(1), Runs(1)), Runs(1)) is None


@pytest.mark.parametrize("lengths", [Fixed(10), Uniform(1, 19), Fixed(1)])
def test_the_saturated_rate_is_what_full_engines_finish(lengths: Fixed | Uniform):
    workload = Synthetic(Poisson(1.0), Uniform(20, 60), lengths)
    most = saturated_rate(SETUP, workload, Runs(1))
    # Of many requests at once, the time to the last end says the same.
    num_requests = 1000
    items = tuple(replace(item, at=0.0) for item in islice(workload.items(9), num_requests))
    served = serve_load(SETUP, Listed(items), Limits(num_requests)).requests
    long_run = num_requests / max(one.finished_at or 0.0 for one in served)
    assert most.middle == pytest.approx(long_run, rel=0.05)


def test_few_requests_have_the_saturated_rate_of_many():
    def listed(num_requests: int) -> Listed:
        prompts = (range(1000 * number, 1000 * number + 200) for number in range(num_requests))
        return Listed(tuple(WorkItem(tuple(one), 10, 0.1) for one in prompts))

    # Sent again, a request finds nothing of itself in the prefix cache.
    few, many = (saturated_rate(SETUP, listed(number), Runs(1)).middle for number in (25, 400))
    assert few == pytest.approx(many, rel=0.03)


def test_a_large_pool_is_planned_as_parts(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, float, int | None]] = []

    def note(setup: Setup, load: Synthetic, limits: Limits, _runs: Runs) -> Prediction:
        asked.append((setup.num_engines, load.arrivals.mean_rate, limits.num_requests))  # type: ignore[union-attr]
        return Prediction((ServedLoad(),), (summarize_one(0.1),))

    monkeypatch.setattr(planning, "predict", note)
    study = Study(SETUP, load(1.0), Goal(99, ttft_s=1.0), 100, Runs(1))
    study.predict(30.0, 2)
    study.predict(1000.0, 100)
    most = planning.MAX_POOLED
    assert asked == [(2, 30.0, 200), (most, 10.0 * most, 100 * most)]


@pytest.mark.parametrize(
    ("rate", "most_each"), [(40.0, 4.5), (4.0, 4.5), (1000.0, 5.9), (7.0, 2.0)]
)
def test_no_engine_more_than_needed_is_planned(
    monkeypatch: pytest.MonkeyPatch, rate: float, most_each: float
):
    def serve(setup: Setup, load: Synthetic, _limits: Limits, _runs: Runs) -> Prediction:
        each = (load.mean_rate or 0.0) / setup.num_engines
        request = ServedRequest(None, 0.0, 10, 5, each / most_each, 2.0)
        return Prediction((ServedLoad([request]),), (summarize([request]),))

    monkeypatch.setattr(planning, "predict", serve)
    study = Study(SETUP, load(1.0), Goal(99, ttft_s=1.0), 100, Runs(1))
    # One engine alone carries 4 requests/s; in a pool each has another share of what saturates it.
    carried = CarriedRate(4.0, 4.5, Interval(5.0, 5.5, 6.0), ())
    found = engines_needed(study, rate, carried)
    assert found.num_engines == max(ceil(rate / most_each), int(rate / 5.0) + 1)
    assert found.ratio.high <= 1.0 and found.tokens_per_request == 5


def test_a_target_of_the_time_per_token_is_kept_by_outputs_of_one_token():
    workload = Synthetic(Poisson(1.0), Uniform(20, 60), Fixed(1))
    study = Study(SETUP, workload, Goal(99, tpot_s=0.1), 30, Runs(1))
    assert study.ratio(1.0).high == 0.0


def test_two_seeds_have_no_run_in_common():
    first, second = Runs(57, seed=0), Runs(57, seed=1)
    assert not set(first.seeds) & set(second.seeds)
    more = replace(first, first=57, count=20)
    assert not set(first.seeds) & set(more.seeds)
    assert list(first.seeds)[:2] == [0, 1]
