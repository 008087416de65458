"""The reports of the full runs pass; each of them with one figure gone wrong does not."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.faults import disconnects, fleet_soak, ledger_outage, slow_readers, soak
from benchmarks.faults.bystander import Watch
from benchmarks.faults.run_bad_inputs import failures_of_watches
from benchmarks.live import overload
from benchmarks.support.proc_stats import MODEL_SETTINGS, flags_of

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BATTERIES: dict[str, ModuleType] = {
    "overload": overload,
    "soak": soak,
    "disconnects": disconnects,
    "slow_readers": slow_readers,
    "ledger_outage": ledger_outage,
    "fleet_soak": fleet_soak,
}
WRONG: Sequence[tuple[str, Sequence[str | int], Any]] = (
    ("overload", ("levels", 3, "goodput_per_s"), 1.0),
    ("overload", ("levels", 4, "retry_after_share"), 0.999),
    ("overload", ("levels", 4, "refusal_p99_s"), 0.051),
    ("overload", ("levels", 2, "failed"), {"reset": 1}),
    ("overload", ("levels", -1, "recovery_s"), 31.0),
    ("overload", ("tracebacks",), 1),
    ("soak", ("unexplained",), ["no answer"]),
    ("soak", ("ends", soak.FAILED), 100),
    ("soak", ("samples_complete",), 100_000),
    ("soak", ("slope_mib_per_10_min",), 1.01),
    ("soak", ("accounts", "ends"), 1.0),
    ("soak", ("remains", "num_blocks"), 1),
    ("disconnects", ("engine_restarts",), 1),
    ("disconnects", ("late_steps", "p99"), 2.1),
    ("disconnects", ("accounts", "first_tokens"), 1.0),
    ("disconnects", ("remains", "num_waiting"), 1),
    ("disconnects", ("ends_seen_by_clients",), {"queued": {"status 500": 1}}),
    ("slow_readers", ("p99_ratio_median",), 1.31),
    ("slow_readers", ("rounds", 0, "disturbed", "failures"), ["reset"]),
    ("slow_readers", ("rounds", 0, "disturbed", "cut_off_by_the_server"), 0),
    ("slow_readers", ("rounds", 0, "baseline", "cut_off_by_the_server"), 1),
    ("slow_readers", ("rounds", 0, "disturbed", "api_bytes_per_reader"), 2**21),
    ("ledger_outage", ("rows",), 0),
    ("fleet_soak", ("problems",), ["10 s: tokens 3 - 5 are missing"]),
    ("fleet_soak", ("slope_mib_per_10_min",), 1.01),
    ("fleet_soak", ("new_descriptors",), 100),
    ("fleet_soak", ("streams_same",), 0),
)


def report_of(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", BATTERIES)
def test_the_full_run_passed(name: str) -> None:
    assert BATTERIES[name].failures_in(report_of(name)) == []


@pytest.mark.parametrize(("name", "path", "value"), WRONG)
def test_what_went_wrong_is_found(name: str, path: Sequence[str | int], value: Any) -> None:
    report: Any = report_of(name)
    place = report
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert len(BATTERIES[name].failures_in(report)) == 1


def test_the_bystander_is_delayed_no_more_than_by_good_inputs() -> None:
    args = argparse.Namespace(min_gap_s=0.1, max_gap_ratio=3.0)
    alone, beside_good = Watch(0.03, num_gaps=700), Watch(0.2, num_gaps=700)
    watches = {"undisturbed": alone, "good inputs": beside_good, "corpus": Watch(0.29, num_gaps=1)}
    assert not failures_of_watches(watches, args)
    late = {**watches, "corpus": Watch(0.31, num_gaps=1)}
    assert failures_of_watches(late, args) == ["bystander, corpus: a gap of 310 ms"]
    refused = {**watches, "corpus": Watch(num_busy=9)}
    assert failures_of_watches(refused, args) == ["bystander, corpus: no stream, 9 times refused"]


def test_the_command_knows_the_settings_of_the_batteries() -> None:
    flags = flags_of({**MODEL_SETTINGS, "preemption_method": "auto"})
    assert flags[0] == "--deterministic" and flags[-2:] == ["--preemption-method", "auto"]
    command = [sys.executable, "-m", "headway", "serve", "missing.gguf", "--port", "0", *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "no such file or folder" in result.stderr


def test_a_soak_of_a_fleet_is_judged() -> None:
    findings = fleet_soak.Findings(num_same=3, memory=[(10.0 * at, 50.0) for at in range(30)])
    assert not fleet_soak.failures_in(fleet_soak.report_of(findings, 0))
    assert len(fleet_soak.failures_in(fleet_soak.report_of(findings, 9))) == 1
    findings.memory = [(10.0 * at, 50.0 + 0.02 * at) for at in range(30)]  # 1.2 MiB in ten minutes
    assert len(fleet_soak.failures_in(fleet_soak.report_of(findings, 0))) == 1
    findings.memory.clear()
    findings.problems.append("position 3: dropped")
    assert len(fleet_soak.failures_in(fleet_soak.report_of(findings, 0))) == 1
    assert len(fleet_soak.failures_in(fleet_soak.report_of(fleet_soak.Findings(), 0))) == 1
