"""Figures of every policy: those in docs/results, or the change shows here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sim.policies import (
    BASELINE_NAME,
    COMMAND,
    PROFILE,
    fair_shares,
    read_baseline,
    simulate,
    simulate_all,
)
from benchmarks.sim.policy_loads import FOLDER, read_load, read_loads
from benchmarks.sim.policy_rows import compare
from headway.sim.profile.catalog import find_profile

MAX_FILE_BYTES = 100_000


def test_the_figures_of_every_policy_are_those_of_the_baseline():
    changes = compare(read_baseline(), simulate_all(), BASELINE_NAME)
    if changes:
        pytest.fail(f"{changes}\nif this is meant: {COMMAND}, and commit the file", pytrace=False)


def test_a_changed_constant_shows_in_the_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.core.running.headroom.BLOCKS_PER_PREEMPTION", 4.0)
    load = read_load(FOLDER / "small-kv.json")
    rows = simulate(find_profile(PROFILE), load, "fair")
    old = {key: row for key, row in read_baseline().items() if key[:2] == (load.name, "fair")}
    changes = compare(old, rows, "the baseline")
    assert f"of {len(rows)} rows differ from the baseline" in changes
    assert " > " in changes


def test_new_and_missing_rows_are_shown():
    old = read_baseline()
    row = next(iter(old.values()))
    assert compare({row.key: row}, [row], "old") == ""
    assert "- > " in compare({}, [row], "old")
    assert "no longer there" in compare({row.key: row}, [], "old")
    slower = replace(row, preemptions=row.preemptions + 1)
    assert f"{row.preemptions} > {slower.preemptions}" in compare({row.key: row}, [slower], "old")


def test_what_a_tenant_does_not_need_is_divided_by_weight():
    asked = {"small": 10.0, "heavy": 900.0, "light": 900.0}
    weights = {"small": 1.0, "heavy": 2.0, "light": 1.0}
    shares = fair_shares(asked, weights, 310.0)
    assert shares == pytest.approx({"small": 10.0, "heavy": 200.0, "light": 100.0})


def test_the_loads_are_small_and_have_what_policies_decide_on():
    sizes = [path.stat().st_size for path in FOLDER.iterdir()]
    assert max(sizes) < MAX_FILE_BYTES
    loads = read_loads()
    assert 6 <= len(loads) <= 8
    assert any(load.targets for load in loads)
    assert any(set(load.weights.values()) - {1.0} for load in loads)
    rows = read_baseline().values()
    assert any(row.preemptions for row in rows)
    assert any(row.refused for row in rows)
