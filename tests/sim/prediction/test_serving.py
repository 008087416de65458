"""Simulated loads and plans: known times, no time of the host, no lost request."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from headway.errors import ConfigError
from headway.sim.prediction.figures import Interval, Runs, predict, summarize
from headway.sim.prediction.served import ServedLoad
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.settings import change_settings, check_tenants, parse_term_changes
from headway.sim.prediction.setup import Setup
from headway.workload import (
    ClosedLoop,
    Content,
    Listed,
    Poisson,
    Synthetic,
    Tenants,
    Uniform,
    WorkItem,
)
from tests.sim.support import load, make_profile

SETUP = Setup.of(make_profile())


def times_of(served: ServedLoad) -> list[tuple[float | None, float | None]]:
    return [(one.first_token_at, one.finished_at) for one in served.requests]


def test_one_request_takes_its_steps_overheads_and_delays():
    items = (WorkItem(tuple(range(100, 116)), 3),)
    (one,) = serve_load(SETUP, Listed(items), Limits(1)).requests
    # 16 rows of 16 attended tokens on average, then decodes of one row.
    prefill_s = 0.014 + 1e-7 * sum(range(1, 17)) + 0.001 + 0.0001
    decode_s = 0.010 + 0.0001 + 0.001 + 0.0001
    assert one.ttft_s == pytest.approx(0.002 + prefill_s + 0.003, rel=0.02)
    assert one.tpot_s == pytest.approx(decode_s, rel=0.02)


@pytest.mark.parametrize(("policy", "last"), [("fcfs", "b"), ("fair", "a")])
def test_one_engine_orders_requests_by_its_own_policy(policy: str, last: str):
    many = [WorkItem(tuple(range(at, at + 20)), 20, 0.001 * at, "a") for at in range(100, 106)]
    items = (*many, WorkItem(tuple(range(200, 220)), 20, 0.2, "b"))
    setup = change_settings(SETUP, [f"policy={policy}", "max_num_seqs=1"])
    served = serve_load(setup, Listed(items), Limits(7)).requests
    assert max(served, key=lambda one: one.finished_at or 0.0).tenant == last


def test_one_engine_refuses_by_its_own_policy():
    items = tuple(WorkItem(tuple(range(100, 120)), 20, 0.1 * at, "ab"[at % 2]) for at in range(20))
    num_refused: dict[str, int] = {}
    for policy in ("fcfs", "fair"):
        setup = change_settings(SETUP, [f"policy={policy}", "max_num_seqs=1"])
        setup = replace(setup, term_changes=parse_term_changes(["b.ttft_s=0.0001"]))
        served = serve_load(setup, Listed(items), Limits(len(items))).requests
        num_refused[policy] = sum(one.is_refused for one in served)
    assert num_refused["fcfs"] == 0
    assert num_refused["fair"] > 0


def test_a_request_that_ends_delays_the_next_step():
    prompt = tuple(range(100, 120))
    items = (WorkItem(prompt, 5), WorkItem(prompt, 40), WorkItem(prompt, 5, 9.0))

    def finish_times(setup: Setup) -> list[float]:
        served = serve_load(setup, Listed(items), Limits(3)).requests
        return [one.finished_at or 0.0 for one in served]

    costly = replace(SETUP, profile=replace(SETUP.profile, per_request_s=0.5))
    times = zip(finish_times(costly), finish_times(SETUP), strict=True)
    # The first one ends while the second runs; the third finds the engine idle.
    assert [late - soon for late, soon in times] == pytest.approx([0.0, 0.5, 0.0], abs=1e-6)


def test_preemptions_are_counted_with_their_request():
    spec = replace(SETUP.spec, capacity=replace(SETUP.spec.capacity, num_blocks=12))
    items = tuple(WorkItem(tuple(range(at, at + 40)), 60) for at in (100, 200, 300))
    served = serve_load(replace(SETUP, spec=spec), Listed(items), Limits(3)).requests
    assert all(one.finished_at is not None for one in served)
    assert sum(one.num_preemptions for one in served) > 0
    served = serve_load(SETUP, Listed(items), Limits(3)).requests
    assert sum(one.num_preemptions for one in served) == 0


def test_a_long_run_says_how_much_of_it_was_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.sim.prediction.serving.WATCH_EVERY", 10)
    shares: list[float] = []
    serve_load(SETUP, load(20.0), Limits(40), watch=shares.append)
    assert shares == [0.0, 0.25, 0.5, 0.75]
    shares.clear()
    serve_load(SETUP, load(20.0), Limits(duration_s=4.0), watch=shares.append)
    assert shares == sorted(shares) and 0.5 < shares[-1] <= 1.0
    seen: list[tuple[float, int]] = []
    predict(
        SETUP,
        load(20.0),
        Limits(20),
        Runs(2),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0.0, 2), (0.5, 2), (1.0, 2), (1.0, 2), (1.5, 2), (2.0, 2)]


def test_the_same_seeds_give_the_same_times():
    profile = make_profile(drift=0.1, ratios=(0.9, 1.1, 1.0))
    first, again, other = (
        serve_load(Setup.of(profile), load(20.0), Limits(60), 1, machine) for machine in (5, 5, 6)
    )
    assert times_of(first) == times_of(again)
    assert times_of(first) != times_of(other)


def test_no_time_of_the_host_reaches_the_virtual_clock(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_args: object) -> float:
        raise AssertionError("the simulation read the host's clock")

    expected = times_of(serve_load(SETUP, load(20.0), Limits(60)))
    for name in ("time", "monotonic", "perf_counter", "process_time", "sleep", "time_ns"):
        monkeypatch.setattr(time, name, refuse)
    assert times_of(serve_load(SETUP, load(20.0), Limits(60))) == expected
    fleet = replace(SETUP, num_engines=3)
    assert len(serve_load(fleet, load(60.0), Limits(60)).requests) == 60


def test_a_closed_loop_has_as_many_requests_in_flight_as_clients():
    served = serve_load(
        SETUP, Synthetic(ClosedLoop(4), Uniform(20, 60), Uniform(5, 15)), Limits(40)
    )
    ends = [(one.scheduled_at, 1) for one in served.requests]
    ends += [(one.finished_at or 0.0, -1) for one in served.requests]
    most = level = 0
    for _, change in sorted(ends):
        level += change
        most = max(most, level)
    assert most == 4
    assert len(served.requests) == 40


@pytest.mark.parametrize(("num_engines", "kill_every_s"), [(1, 1.1), (4, 0.7)])
def test_every_request_ends_though_engines_are_killed(num_engines: int, kill_every_s: float):
    setup = replace(SETUP, num_engines=num_engines, kill_every_s=kill_every_s)
    served = serve_load(setup, load(8.0 * num_engines), Limits(80))
    assert served.num_kills >= 3
    assert all(one.finished_at is not None for one in served.requests)
    calm = serve_load(replace(setup, kill_every_s=None), load(8.0 * num_engines), Limits(80))
    assert summarize(served.requests).e2e_s[99] > summarize(calm.requests).e2e_s[99]


def test_a_request_that_fits_no_context_is_named():
    items = (WorkItem(tuple(range(2000)), 100),)
    with pytest.raises(ConfigError, match="longest context is 2048"):
        serve_load(SETUP, Listed(items), Limits(1))


def test_an_interval_is_of_the_runs():
    assert Interval.of([3.0, 1.0, 2.0]) == Interval(1.0, 2.0, 3.0)
    assert Interval.of([float(number) for number in range(39)]) == Interval(1.0, 19.0, 37.0)
    assert Interval.of([5.0]) == Interval(5.0, 5.0, 5.0)


def test_a_datasheet_has_no_drift_to_change():
    setup = replace(SETUP, profile=replace(SETUP.profile, caveat="datasheet"))
    with pytest.raises(ConfigError, match="drift is for measured profiles"):
        change_settings(setup, ["drift=0.1"])


def test_on_a_machine_half_as_fast_half_the_load_takes_twice_as_long():
    profile = make_profile(ratios=(0.9, 3.0, 1.1))
    setup = Setup.of(replace(profile, per_request_s=0.002))
    slow = change_settings(setup, ["slowness=2"])
    limits = Limits(200)
    usual = serve_load(setup, load(12.0), limits).requests
    slowed = serve_load(slow, load(6.0), limits).requests
    for one, other in zip(usual, slowed, strict=True):
        assert one.ttft_s is not None
        assert one.finished_at is not None
        assert other.ttft_s == pytest.approx(2 * one.ttft_s)
        assert other.finished_at == pytest.approx(2 * one.finished_at)


def test_of_two_values_of_slowness_the_last_counts_and_scales_copies_and_starts():
    capacity = replace(SETUP.spec.capacity, block_copy_s=1e-4)
    setup = replace(SETUP, spec=replace(SETUP.spec, capacity=capacity))
    changed = change_settings(setup, ["slowness=3", "slowness=2"])
    assert changed.profile.overhead_s == pytest.approx(2 * SETUP.profile.overhead_s)
    assert changed.profile.start_s == pytest.approx(2 * SETUP.profile.start_s)
    assert changed.spec.capacity.block_copy_s == pytest.approx(2e-4)


def test_settings_change_scheduler_and_cache():
    changed = change_settings(SETUP, ["policy=fcfs", "num_blocks=50", "prefill_cap=100"])
    assert changed.spec.scheduler.scheduling_policy == "fcfs"
    assert changed.spec.capacity.num_blocks == 50
    assert changed.spec.scheduler.prefill_cap == 100
    assert change_settings(SETUP, ["drift=0.04"]).profile.drift == 0.04
    assert not change_settings(SETUP, ["enable_prefix_caching=false"]).spec.enable_prefix_caching


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_num_seqs", "not KEY=VALUE"),
        ("max_num_seqs=many", "max_num_seqs: .many. is not"),
        ("max_num_sequences=3", "unknown setting 'max_num_sequences'; one of"),
        ("max_num_seqs=0", "max_num_seqs"),
        ("drift=-0.1", "drift must be a number from 0 to 0.5, not '-0.1'"),
        ("drift=nan", "drift must be a number from 0 to 0.5, not 'nan'"),
        ("drift=much", "drift must be a number"),
        ("slowness=0", "slowness must be a number from 0.1 to 10, not '0'"),
        ("slowness=nan", "slowness must be a number from 0.1 to 10, not 'nan'"),
        ("slowness=very", "slowness must be a number"),
    ],
)
def test_a_wrong_setting_is_named(change: str, message: str):
    with pytest.raises(ConfigError, match=message):
        change_settings(SETUP, [change])


@pytest.mark.parametrize("change", ["weight=2", "b.weight", "b.colour=red", "b.weight=heavy"])
def test_a_wrong_term_is_named(change: str):
    with pytest.raises(ConfigError, match="weight"):
        parse_term_changes([change])


@pytest.mark.parametrize(
    "change", ["b.weight=-1", "b.weight=nan", "b.weight=inf", "b.ttft_s=0", "b.max_kv_share=1.5"]
)
def test_a_term_out_of_range_is_refused(change: str):
    with pytest.raises(ConfigError, match="must be above 0 and at most"):
        parse_term_changes([change])


def test_terms_of_a_tenant_without_requests_are_refused():
    changes = parse_term_changes(["b.weight=2"])
    drawn = Synthetic(Poisson(1.0), Uniform(8, 16), Uniform(4, 8), Content(tenants=Tenants(2)))
    with pytest.raises(ConfigError, match="no tenant 'b'; its tenants: tenant-1, tenant-2"):
        check_tenants(changes, drawn)
    with pytest.raises(ConfigError, match="no tenant 'b'; it names no tenants"):
        check_tenants(changes, replace(drawn, content=Content()))
    check_tenants(changes, Listed((WorkItem((1, 2), 3, 0.0, "b"),)))


def test_a_tenant_with_more_weight_waits_less():
    items = tuple(
        WorkItem(tuple(range(100 + number, 140 + number)), 20, 0.0, f"tenant-{number % 2}")
        for number in range(120)
    )

    def mean_ttft(tenant: str, weight: float) -> float:
        changes = parse_term_changes([f"tenant-0.weight={weight}"])
        served = serve_load(replace(SETUP, term_changes=changes), Listed(items), Limits(120))
        waits = [one.ttft_s or 0.0 for one in served.requests if one.tenant == tenant]
        return sum(waits) / len(waits)

    assert mean_ttft("tenant-0", 4.0) < 0.8 * mean_ttft("tenant-0", 1.0)
