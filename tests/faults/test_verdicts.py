"""The reports of the full runs pass; each of them with one figure gone wrong does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.faults import disconnects, ledger_outage, slow_readers, soak
from benchmarks.live import overload

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BATTERIES: dict[str, ModuleType] = {
    "overload": overload,
    "soak": soak,
    "disconnects": disconnects,
    "slow_readers": slow_readers,
    "ledger_outage": ledger_outage,
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
