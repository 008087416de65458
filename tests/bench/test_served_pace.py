"""The benchmarks of pace over sockets in small, against the fake server: what they send, how they
judge it, and that their reports have what they must. How fast things are is not looked at."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live import served_pace
from benchmarks.live.served_rig import ServerFactory, body_of, record_of, scaled
from benchmarks.sim import control, deadlines
from headway.bench.load.records import LoadRecord
from headway.core.terms import Targets, Terms

FAKE = ServerFactory(None)


def seen(status: int = 200, ended_at: float = 2.0) -> LoadRecord:
    """Scheduled at 1.0, with three tokens 0.25 s apart."""
    record = LoadRecord(0, "standard", 1.0, 8, 1.0, ended_at=ended_at, status=status)
    if status == 200:
        record.chunk_times, record.chunk_tokens = [1.5, 1.75, 2.0], [1, 1, 1]
    else:
        record.error = f"HTTP {status}"
    return record


@pytest.mark.parametrize(
    ("targets", "is_good"),
    [
        (Targets(), True),
        (Targets(0.5, 0.25, 1.0), True),
        (Targets(ttft_s=0.49), False),
        (Targets(tpot_s=0.24), False),
        (Targets(deadline_s=0.99), False),
    ],
)
def test_the_client_judges_every_target(targets: Targets, is_good: bool) -> None:
    assert record_of(seen(), Terms(targets=targets)).is_good == is_good
    # Nothing depends on when its run began.
    assert record_of(seen(), Terms(targets=targets), later_s=40.0).is_good == is_good


def test_neither_refused_nor_failed_is_good() -> None:
    refused, failed = record_of(seen(503)), record_of(seen(500))
    assert (refused.is_refused, failed.is_refused) == (True, False)
    assert not refused.is_good
    assert not failed.is_good


def test_only_what_a_policy_heeds_is_sent() -> None:
    assert served_pace.bodies_of("fcfs", 2.0)["standard"] == {}
    assert served_pace.bodies_of("priority", 2.0)["standard"] == {"priority": 1}
    expected = {"priority": 1, "ttft_ms": 8000.0, "tpot_ms": 300.0}
    assert served_pace.bodies_of("fair", 2.0)["standard"] == expected
    assert body_of(scaled(Targets(deadline_s=60.0), 0.5)) == {"deadline_ms": 30_000.0}


def test_the_requests_are_those_of_the_virtual_clock() -> None:
    draw = partial(deadlines.arrivals, 5.0, 10.0)
    records, items = list(draw(3)), list(ServerFactory(Path("model")).mix(draw).items(3))
    assert [(one.num_prompt, one.num_output, one.arrived_at) for one in records] == [
        (len(item.prompt_token_ids), item.num_output_tokens, item.at) for item in items
    ]
    assert {item.tenant for item in items} == set(deadlines.TIER_NAMES)


@pytest.mark.full
def test_every_setting_is_measured_and_compared() -> None:
    report = served_pace.run_control(FAKE, 2.0, 0.03, 1, [(8, 512)])
    assert set(report["rows"]) == {"8 running, 512 tokens", "auto"}
    for row in report["rows"].values():
        assert not row["failed"]
        assert row["refused"] == 0
        assert row["tokens_per_s"] > 0
        assert row["tpot_p95_few_s"] > 0
        assert row["ttft_p95_many_s"] > 0
        assert row["spread"]["tokens_per_s"] == [row["tokens_per_s"]] * 2
    rates = [row["tokens_per_s"] for row in report["rows"].values()]
    assert report["auto_by_best"] == pytest.approx(rates[1] / rates[0])
    served_pace.print_control(report)
    json.dumps(report)


def test_the_target_comes_from_the_widest_fixed_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def run_setting(*args: Any, **_options: Any) -> dict[str, Any]:
        asked.append(args[1:])
        row = {"tpot_p95_many_s": 0.2, "failed": {}}
        return {**row, "tokens_per_s": 1.0, "tpot_p95_few_s": 0.1, "ttft_p95_many_s": 1.0} | {
            "within_target": 1.0
        }

    monkeypatch.setattr(served_pace, "run_setting", run_setting)
    report = served_pace.run_control(FAKE, 5.0, None, 2)
    # As far below that setting's p95 as the target of the virtual clock is there.
    virtual_s = report["calibration"]["virtual_tpot_p95_many_s"]
    assert virtual_s > control.TARGET_S
    assert report["target_s"] / 0.2 == pytest.approx(control.TARGET_S / virtual_s)
    # Without a target at first; then all of them once, and again the other way round.
    (first, *others), settings = asked, (*served_pace.FIXED, None)
    assert first == ((64, 1024), 5.0, None)
    once, again = settings, settings[::-1]
    expected = [(one, 5.0, report["target_s"], 0) for one in once]
    assert others == expected + [(one, 5.0, report["target_s"], 1) for one in again]


def test_every_policy_gets_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_pace, "VIRTUAL_DURATION_S", 10.0)
    report = served_pace.run_deadlines(FAKE, [1.5], 1.5, seed=0)
    assert report["capacity"]["requests_per_s"] > 0
    (level,) = report["levels"]
    offered = {policy: level[policy]["offered_per_s"] for policy in served_pace.POLICIES}
    assert len(set(offered.values())) == 1
    for policy in served_pace.POLICIES:
        found = level[policy]
        assert not found["failed"]
        assert 0.0 <= found["refused_share"] <= 1.0
        assert (found["refusal_p99_s"] is None) == (found["refused_share"] == 0.0)
        assert found["goodput_per_s"] <= found["offered_per_s"]
        # It has seen steps: before that it says 1.
        assert 0.0 < found["model_error"] < 1.0
        assert set(found["tiers"]) == set(deadlines.TIER_NAMES)
    json.dumps(report)


ROW = {"tokens_per_s": 100.0, "tpot_p95_many_s": 0.08, "tpot_p95_few_s": 0.02}
ROW |= {"failed": [], "refused": 0}
MISSING = {**ROW, "tpot_p95_many_s": 0.2}


@pytest.mark.parametrize(
    ("auto", "wide", "num_failures"),
    [
        (ROW, MISSING, 0),
        (MISSING, MISSING, 1),
        (ROW, ROW, 1),
        ({**ROW, "tokens_per_s": 94.0}, MISSING, 1),
        ({**ROW, "refused": 1}, MISSING, 1),
        ({**ROW, "failed": [{"timeout": 1}]}, MISSING, 1),
    ],
)
def test_what_auto_must_reach(auto: Any, wide: Any, num_failures: int) -> None:
    report = {"target_s": 0.1, "rows": {"wide": wide, "auto": auto}}
    assert len(served_pace.control_failures(report)) == num_failures


def test_auto_is_compared_with_all_and_with_those_in_target() -> None:
    rows = {"auto": ROW, "wide": {**MISSING, "tokens_per_s": 200.0}}
    assert served_pace.compared(rows, 0.1) == {"auto_by_best": 0.5, "auto_by_best_in_target": None}
    rows["narrow"] = {**ROW, "tokens_per_s": 50.0}
    found = served_pace.compared(rows, 0.1)
    assert found == {"auto_by_best": 0.5, "auto_by_best_in_target": 2.0}


LEVEL = {"goodput_per_s": 2.0, "kept_least": 0.97, "model_error": 0.05, "failed": {}}
LEVEL |= {"refusal_p99_s": 0.04}
WORSE = {**LEVEL, "goodput_per_s": 1.5}


@pytest.mark.parametrize(
    ("load", "fair", "num_failures"),
    [
        (1.2, LEVEL, 0),
        (0.8, WORSE, 0),
        (1.2, WORSE, 2),
        (1.2, {**LEVEL, "kept_least": 0.9}, 1),
        (1.2, {**LEVEL, "model_error": 0.11}, 1),
        (1.2, {**LEVEL, "refusal_p99_s": 0.06}, 1),
        (1.2, {**LEVEL, "refusal_p99_s": None}, 0),
        (1.2, {**LEVEL, "failed": {"timeout": 1}}, 1),
    ],
)
def test_what_promises_must_reach(load: float, fair: Any, num_failures: int) -> None:
    report = {"levels": [{"load": load, "fcfs": WORSE, "priority": WORSE, "fair": fair}]}
    assert len(served_pace.deadlines_failures(report)) == num_failures
