"""The slice of the random walk that every run affords; scripts/test-slow runs the rest."""

from __future__ import annotations

from tests.properties.walk import REPORTED, walk


def test_a_walk_of_8_000_steps_meets_everything_and_violates_nothing():
    tally = walk(8_000, seed=1)
    assert all(tally.counts[name] > 0 for name in REPORTED), tally.summary()
