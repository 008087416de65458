"""The store of the ledger: one table of requests, in SQLite or PostgreSQL.

Writing a row twice changes nothing, so a writer that is not sure writes again. Every call may block
as long as the database does, so no call belongs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from headway.errors import LedgerError
from headway.observe.ledger.connection import Dialect, Schema, SqlConnection
from headway.observe.ledger.usage import Row
from headway.observe.trace.account import RequestAccount

VERSION = 1
GROUPS = ("tenant", "tier", "day")
PRUNE_ROWS = 1000
_COLUMNS = Row.__struct_fields__
_TYPES = {"str": "TEXT", "int": "BIGINT", "float": "DOUBLE PRECISION"}
_SUMS = (
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "recomputed_tokens",
    "speculative_tokens",
    "kv_block_s",
    "queue_s",
)
_COST_PART = 10**6
# SQLite refuses integer sums beyond 64 bits, which is 9 million currency units. So the cost is
# summed in two parts.
_COST_SUMS = (f"cost_e12 / {_COST_PART}", f"cost_e12 - cost_e12 / {_COST_PART} * {_COST_PART}")


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the requests of one group."""

    group: tuple[str, ...]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    speculative_tokens: int
    kv_block_s: float
    queue_s: float
    cost_e12: int


class TimeRange(msgspec.Struct, frozen=True):
    """Times in [since, until), in seconds since 1970; None is no bound."""

    since: float | None = None
    until: float | None = None


class UnreadableRow(msgspec.Struct, frozen=True):
    """A row whose account cannot be decoded."""

    request_id: str
    problem: str


class Store(Protocol):
    """Reads ledger rows; every method raises LedgerError if the database fails."""

    def find(self, name: str, tenant: str | None) -> RequestAccount | None:
        """Return a request by either id; of any tenant if `tenant` is None."""
        ...

    def totals(self, by: Sequence[str], span: TimeRange) -> list[Totals]:
        """Return sums over the requests that ended in a time range, by group."""
        ...

    def accounts(self, span: TimeRange) -> Iterator[RequestAccount | UnreadableRow]:
        """Yield the requests that arrived in a time range, in order of arrival."""
        ...

    def close(self) -> None: ...


class WritableStore(Protocol):
    """Writes ledger rows; every method raises LedgerError if the database fails."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write all rows or none."""
        ...

    def prune(self, before: float) -> int:
        """Delete some requests that ended before a time; return how many."""
        ...

    def close(self) -> None: ...


class SqlStore:
    """A store over one connection."""

    def __init__(self, dialect: Dialect, is_reader: bool = False) -> None:
        """Make a store; a reader does not create tables."""
        self._connection = SqlConnection(dialect, _schema(), is_reader)
        marks = ", ".join([dialect.param] * len(_COLUMNS))
        updates = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[1:])
        self._insert = (
            f"INSERT INTO headway_requests ({', '.join(_COLUMNS)}) VALUES ({marks}) "
            f"ON CONFLICT (request_id) DO UPDATE SET {updates} "
            "WHERE excluded.revision > headway_requests.revision"
        )

    def write(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        with self._connection.transaction() as cursor:
            cursor.executemany(self._insert, [msgspec.structs.astuple(row) for row in rows])

    def find(self, name: str, tenant: str | None) -> RequestAccount | None:
        param = self._connection.param
        where = f"(request_id = {param} OR client_id = {param})"
        parameters: list[object] = [name, name]
        if tenant is not None:
            where += f" AND tenant = {param}"
            parameters.append(tenant)
        rows = self._connection.query(
            f"SELECT account FROM headway_requests WHERE {where} "
            f"ORDER BY CASE WHEN request_id = {param} THEN 0 ELSE 1 END, finished_at DESC LIMIT 1",
            [*parameters, name],
        )
        return msgspec.json.decode(rows[0][0], type=RequestAccount) if rows else None

    def totals(self, by: Sequence[str], span: TimeRange) -> list[Totals]:
        columns = [name for name in by if name in GROUPS]
        bounds = [("finished_at >=", span.since), ("finished_at <", span.until)]
        where, parameters = self._where(bounds)
        group = f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}" if columns else ""
        sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in (*_SUMS, *_COST_SUMS))
        rows = self._connection.query(
            f"SELECT {', '.join([*columns, 'COUNT(*)'])}, {sums} FROM headway_requests"
            f"{where}{group}",
            parameters,
        )
        return [_totals(row, len(columns)) for row in rows]

    def accounts(self, span: TimeRange) -> Iterator[RequestAccount | UnreadableRow]:
        # Arrivals have no index, ends have one: a request ends after it arrives.
        bounds = [
            ("finished_at >=", span.since),
            ("arrived_at >=", span.since),
            ("arrived_at <", span.until),
        ]
        where, parameters = self._where(bounds)
        text = "SELECT request_id, account FROM headway_requests"
        for request_id, content in self._connection.stream(
            f"{text}{where} ORDER BY arrived_at, request_id", parameters
        ):
            yield _decode_account(request_id, content)

    def _where(self, bounds: Sequence[tuple[str, float | None]]) -> tuple[str, list[object]]:
        """Return a WHERE clause for the bounds that are set, and its parameters."""
        wanted = [(text, value) for text, value in bounds if value is not None]
        wheres = [f"{text} {self._connection.param}" for text, _ in wanted]
        clause = f" WHERE {' AND '.join(wheres)}" if wheres else ""
        return clause, [value for _, value in wanted]

    def prune(self, before: float) -> int:
        with self._connection.transaction() as cursor:
            cursor.execute(
                "DELETE FROM headway_requests WHERE request_id IN (SELECT request_id FROM "
                f"headway_requests WHERE finished_at < {self._connection.param} "
                f"LIMIT {PRUNE_ROWS})",
                [before],
            )
            return cursor.rowcount

    def close(self) -> None:
        self._connection.close()


def _decode_account(request_id: object, content: Any) -> RequestAccount | UnreadableRow:
    try:
        return msgspec.json.decode(content, type=RequestAccount)
    except (ValueError, TypeError, RecursionError) as error:
        return UnreadableRow(str(request_id), str(error))


def _schema() -> Schema:
    hints = {item.name: item.type for item in msgspec.structs.fields(Row)}
    columns = [
        f"{name} {_TYPES[hints[name].__name__]} {'PRIMARY KEY' if location == 0 else 'NOT NULL'}"
        for location, name in enumerate(_COLUMNS)
    ]
    tables = (
        f"CREATE TABLE IF NOT EXISTS headway_requests ({', '.join(columns)})",
        "CREATE INDEX IF NOT EXISTS headway_requests_finished ON headway_requests (finished_at)",
        "CREATE INDEX IF NOT EXISTS headway_requests_client ON headway_requests (client_id)",
    )
    return Schema("ledger", VERSION, "headway_schema", tables, LedgerError)


def _totals(row: Sequence[Any], num_columns: int) -> Totals:
    group, (requests, *sums, high, low) = row[:num_columns], row[num_columns:]
    values = dict(zip(_SUMS, sums, strict=True)) | {"cost_e12": int(high) * _COST_PART + int(low)}
    kinds = {item.name: item.type for item in msgspec.structs.fields(Totals)}
    # PostgreSQL returns sums of integers as decimals.
    converted = {name: kinds[name](value) for name, value in values.items()}
    return Totals(group=tuple(group), requests=requests, **converted)
