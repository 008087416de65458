"""`headway explain` and `headway usage` as a person meets them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli import app
from headway.errors import HeadwayError
from headway.observe.databases import make_store
from tests.observe.rows import DAY, make_row


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite://{tmp_path}/ledger.db"
    store = make_store(url)
    rows = [make_row(number) for number in range(4)]
    store.write([*rows, make_row(4, tier="free", arrived_at=DAY + 86_400)])
    store.close()
    return url


def headway(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_usage_as_csv_by_three(url: str) -> None:
    result = headway("usage", "--by", "tenant,tier,day", "--csv", "--ledger-url", url)
    assert result.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert [(row["tenant"], row["tier"], row["day"]) for row in rows] == [
        ("a", "free", "2027-01-16"),
        ("a", "gold", "2027-01-15"),
        ("b", "gold", "2027-01-15"),
    ]
    assert [row["output_tokens"] for row in rows] == ["4", "2", "4"]
    assert rows[1]["cost"] == "0.000002", "to the last digit, and never as 2E-6"


def test_usage_as_json_and_as_a_table(url: str) -> None:
    result = headway("usage", "--json", "--ledger-url", url)
    records = json.loads(result.stdout)
    assert [(one["tenant"], one["requests"]) for one in records] == [("a", 3), ("b", 2)]
    table = headway("usage", "--by", "tier", "--ledger-url", url).stdout.splitlines()
    assert table[0].split()[:3] == ["tier", "requests", "prompt_tokens"]
    assert table[2].split()[:3] == ["gold", "4", "40"]
    assert len({len(line) for line in table}) == 1


def test_usage_within_days(url: str) -> None:
    def num_requests(*span: str) -> int:
        result = headway("usage", "--json", "--by", "", "--ledger-url", url, *span)
        return json.loads(result.stdout)[0]["requests"]

    assert num_requests() == 5
    assert num_requests("--since", "2027-01-16") == 1
    assert num_requests("--until", "2027-01-16") == 4
    assert num_requests("--since", "2027-01-15T08:00:03", "--until", "2027-01-16") == 0


def test_explain_from_the_ledger(url: str) -> None:
    for name in ("cmpl-3", "client-3"):
        result = headway("explain", name, "--ledger-url", url)
        assert result.stdout.startswith("Request cmpl-3 of tenant b (tier gold) arrived at 2027")
    answer = json.loads(headway("explain", "cmpl-3", "--json", "--ledger-url", url).stdout)
    assert answer["num_output_tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "nobody"], "no request nobody"),
        (["usage", "--by", "hour"], "--by takes tenant, tier, day"),
        (["usage", "--by", "tenant,tenant"], "each once"),
        (["usage", "--since", "yesterday"], "is no day or time"),
        (["usage", "--csv", "--json"], "either"),
        (["explain", "x", "--url", "ftp://x"], "must start with http"),
    ],
)
def test_what_is_wrong_is_said(url: str, arguments: list[str], words: str) -> None:
    result = headway(*arguments, "--ledger-url", url)
    assert isinstance(result.exception, HeadwayError)
    assert words in str(result.exception)


def test_a_ledger_that_is_not_there(tmp_path: Path) -> None:
    result = headway("usage", "--ledger-url", f"sqlite://{tmp_path}/none.db")
    assert "there is no ledger at" in str(result.exception)
    assert not (tmp_path / "none.db").exists()
    assert "there is no ledger" in str(headway("usage", "--ledger-url", "none").exception)
