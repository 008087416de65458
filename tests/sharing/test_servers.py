"""Small slices of the batteries over HTTP, on a server without a model: what does not depend on
how long things take."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.live import accounts, cache_probe
from benchmarks.live.account_clients import TENANTS
from benchmarks.live.account_clients import started as started_with_tenants
from benchmarks.support import proc_stats
from headway.tenancy.keys import make_key


@pytest.mark.timing
def test_explanations_add_up_and_name_the_true_cause(tmp_path: Path) -> None:
    secrets = {name: make_key() for name in TENANTS}
    with started_with_tenants(None, tmp_path, secrets) as server:
        work = accounts.run(server, secrets, range(97, 123), 60)
        report = proc_stats.run_client(work)
    assert accounts.failures_in(report) == []


def test_a_stranger_is_told_of_no_cached_token(tmp_path: Path) -> None:
    keys = cache_probe.Keys()
    with cache_probe.started(None, tmp_path, keys) as server:
        work = cache_probe.run(server, keys, proc_stats.LETTERS, 8, seed=1)
        found = proc_stats.run_client(work)
    num_prefix = cache_probe.NUM_PROMPT - cache_probe.NUM_OWN
    for probe in found["shared"]:
        assert (probe.num_cached > num_prefix - 16) == probe.is_known
    assert {probe.is_known for probe in found["shared"]} == {True, False}
    assert {probe.num_cached for probe in found["isolated"]} == {0}


@pytest.mark.parametrize(
    ("known", "unknown", "value"),
    [([1, 2, 3], [4, 5, 6], 1.0), ([4, 5, 6], [1, 2, 3], 0.0), ([1, 2, 2], [2, 1, 2], 0.5)],
)
def test_auc(known: list[float], unknown: list[float], value: float) -> None:
    auc = cache_probe.auc_of(known, unknown)
    assert auc.value == pytest.approx(value)
    assert auc.low <= auc.value <= auc.high
    assert auc.distance == max(value, 1 - value)


def test_the_interval_of_an_auc_is_as_wide_as_chance() -> None:
    """Mann and Whitney's variance for two samples of the same kind."""
    known, unknown = [float(at) for at in range(0, 400, 2)], [float(at) for at in range(1, 400, 2)]
    auc = cache_probe.auc_of(known, unknown)
    assert auc.high - auc.low == pytest.approx(2 * 1.96 * (401 / (12 * 200 * 200)) ** 0.5, rel=0.02)
