"""Both databases, with the same tests; PostgreSQL is a real server."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from headway.config import LedgerConfig
from headway.errors import ConfigError, LedgerError
from headway.observe.ledger.connection import PAGE_ROWS
from headway.observe.ledger.databases import make_store, sqlite_path
from headway.observe.ledger.ledger import ledger_url, spool_folder
from headway.observe.ledger.store import PRUNE_ROWS, TimeRange, UnreadableRow
from headway.observe.ledger.usage import MAX_COST_E12
from headway.observe.trace.account import RequestAccount
from tests.support.rows import DAY, make_row, numbers_in, totals


def test_a_row_is_written_once_however_often_it_is_put(any_url: str) -> None:
    store = make_store(any_url)
    rows = [make_row(number) for number in range(10)]
    store.write(rows)
    store.write(rows[3:])
    store.write([*rows, *rows])
    assert numbers_in(any_url) == (10, 45)
    store.close()


def test_the_highest_revision_counts_in_whatever_order_they_come(any_url: str) -> None:
    store = make_store(any_url)
    store.write([make_row(1, 2, num_output_tokens=20)])
    store.write([make_row(1, 1, num_output_tokens=10)])
    assert numbers_in(any_url) == (1, 20)
    store.write([make_row(1, 3, num_output_tokens=30)])
    assert numbers_in(any_url) == (1, 30)
    store.close()


def test_requests_are_found_by_both_ids_and_by_their_tenant(any_url: str) -> None:
    store = make_store(any_url)
    store.write([make_row(1), make_row(2), make_row(4, client_id="client-2", duration_s=9.0)])

    def found(name: str, tenant: str | None) -> str | None:
        account = store.find(name, tenant)
        return None if account is None else account.id

    assert (found("cmpl-1", "b"), found("cmpl-1", None)) == ("cmpl-1", "cmpl-1")
    assert (found("cmpl-1", "a"), found("cmpl-1", "")) == (None, None)
    assert (found("client-1", "b"), found("client-1", "a")) == ("cmpl-1", None)
    assert found("client-2", "a") == "cmpl-4", "of two with one name, the later"
    assert found("cmpl-9", None) is None
    # Somebody's own name for a request does not hide the one that has it as its id.
    store.write([make_row(3, client_id="cmpl-1", duration_s=99.0)])
    assert found("cmpl-1", None) == "cmpl-1"
    store.close()


def test_what_is_asked_is_never_part_of_a_statement(any_url: str) -> None:
    store = make_store(any_url)
    store.write([make_row(1)])
    assert store.find("x' OR '1'='1", None) is None
    assert store.find("cmpl-1", "b' OR 'a'='a") is None
    assert [total.group for total in store.totals(["tenant; DROP TABLE x"], TimeRange())] == [()]
    store.close()


def test_totals_by_tenant_tier_and_day(any_url: str) -> None:
    store = make_store(any_url)
    store.write([make_row(number) for number in range(4)])
    store.write([make_row(4, tier="free", arrived_at=DAY + 86_400)])
    by_tenant = {total.group: total for total in store.totals(["tenant"], TimeRange())}
    assert by_tenant["a",].output_tokens == 0 + 2 + 4
    assert by_tenant["b",].output_tokens == 1 + 3
    assert (by_tenant["a",].requests, by_tenant["a",].prompt_tokens) == (3, 30)
    assert by_tenant["a",].queue_s == pytest.approx(1.5)
    groups = [total.group for total in store.totals(["tenant", "tier", "day"], TimeRange())]
    assert groups == [
        ("a", "free", "2027-01-16"),
        ("a", "gold", "2027-01-15"),
        ("b", "gold", "2027-01-15"),
    ]
    (later,) = store.totals([], TimeRange(since=DAY + 10_000))
    (earlier,) = store.totals([], TimeRange(until=DAY + 10_000))
    assert (later.requests, earlier.requests) == (1, 4)
    (nothing,) = store.totals([], TimeRange(since=DAY + 10**6))
    assert (nothing.requests, nothing.cost_e12) == (0, 0)
    store.close()


def ids_in(url: str, span: TimeRange) -> list[str]:
    store = make_store(url, is_reader=True)
    found = [one.id for one in store.accounts(span) if isinstance(one, RequestAccount)]
    store.close()
    return found


def test_accounts_come_in_order_of_arrival_and_page_by_page(any_url: str) -> None:
    store = make_store(any_url)
    num_rows = 2 * PAGE_ROWS + 7
    rows = [make_row(n, arrived_at=DAY + num_rows - n) for n in range(num_rows)]
    store.write(rows)
    assert ids_in(any_url, TimeRange()) == [row.request_id for row in reversed(rows)]
    span = TimeRange(DAY + 3, DAY + 6)
    assert ids_in(any_url, span) == [rows[num_rows - at].request_id for at in (3, 4, 5)]
    assert ids_in(any_url, TimeRange(until=DAY + 2)) == [rows[-1].request_id]
    assert ids_in(any_url, TimeRange(since=DAY + 10**6)) == []
    assert next(store.accounts(TimeRange()))  # what is left is not read, and nothing stays open
    store.write([make_row(num_rows)])
    assert numbers_in(any_url)[0] == num_rows + 1
    store.close()


def test_a_request_that_ended_later_arrived_when_it_did(any_url: str) -> None:
    store = make_store(any_url)
    store.write([make_row(1, duration_s=900.0), make_row(2, arrived_at=DAY + 20.0)])
    store.close()
    assert ids_in(any_url, TimeRange(DAY, DAY + 10.0)) == ["cmpl-1"]
    assert ids_in(any_url, TimeRange(DAY + 10.0, DAY + 910.0)) == ["cmpl-2"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"id": 7}', "no JSON", '{"x":' + "[" * 9999])
def test_a_row_that_cannot_be_decoded_does_not_hide_the_others(any_url: str, content: str) -> None:
    store = make_store(any_url)
    rows = [make_row(number, arrived_at=DAY + number) for number in range(3)]
    store.write([rows[0], replace(rows[1], account=content), rows[2]])
    first, second, third = store.accounts(TimeRange())
    assert isinstance(first, RequestAccount) and isinstance(third, RequestAccount)
    assert isinstance(second, UnreadableRow)
    assert second.request_id == "cmpl-1" and second.problem
    store.close()


def test_totals_beyond_64_bits_are_exact(any_url: str) -> None:
    store = make_store(any_url)
    costs = [MAX_COST_E12, MAX_COST_E12 - 1, 999_999, 1]
    store.write([replace(make_row(n), cost_e12=cost) for n, cost in enumerate(costs)])
    assert sum(one.cost_e12 for one in store.totals([], TimeRange())) == sum(costs)
    store.close()


def test_an_error_nobody_thought_of_leaves_no_transaction_open(sqlite_url: str) -> None:
    store = make_store(sqlite_url)
    with pytest.raises(OverflowError):
        store.write([make_row(1), replace(make_row(2), cost_e12=2**63)])
    store.write([make_row(3)])
    assert numbers_in(sqlite_url) == (1, 3)
    store.close()


def test_old_rows_are_forgotten_a_few_at_a_time(any_url: str) -> None:
    store = make_store(any_url)
    num_old = PRUNE_ROWS + 5
    store.write([make_row(number) for number in range(num_old)])
    store.write([make_row(num_old, arrived_at=DAY + 100.0)])
    assert store.prune(DAY + 50.0) == PRUNE_ROWS
    assert store.prune(DAY + 50.0) == 5
    assert store.prune(DAY + 50.0) == 0
    assert numbers_in(any_url) == (1, num_old)
    store.close()


def test_a_ledger_of_another_version_is_not_touched(any_url: str) -> None:
    store = make_store(any_url)
    store.write([make_row(1)])
    with store._connection.transaction() as cursor:
        cursor.execute("UPDATE headway_schema SET version = 99")
    store.close()
    with pytest.raises(LedgerError, match="schema version 99"):
        store.write([make_row(2)])
    with pytest.raises(LedgerError, match="schema version 99"):
        totals(any_url)


def test_a_reader_makes_nothing(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/none/ledger.db"
    with pytest.raises(LedgerError, match="there is no ledger at"):
        totals(url)
    assert not (tmp_path / "none").exists()


def test_the_file_is_for_its_owner_and_in_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "ledger.db"
    store = make_store(f"sqlite://{path}")
    store.write([make_row(1)])
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "mysql://x/y",
        "ledger.db",
        "sqlite://",
        "sqlite://host/x",
        "postgresql://[x",
        "postgresql://x:five/y",
    ],
)
def test_urls_that_name_no_ledger(url: str) -> None:
    with pytest.raises(ConfigError, match="use sqlite:///path"):
        make_store(url)


def test_the_spool_of_another_database_does_not_depend_on_the_password() -> None:
    one = spool_folder("postgresql://me:secret@db:5432/ledger")
    assert one == spool_folder("postgresql://me:changed@db:5432/ledger")
    assert one != spool_folder("postgresql://me:secret@db:5432/other")
    assert "secret" not in str(one)


def test_a_server_that_is_not_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    store = make_store(f"postgresql://x@/y?host={tmp_path}")
    with pytest.raises(LedgerError, match="the ledger: "):
        store.write([make_row(1)])


def test_a_state_folder_may_have_any_name(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "a#b?c%41"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    assert sqlite_path(ledger_url(LedgerConfig())) == folder / "headway" / "ledger.db"
