"""`headway explain` and `headway usage` as a person meets them."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headway.cli.app import make_app
from headway.errors import HeadwayError
from headway.observe.ledger.databases import make_store
from tests.conftest import ROOT
from tests.support.rows import DAY, make_row


@pytest.fixture
def url(tmp_path: Path) -> str:
    url = f"sqlite://{tmp_path}/ledger.db"
    store = make_store(url)
    rows = [make_row(number) for number in range(4)]
    store.write([*rows, make_row(4, tier="free", arrived_at=DAY + 86_400)])
    store.close()
    return url


def headway(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), list(arguments))


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
        (["usage", "--since", "yesterday"], "is not a day or time"),
        (["usage", "--csv", "--json"], "not both"),
        (["explain", "x", "--url", "ftp://x"], "must start with http"),
        (["explain", "x", "--url", "http://[x"], "that `headway serve` says"),
        (["explain", "x", "--url", "http://a b"], "that `headway serve` says"),
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


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    for content in ("", "this is no database at all"):
        path.write_text(content)
        said = str(headway("usage", "--ledger-url", f"sqlite://{path}").exception)
        assert str(path) in said
        assert said.endswith("set --ledger-url")


def test_a_locked_ledger_says_to_try_again(url: str) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite://"), isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        for command in (["usage"], ["explain", "cmpl-3"]):
            said = str(headway(*command, "--ledger-url", url).exception)
            assert "database is locked; another process is using it; try again" in said


@pytest.mark.parametrize("content", [b"[1]", b"{}", b"not JSON"])
def test_another_server_is_no_traceback(content: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        result = headway("explain", "x", "--url", f"http://127.0.0.1:{server.server_port}")
    assert isinstance(result.exception, HeadwayError)


@pytest.mark.parametrize("form", ["--csv", "--json"])
@pytest.mark.parametrize("sink", ["/dev/full", "closed pipe"])
def test_output_that_nobody_takes_is_no_traceback(url: str, form: str, sink: str) -> None:
    command = [sys.executable, "-m", "headway", "usage", form, "--ledger-url", url]
    if sink == "/dev/full":
        out = os.open(sink, os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    try:
        result = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT
        )
    finally:
        os.close(out)
    assert (result.returncode, "Error" in result.stderr) == (1, False), result.stderr
