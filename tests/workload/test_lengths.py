from __future__ import annotations

from math import exp
from pathlib import Path
from random import Random
from statistics import mean, median, pstdev

import pytest

from headway.errors import ConfigError
from headway.workload import Bounds, Empirical, Fixed, Lengths, Lognormal, Uniform, parse_lengths


def drawn(lengths: Lengths, num: int = 20_000) -> list[int]:
    draw = Random(3)
    return [lengths.draw(draw) for _ in range(num)]


def test_uniform_reaches_both_ends():
    found = drawn(Uniform(32, 256))
    assert (min(found), max(found)) == (32, 256)
    assert mean(found) == pytest.approx(144, rel=0.02)


def test_lognormal_has_the_median_and_spread_asked_for():
    found = drawn(Lognormal(5.0, 0.5))
    assert median(found) == pytest.approx(exp(5.0), rel=0.02)
    assert pstdev(found) / mean(found) == pytest.approx((exp(0.25) - 1) ** 0.5, rel=0.05)


def test_lognormal_is_clipped():
    found = drawn(Lognormal(5.0, 0.9, Bounds(8, 512)))
    assert (min(found), max(found)) == (8, 512)


def test_empirical_lengths_are_those_seen():
    assert set(drawn(Empirical((10, 20, 400)))) == {10, 20, 400}
    assert set(drawn(Empirical((1, 20, 400), 0.1, Bounds(1, 30)))) == {1, 2, 30}


def test_fixed():
    assert set(drawn(Fixed(128), 5)) == {128}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("fixed:128", Fixed(128)),
        ("uniform:32,256", Uniform(32, 256)),
        ("lognormal:5.0,0.9,max=512", Lognormal(5.0, 0.9, Bounds(1, 512))),
        ("lognormal:5,0.9,min=8", Lognormal(5.0, 0.9, Bounds(8))),
        ("list:16,32,64", Empirical((16, 32, 64))),
    ],
)
def test_what_is_written_is_what_is_meant(text: str, lengths: Lengths):
    assert parse_lengths(text, "prompt") == lengths


def test_lengths_from_a_file_of_numbers(tmp_path: Path):
    file = tmp_path / "lengths.txt"
    file.write_text("5\n7\n0\n9\n")
    assert parse_lengths(f"empirical:{file}", "prompt") == Empirical((5, 7, 9))
    scaled = parse_lengths(f"empirical:{file},scale=0.5,max=4", "output")
    assert scaled == Empirical((5, 7, 9), 0.5, Bounds(1, 4))


def test_lengths_from_a_trace_take_the_column_of_their_side(tmp_path: Path):
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,0\n"
    )
    assert parse_lengths(f"empirical:{file}", "prompt") == Empirical((4808, 3180))
    assert parse_lengths(f"empirical:{file}", "output") == Empirical((10,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("128", "fixed:TOKENS, uniform:LOW,HIGH, lognormal"),
        ("fixed:0", "at least 1"),
        ("fixed:1.5", "whole number"),
        ("uniform:32", "uniform:LOW,HIGH"),
        ("uniform:256,32", "lower one"),
        ("lognormal:5,0", "sigma must be above 0"),
        ("lognormal:5,0.9,max=0", "at least 1"),
        ("lognormal:5,0.9,min=9,max=8", "above max"),
        ("lognormal:5,0.9,top=8", "max=N"),
        ("list:", "list:N,N"),
        ("list:3,0", "at least 1"),
        ("empirical:missing.csv", "cannot read missing.csv"),
    ],
)
def test_what_is_wrong_is_answered_with_what_is_right(text: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_lengths(text, "prompt")


def test_a_file_that_is_no_trace(tmp_path: Path):
    file = tmp_path / "notes.txt"
    file.write_text("some words\n")
    with pytest.raises(
        ConfigError, match="is not a trace; accepted: CSV with the columns TIMESTAMP"
    ):
        parse_lengths(f"empirical:{file}", "prompt")
