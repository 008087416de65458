from __future__ import annotations

from itertools import islice, pairwise
from random import Random
from statistics import mean, pstdev

import pytest

from headway.errors import ConfigError
from headway.workload import (
    ClosedLoop,
    Diurnal,
    Gamma,
    OnOff,
    Poisson,
    parse_arrivals,
    parse_rates,
)
from headway.workload.arrivals import OpenArrivals


def gaps(arrivals: OpenArrivals, num: int = 20_000) -> list[float]:
    times = list(islice(arrivals.times(Random(7)), num))
    assert times == sorted(times)
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(("cv", "within"), [(0.5, 0.02), (1.0, 0.03), (2.0, 0.08), (4.0, 0.4)])
def test_gamma_gaps_have_the_mean_and_the_spread_asked_for(cv: float, within: float):
    found = gaps(Gamma(4.0, cv))
    assert mean(found) == pytest.approx(0.25, rel=0.1)
    assert pstdev(found) / mean(found) == pytest.approx(cv, abs=within)


def test_poisson_gaps_are_exponential():
    found = gaps(Poisson(10.0))
    assert mean(found) == pytest.approx(0.1, rel=0.03)
    assert pstdev(found) / mean(found) == pytest.approx(1.0, abs=0.03)


def test_bursts_are_followed_by_silence():
    bursts = OnOff(8.0, on=5.0, off=15.0)
    times = list(islice(bursts.times(Random(1)), 4000))
    assert all(at % 20.0 < 5.0 for at in times)
    assert len(times) / times[-1] == pytest.approx(bursts.mean_rate, rel=0.1)
    assert bursts.mean_rate == 2.0
    assert bursts.with_rate(4.0) == OnOff(16.0, 5.0, 15.0)


def test_days_have_a_peak_at_noon_and_their_fewest_arrivals_at_midnight():
    days = Diurnal(20.0, low=2.0, day=100.0)
    times = [at for at in islice(days.times(Random(1)), 12_000) if at < 1000.0]
    by_hour = [sum(1 for at in times if at % 100.0 // 10 == hour) / 100.0 for hour in range(10)]
    assert by_hour[0] == pytest.approx(2.0 + 18.0 * 0.033, rel=0.2)
    assert by_hour[4] == pytest.approx(20.0 - 18.0 * 0.033, rel=0.1)
    assert len(times) / 1000.0 == pytest.approx(days.mean_rate, rel=0.05)
    assert days.with_rate(22.0) == Diurnal(40.0, 4.0, 100.0)


def test_the_same_seed_gives_the_same_times():
    arrivals = Gamma(3.0, 2.0)
    first, again, other = (list(islice(arrivals.times(Random(s)), 50)) for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("closed:16", ClosedLoop(16)),
        ("poisson:4", Poisson(4.0)),
        ("gamma:4,cv=2", Gamma(4.0, 2.0)),
        ("gamma:0.5", Gamma(0.5, 1.0)),
        ("onoff:8,on=5,off=15", OnOff(8.0, 5.0, 15.0)),
        ("diurnal:8,low=1", Diurnal(8.0, 1.0, 86_400.0)),
        ("diurnal:8,low=1,day=60", Diurnal(8.0, 1.0, 60.0)),
        (" onoff : 8 , off=15, on=5", OnOff(8.0, 5.0, 15.0)),
    ],
)
def test_what_is_written_is_what_is_meant(text: str, arrivals: object):
    assert parse_arrivals(text.replace(" :", ":")) == arrivals


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "closed:CONCURRENCY, poisson:RATE, gamma:RATE,cv=CV, onoff"),
        ("fast", "poisson:RATE"),
        ("poisson", "poisson:RATE"),
        ("poisson:4,5", "poisson:RATE"),
        ("poisson:0", "rate must be above 0"),
        ("poisson:nan", "not a number"),
        ("poisson:inf", "not a number"),
        ("poisson:x", "not a number"),
        ("gamma:4,cv=-1", "cv must be above 0"),
        ("gamma:4,shape=2", "gamma:RATE,cv=CV"),
        ("onoff:8,on=5", "on=SECONDS,off=SECONDS"),
        ("closed:1.5", "whole number"),
        ("closed:0", "whole number"),
    ],
)
def test_what_is_wrong_is_answered_with_what_is_right(text: str, said: str):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        parse_arrivals(text)


def test_rates_of_a_sweep_rise():
    assert parse_rates("2,0.5,1,2") == (0.5, 1.0, 2.0)
    for text in ("", "1,x", "0", "1,-1", "inf", "nan"):
        with pytest.raises(ConfigError, match="rates per second"):
            parse_rates(text)
