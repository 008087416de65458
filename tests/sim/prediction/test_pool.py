"""Simulated engines that come and go: by the autoscaler, and for several frontends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest

from headway.errors import ConfigError
from headway.fleet.router.simulated import SharedFrontends
from headway.sim.prediction import pool
from headway.sim.prediction.figures import summarize
from headway.sim.prediction.served import ServedLoad
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.workload import Listed, Poisson, Synthetic, Uniform, WorkItem
from tests.sim.support import make_profile

SETUP = Setup.of(make_profile())
SCALED = replace(SETUP, max_engines=6)
SHARED = partial(SharedFrontends.make, 3)


def wave(rates: Sequence[float], phase_s: float = 20.0) -> Listed:
    """Even arrivals at one rate after the other; an engine serves about 12 per second."""
    times = [
        number * phase_s + at / rate
        for number, rate in enumerate(rates)
        for at in range(int(rate * phase_s))
    ]
    prompts = [tuple(range(1000 * at, 1000 * at + 400)) for at in range(1, len(times) + 1)]
    return Listed(tuple(WorkItem(one, 4, at) for one, at in zip(prompts, times, strict=True)))


def serve(setup: Setup, load: Listed) -> ServedLoad:
    served = serve_load(setup, load, Limits(len(load.requests)))
    assert all(one.finished_at is not None for one in served.requests)
    return served


def test_a_fixed_pool_costs_all_its_engines_all_the_time():
    served = serve(SETUP.fixed(3), wave((4.0,)))
    assert served.most_engines == 3
    assert served.num_starts == 0
    assert served.engine_s == pytest.approx(3 * served.span_s)
    assert served.cost_share == pytest.approx(1.0)


def test_an_autoscaled_pool_grows_with_the_load_and_shrinks_after_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(pool, "Autoscaler", partial(pool.Autoscaler, 5.0))
    served = serve(SCALED, wave((0.5, 30.0, 0.5, 0.5, 0.5)))
    assert served.most_engines >= 3
    assert served.num_starts >= 2
    assert served.engine_s < 0.7 * served.most_engines * served.span_s
    assert served.cost_share == served.engine_s / (served.most_engines * served.span_s)
    alone = serve(SETUP, wave((0.5, 30.0, 0.5, 0.5, 0.5)))
    assert summarize(served.requests).ttft_s[99] < 0.5 * summarize(alone.requests).ttft_s[99]


def test_a_new_engine_takes_its_start_up_time():
    def ttft_s(start_s: float) -> float:
        profile = replace(SETUP.profile, start_s=start_s)
        served = serve(replace(SCALED, profile=profile), wave((30.0,)))
        assert served.num_starts >= 2
        return summarize(served.requests).ttft_s[95]

    assert ttft_s(20.0) > 2 * ttft_s(1.0)


def test_frontends_that_share_a_router_serve_all_though_engines_are_killed():
    setup = replace(SETUP.fixed(4), make_frontends=SHARED, kill_every_s=0.7)
    load = Synthetic(Poisson(32.0), Uniform(20, 60), Uniform(5, 15))
    served = serve_load(setup, load, Limits(120))
    assert served.num_kills >= 3
    assert all(one.finished_at is not None for one in served.requests)
    calm = replace(setup, kill_every_s=None)
    times = [summarize(serve_load(calm, load, Limits(120), seed).requests) for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


def test_messages_between_frontends_and_router_take_time():
    load = wave((1.0,), 10.0)
    one = serve(replace(SETUP.fixed(2)), load)
    shared = serve(replace(SETUP.fixed(2), make_frontends=SHARED), load)
    late_s = [
        (b.ttft_s or 0.0) - (a.ttft_s or 0.0)
        for a, b in zip(one.requests, shared.requests, strict=True)
    ]
    # A question and its answer, a millisecond each.
    assert max(late_s) == pytest.approx(0.002, abs=0.0005)
    assert min(late_s) == pytest.approx(0.002, abs=0.0005)


def test_the_work_of_frontends_that_share_a_router_is_seen_by_the_autoscaler():
    served = serve(replace(SCALED, make_frontends=SHARED), wave((0.5, 30.0)))
    assert served.most_engines >= 3


@pytest.mark.parametrize(("low", "high"), [(0, 3), (3, 2), (1, 5000)])
def test_a_range_of_engines_that_cannot_be_is_named(low: int, high: int):
    with pytest.raises(ConfigError, match="engine"):
        replace(SETUP, num_engines=low, max_engines=high)


@pytest.mark.parametrize("num_engines", [1, 3])
def test_engines_that_are_killed_faster_than_they_start_are_refused(num_engines: int):
    most_s = SETUP.profile.start_s / num_engines
    with pytest.raises(ConfigError, match=f"none of {num_engines} would be left"):
        replace(SETUP, num_engines=num_engines, kill_every_s=0.9 * most_s)
    replace(SETUP, num_engines=num_engines, kill_every_s=1.1 * most_s)


def test_what_is_not_known_of_a_profile_is_the_same_for_all_engines():
    measured = make_profile(drift=0.2)
    refits = tuple((0.01 * number, *measured.fit.coefficients[1:]) for number in range(1, 9))
    measured = replace(measured, fit=replace(measured.fit, refits=refits))
    engines = list(islice(measured.engines(random.Random(0)), 5))
    assert len({one.fit.coefficients for one in engines}) == 1
    assert len({one.speed for one in engines}) == 5
    datasheet = replace(measured, caveat="datasheet")
    assert len({one.speed for one in islice(datasheet.engines(random.Random(0)), 5)}) == 1
