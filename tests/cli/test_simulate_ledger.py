"""`headway simulate --from-ledger` as a person meets it."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from headway.cli.app import make_app
from headway.errors import HeadwayError
from headway.observe.ledger.databases import make_store
from headway.observe.ledger.usage import Row
from headway.sim.profile.machine import write_profile
from tests.sim.support import make_profile
from tests.support.rows import DAY, make_row

RUNS = ("--runs", "1")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    write_profile(tmp_path / "machine.json", make_profile())
    return str(tmp_path / "machine.json")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/ledger.db"


def request(number: int, **fields: Any) -> Row:
    given = {"num_output_tokens": 5, "max_tokens": 9, "arrived_at": DAY + 0.5 * number}
    return make_row(number, **(given | fields))


def write(url: str, *rows: Row) -> None:
    store = make_store(url)
    store.write(rows)
    store.close()


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(["simulate"]), ["simulate", *arguments])


def problem_of(result: Result) -> str:
    assert isinstance(result.exception, HeadwayError), result.exception
    return str(result.exception)


def test_requests_of_a_ledger_are_simulated(url: str, profile: str, tmp_path: Path) -> None:
    divided = request(6, num_parts=3, n=3, num_output_tokens=12)
    write(
        url,
        *(request(number) for number in range(6)),
        divided,
        request(7, num_output_tokens=0, finish_reason="abort"),
        replace(request(8), account="{"),
        request(9, max_tokens=0),
    )
    document = tmp_path / "figures.json"
    result = simulate(
        profile, "--from-ledger", url, *RUNS, "--set", "policy=fcfs", "--tenant", "b.weight=2",
        "--engines", "2", "--json", str(document),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    about = json.loads(document.read_text())["about"]
    assert about.startswith("2 engines, known on a test; 8 requests of the ledger, coarse: ")
    assert "1 left out that have no output, 1 left out that cannot be read" in about
    assert "1 had several prompts or samples, which are requests here (10 in all, 1 with" in about
    assert "1 by an older release have default terms and priority" in about
    assert " ".join(about.split()) in " ".join(result.stdout.split())
    assert "1 run of 10 requests" in result.stdout
    assert re.search(r"^ *a +6 .*\n *b +4 ", result.stdout, re.MULTILINE), result.stdout


def test_a_range_is_by_arrival(url: str, profile: str) -> None:
    write(url, *(request(number, arrived_at=DAY + number) for number in range(10)))

    def num_requests(*span: str) -> str:
        result = simulate(profile, "--from-ledger", url, *RUNS, *span)
        return result.stdout.split("; ")[1].split(" ")[0]

    assert num_requests("--since", "2027-01-15T08:00:04") == "6"
    assert num_requests("--since", "2027-01-15T08:00:04", "--until", "2027-01-15T08:00:06") == "2"
    assert num_requests("--until", "2027-01-15T09:00:01+01:00") == "1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "recordings"], "--from-ledger excludes --from and --closed-loop"),
        (["--closed-loop"], "--from-ledger excludes --from and --closed-loop"),
        (["--rate", "5"], "--from-ledger excludes --rate: the ledger has the load"),
        (["--num-requests", "5"], "--from-ledger excludes --num-requests"),
        (["--since", "yesterday"], "--since: 'yesterday' is not a day or time"),
        (["--since", "2027-02-01", "--until", "2027-01-01"], "must be before --until 2027-01-01"),
        (["--since", "2027-01-01", "--until", "2027-01-01"], "must be before --until"),
        (["--since", "2028-01-01"], "has no request with an output token since 2028-01-01; `head"),
        (["--tenant", "c.weight=2"], "the load has no tenant 'c'"),
        (["--set", "colour=red"], "unknown setting 'colour'"),
        (["--set", "max_model_len=12"], "--set max_model_len=N simulates a longer one"),
    ],
)
def test_a_mistake_is_named(url: str, profile: str, arguments: list[str], words: str) -> None:
    write(url, *(request(number) for number in range(3)))
    assert words in problem_of(simulate(profile, "--from-ledger", url, *RUNS, *arguments))


def test_a_ledger_has_no_step_times(url: str) -> None:
    write(url, request(1))
    said = problem_of(simulate("--from-ledger", url))
    assert said.startswith("a profile is needed, as a ledger has no step times")


@pytest.mark.parametrize("arguments", [["--since", "2027-01-01"], ["--until", "2027-01-01"]])
def test_a_range_needs_a_ledger(profile: str, arguments: list[str]) -> None:
    assert "--since and --until need --from-ledger" in problem_of(simulate(profile, *arguments))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sqlite://FOLDER/none.db", "there is no ledger at FOLDER/none.db; start a server"),
        ("mysql://x/y", "unsupported database 'mysql'; use sqlite:///path"),
        ("none", "there is no ledger; name one with --from-ledger"),
        ("ledger.db", "use sqlite:///path"),
        ("auto", "there is no ledger at FOLDER/state/headway/ledger.db; start a server"),
    ],
)
def test_a_ledger_that_is_not_there(
    name: str, words: str, profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    said = problem_of(simulate(profile, "--from-ledger", name.replace("FOLDER", str(tmp_path))))
    assert words.replace("FOLDER", str(tmp_path)) in said
    assert "--ledger-url" not in said


def test_a_ledger_without_output_says_what_it_has(url: str, profile: str) -> None:
    write(url, request(1, num_output_tokens=0), replace(request(2), account="no JSON"))
    said = problem_of(simulate(profile, "--from-ledger", url))
    assert "1 left out that have no output, 1 left out that cannot be read" in said


@pytest.mark.parametrize("name", ["[/b]", "[red]", ":fire:", "a.b", "ß" * 300, "a'; DROP TABLE x"])
def test_a_tenant_may_have_any_name(url: str, profile: str, name: str, tmp_path: Path) -> None:
    write(url, *(request(number, tenant=name) for number in range(3)))
    page = tmp_path / "page.html"
    result = simulate(
        profile, "--from-ledger", url, *RUNS, "--tenant", f"{name}.weight=2", "--html", str(page)
    )
    assert result.exit_code == 0, result.output
    assert name[:4] in result.stdout


@pytest.mark.parametrize("content", [b"\xff\xfe", 5, b"{}", "5e999", '{"id":"x","state":1}'])
def test_a_row_that_another_program_wrote_is_no_traceback(
    url: str, profile: str, content: object
) -> None:
    write(url, *(request(number) for number in range(3)))
    with closing(sqlite3.connect(url.removeprefix("sqlite://"))) as connection:
        connection.execute(
            "UPDATE headway_requests SET account = ? WHERE request_id = 'cmpl-1'", [content]
        )
        connection.commit()
    result = simulate(profile, "--from-ledger", url, *RUNS)
    assert result.exit_code == 0, result.exception
    assert "2 requests of the ledger" in result.stdout
    assert "1 left out that cannot be read" in " ".join(result.stdout.split())
