"""The store of the ledger: one table of requests, in SQLite or PostgreSQL.

Both run the same statements; the dialects hold the differences. Writing a row twice changes
nothing, so a writer that is not sure writes again. Every call may block as long as the database
does, so no call belongs on the event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headway.errors import LedgerError
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
    """Requests that ended in [start, end), in seconds since 1970."""

    since: float | None = None
    until: float | None = None


class Store(Protocol):
    """Storage of ledger rows; every method raises LedgerError if the database fails."""

    def write(self, rows: Sequence[Row]) -> None:
        """Write all rows or none."""
        ...

    def find(self, name: str, tenant: str | None) -> RequestAccount | None:
        """Return a request by either id; of any tenant if `tenant` is None."""
        ...

    def totals(self, by: Sequence[str], span: TimeRange) -> list[Totals]: ...

    def prune(self, before: float) -> int:
        """Delete some requests that ended before a time; return how many."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the databases."""

    connect: Callable[[], Any]
    error: type[Exception]
    param: str
    begin: str
    """Statement that begins a write transaction."""
    location: str = ""
    """Location of the database for messages, without a password."""


class SqlStore:
    """A store over one connection, opened on first use and again after an error."""

    def __init__(self, dialect: Dialect, is_reader: bool = False) -> None:
        """Make a store; a reader does not create tables."""
        self._dialect = dialect
        self._is_reader = is_reader
        self._connection: Any = None
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
        with self._transaction() as cursor:
            cursor.executemany(self._insert, [msgspec.structs.astuple(row) for row in rows])

    def find(self, name: str, tenant: str | None) -> RequestAccount | None:
        param = self._dialect.param
        where = f"(request_id = {param} OR client_id = {param})"
        parameters: list[object] = [name, name]
        if tenant is not None:
            where += f" AND tenant = {param}"
            parameters.append(tenant)
        rows = self._query(
            f"SELECT account FROM headway_requests WHERE {where} "
            f"ORDER BY CASE WHEN request_id = {param} THEN 0 ELSE 1 END, finished_at DESC LIMIT 1",
            [*parameters, name],
        )
        return msgspec.json.decode(rows[0][0], type=RequestAccount) if rows else None

    def totals(self, by: Sequence[str], span: TimeRange) -> list[Totals]:
        columns = [name for name in by if name in GROUPS]
        bounds = [("finished_at >=", span.since), ("finished_at <", span.until)]
        parameters = [(text, value) for text, value in bounds if value is not None]
        wheres = [f"{text} {self._dialect.param}" for text, _ in parameters]
        where = f" WHERE {' AND '.join(wheres)}" if wheres else ""
        group = f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)}" if columns else ""
        sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in (*_SUMS, *_COST_SUMS))
        rows = self._query(
            f"SELECT {', '.join([*columns, 'COUNT(*)'])}, {sums} FROM headway_requests"
            f"{where}{group}",
            [value for _, value in parameters],
        )
        return [_totals(row, len(columns)) for row in rows]

    def prune(self, before: float) -> int:
        with self._transaction() as cursor:
            cursor.execute(
                "DELETE FROM headway_requests WHERE request_id IN (SELECT request_id FROM "
                f"headway_requests WHERE finished_at < {self._dialect.param} LIMIT {PRUNE_ROWS})",
                [before],
            )
            return cursor.rowcount

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(self._dialect.error):
                connection.close()

    # -------------------------------------------------------------- connection

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        with self._cursor() as cursor:
            cursor.execute(self._dialect.begin)
            yield cursor
            cursor.execute("COMMIT")

    def _query(self, text: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._cursor() as cursor:
            cursor.execute(text, parameters)
            return cursor.fetchall()

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[Any]:
        """Yield a cursor; any error closes the connection and drops its transaction."""
        try:
            if self._connection is None:
                self._connection = self._dialect.connect()
                self._ensure_schema(self._connection.cursor())
            yield self._connection.cursor()
        except (self._dialect.error, OSError) as error:
            self.close()
            problem = " ".join(str(error).split()) or type(error).__name__
            raise LedgerError(f"the ledger{self._dialect.location}: {problem}") from error
        except BaseException:
            self.close()
            raise

    def _ensure_schema(self, cursor: Any) -> None:
        """Create the tables of a new database, or check the schema version."""
        if not self._is_reader:
            cursor.execute(self._dialect.begin)
            for statement in _schema():
                cursor.execute(statement)
            cursor.execute("COMMIT")
        cursor.execute("SELECT MAX(version) FROM headway_schema")
        found = cursor.fetchone()[0]
        if found != VERSION:
            raise LedgerError(
                f"the ledger has schema version {found}; this release of Headway writes {VERSION}"
            )


def _schema() -> list[str]:
    hints = {item.name: item.type for item in msgspec.structs.fields(Row)}
    columns = [
        f"{name} {_TYPES[hints[name].__name__]} {'PRIMARY KEY' if location == 0 else 'NOT NULL'}"
        for location, name in enumerate(_COLUMNS)
    ]
    return [
        "CREATE TABLE IF NOT EXISTS headway_schema (version BIGINT PRIMARY KEY)",
        f"INSERT INTO headway_schema (version) SELECT {VERSION} "
        "WHERE NOT EXISTS (SELECT 1 FROM headway_schema)",
        f"CREATE TABLE IF NOT EXISTS headway_requests ({', '.join(columns)})",
        "CREATE INDEX IF NOT EXISTS headway_requests_finished ON headway_requests (finished_at)",
        "CREATE INDEX IF NOT EXISTS headway_requests_client ON headway_requests (client_id)",
    ]


def _totals(row: Sequence[Any], num_columns: int) -> Totals:
    group, (requests, *sums, high, low) = row[:num_columns], row[num_columns:]
    values = dict(zip(_SUMS, sums, strict=True)) | {"cost_e12": int(high) * _COST_PART + int(low)}
    kinds = {item.name: item.type for item in msgspec.structs.fields(Totals)}
    # PostgreSQL returns sums of integers as decimals.
    converted = {name: kinds[name](value) for name, value in values.items()}
    return Totals(group=tuple(group), requests=requests, **converted)
