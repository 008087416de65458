"""How results of clients are read, judged and shown."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks.clients.catalog import CLIENTS
from benchmarks.clients.report import as_markdown, as_text
from benchmarks.clients.runner import Outcome, _results
from benchmarks.clients.uses.checks import Result, expect, raises

CLIENT = CLIENTS["openai-3"]
PASSED, FAILED = Result("chat", True, "hello"), Result("tools", False, "refused")
KNOWN = Result("agent", False, "no call", "the model never calls")
NOW_PASSES = Result("agent", True, "a call", "the model never calls")


@pytest.mark.parametrize(
    ("results", "is_expected"),
    [
        ((PASSED, KNOWN), True),
        ((PASSED, FAILED), False),
        ((PASSED, NOW_PASSES), False),
    ],
)
def test_only_known_failures_are_expected(results: tuple[Result, ...], is_expected: bool) -> None:
    assert Outcome(CLIENT, {}, results).is_expected is is_expected


def test_a_client_that_ended_early_is_a_failure_and_a_missing_one_is_not() -> None:
    assert not Outcome(CLIENT, {}, (PASSED,), problem="ended with 1").is_expected
    assert Outcome(CLIENT, {}, problem="not installed", is_installed=False).is_expected


def test_lines_that_are_no_results_are_left_out() -> None:
    lines = ["a warning", json.dumps(asdict(PASSED)), '{"other": 1}', json.dumps(asdict(KNOWN))]
    assert _results("\n".join(lines)) == [PASSED, KNOWN]


def test_tables() -> None:
    outcome = Outcome(CLIENT, {"openai": "3.0"}, (PASSED, KNOWN, FAILED))
    text = as_text(outcome)
    assert "openai-3 3.0: 1 of 3" in text
    assert "FAILED      tools: refused" in text and "known       agent" in text
    assert "NOW PASSES" in as_text(Outcome(CLIENT, {}, (NOW_PASSES,)))
    rows = as_markdown([outcome]).splitlines()
    assert rows[2].startswith("| openai (Python) | 3.0 |") and rows[2].endswith("| 1 of 3 |")
    assert rows[-2:] == [
        "- openai (Python), agent: the model never calls",
        "- openai (Python), tools: refused",
    ]


def test_checks_raise_what_they_saw() -> None:
    with pytest.raises(AssertionError, match="seen"):
        expect(False, "seen")
    with pytest.raises(AssertionError, match="no ValueError: 3"):
        raises(ValueError, lambda: 3)
    assert isinstance(raises(ValueError, lambda: int("x")), ValueError)
