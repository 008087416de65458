"""The batteries in small, against the fake server: they run, they find nothing, and they would
find what they look for."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import auth_sweep, disconnects, ledger_outage, slow_readers, soak
from benchmarks.faults.disconnects import ClientOutcome, DisconnectLoad
from benchmarks.live import overload
from benchmarks.support import proc_stats
from benchmarks.support.servers import Launcher
from headway.bench.load.records import LoadRecord
from headway.bench.load.stats import LoadTargets
from tests.support.postgres import make_server

MAX_LATE_STEPS = 20.0
MAX_RATIO = 4.0
"""Far above what the full batteries allow, since few samples are noisy. A client that is noticed
only when its answer ends, or a reader that holds up the others, is above them."""


@pytest.mark.timing
async def test_clients_that_leave_leave_nothing_behind(launch: Launcher) -> None:
    server = launch(server=dict(disconnects.SETTINGS), step_s=0.01).wait_ready()
    load = DisconnectLoad(140, 80, 0.3, proc_stats.LETTERS, long_prompt=600)
    report = await disconnects.run(server, load, num_solo=3)
    assert disconnects.failures_in(report, MAX_LATE_STEPS) == []
    assert report["accounts"]["of_them_with_samples"] == 20
    books = report["accounts"]
    assert books["prompts_accepted"] == books["requests_accepted"] + 20 * (
        disconnects.NUM_PROMPTS - 1
    )
    assert report["late_steps"]["count"] == 3
    json.dumps(report)


async def test_a_ledger_whose_database_was_away(launch: Launcher) -> None:
    # The database's own account must reach its folder, and the name of a socket is bounded.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "pg").mkdir()
        postgres = make_server(Path(name) / "pg")
        postgres.start()
        try:
            settings = {"ledger_url": postgres.url, "max_engine_restarts": 1000}
            server = await asyncio.to_thread(launch(step_s=0.005, server=settings).wait_ready)
            report = await ledger_outage.run(server, postgres, 2.0, 3)
            report["exit_code"] = server.stop()
        finally:
            postgres.stop()
    assert ledger_outage.failures_in(report) == []
    assert report["rows_that_waited_for_it"] > 0
    report["rows"] += 1
    assert ledger_outage.failures_in(report)


@pytest.mark.timing
async def test_slow_readers_are_cut_off_and_nobody_else(launch: Launcher) -> None:
    server = launch(server={"slow_reader_timeout_s": 0.5}, step_s=0.006).wait_ready()
    plan = slow_readers.Plan(8, 2, 220, 1, proc_stats.LETTERS)
    report = await slow_readers.run(server, plan)
    assert slow_readers.failures_in(report, MAX_RATIO) == []
    (only,) = report["rounds"]
    assert only["disturbed"]["requests_of_the_readers"] > 8
    json.dumps(report)


@pytest.mark.timing
async def test_every_level_of_overload_is_measured(launch: Launcher) -> None:
    server = launch(server={"max_queue_wait_s": 0.5}, step_s=0.005).wait_ready()
    options = overload.Options(2.0, 0.1, LoadTargets(ttft_s=8.0, tpot_s=1.0), (1.0, 3.0))
    report = await overload.run(server, proc_stats.LETTERS, options, 2.0, 1)
    assert [level["factor"] for level in report["levels"]] == [1.0, 3.0]
    assert report["levels"][0]["goodput_per_s"] > 0
    assert report["levels"][1]["recovery_s"] is not None
    assert report["tracebacks"] == 0
    json.dumps(report)


async def test_a_soak_with_a_killed_engine_balances(launch: Launcher, tmp_path: Path) -> None:
    server = launch(server=dict(soak.SETTINGS), step_s=0.005).wait_ready()
    plan = soak.Plan(6.0, 2.0, soak.FAKE_FAULTS, proc_stats.LETTERS, 15.0, 1.0, 1.0)
    report = await soak.run(server, plan, tmp_path)
    # Seconds say nothing about a slope.
    assert soak.failures_in({**report, "slope_mib_per_10_min": 0.0}) == []
    assert report["restarts"] >= 1
    assert report["ends"][soak.COMPLETE] > 0
    assert report["bad_inputs"] > 0
    json.dumps(report)


BOOKS = {
    "prompts_accepted": 10.0,
    "of_them_with_samples": 2.0,
    "ends": 12.0,
    "first_tokens": 9.0,
    "ends_after_a_first_token": 9.0,
}


@pytest.mark.parametrize(
    ("changed", "is_balanced"),
    [
        ({}, True),
        ({"ends": 10.0}, True),
        ({"ends": 9.0}, False),
        ({"ends": 13.0}, False),
        ({"first_tokens": 10.0}, False),
    ],
)
def test_accounts_that_do_not_balance_are_found(
    changed: dict[str, float], is_balanced: bool
) -> None:
    assert (disconnects.find_imbalances({**BOOKS, **changed}) == []) == is_balanced


def test_what_was_not_given_back_is_found() -> None:
    before = {"memory_bytes": 0, "num_descriptors": 20, "num_threads": 3}
    remains: dict[str, Any] = {"before": {"api": before}, "after": {"api": before}}
    remains |= {"num_running": 0, "num_waiting": 0, "num_blocks": 0}
    assert proc_stats.leaks_in(remains, 1.0, ("api",)) == []
    after = {"memory_bytes": 2 * proc_stats.MIB, "num_descriptors": 30, "num_threads": 30}
    found = proc_stats.leaks_in({**remains, "after": {"api": after}}, 1.0, ("api",))
    assert len(found) == 3
    assert proc_stats.leaks_in({**remains, "num_blocks": 1}, 1.0, ("api",)) != []
    assert proc_stats.leaks_in({**remains, "after": {}}, 1.0, ("api",)) != []


@pytest.mark.parametrize(
    ("seen", "end"),
    [
        (ClientOutcome(has_disconnected=True), soak.DISCONNECTED),
        (ClientOutcome(200, is_complete=True), soak.COMPLETE),
        (ClientOutcome(503, retry_after="2"), soak.REFUSED),
        (ClientOutcome(503), None),
        (ClientOutcome(200, error='data: {"error": {"message": "it failed (id)"}}'), soak.FAILED),
        (ClientOutcome(500, error='{"error": {"message": "it failed"}}'), soak.FAILED),
        (ClientOutcome(200, error="connection: reset"), None),
        (ClientOutcome(200), None),
    ],
)
def test_an_end_without_a_reason_is_no_good_end(seen: ClientOutcome, end: str | None) -> None:
    assert soak.end_of(seen) == end


def test_the_slope_is_that_of_the_line() -> None:
    points = [(float(x), 5.0 + 0.25 * x + (-1) ** x) for x in range(1000)]
    slope = proc_stats.slope_per_s(points)
    assert slope == pytest.approx(0.25, abs=0.001)
    assert proc_stats.slope_per_s(points[:2]) is None


def test_rates_leave_out_the_ramp_and_the_tail() -> None:
    records = [
        LoadRecord(at, None, float(at), 4, float(at), [at + 0.5], [3], at + 1.0, 200)
        for at in range(12)
    ]
    rates = overload.steady_rates(records, 10.0, LoadTargets(ttft_s=0.6))
    # Of 10 s, the 8 from 2 to 10 count: those sent at 1 to 8 s end in them.
    assert rates == overload.Rates(1.0, 1.0, 3.0)
    assert overload.steady_rates(records, 10.0, LoadTargets(ttft_s=0.4)).good_per_s == 0.0


def test_no_way_around_the_keys(launch: Launcher) -> None:
    keys = [auth_sweep.KEY, auth_sweep.OTHER_KEY]
    server = launch(server={"api_key": keys}).wait_ready(auth_sweep.KEY)
    report = auth_sweep.sweep(server)
    assert not report["opened"]
    assert report["attempts"] == 2 * len(list(auth_sweep.attempts()))
