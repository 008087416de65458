"""One connection to an SQL database, opened on first use and again after an error.

SQLite and PostgreSQL run the same statements; the dialects hold the differences. Every call may
block as long as the database does, so no call belongs on the event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import HeadwayError

PAGE_ROWS = 500
"""Rows of a streamed query that are in memory at a time."""


def open_cursor(connection: Any) -> Any:
    """Return a plain cursor."""
    return connection.cursor()


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the databases."""

    connect: Callable[[], Any]
    error: type[Exception]
    param: str
    begin: str
    """Statement that begins a write transaction."""
    lock_schema: str = ""
    """Statement that makes others wait who create the same tables, if `begin` does not."""
    location: str = ""
    """Location of the database for messages, without a password."""
    open_stream: Callable[[Any], Any] = open_cursor
    """Returns a cursor that leaves the rows of a query in the database until they are fetched."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one user of a database, and their version."""

    name: str
    """What the tables are, for messages."""
    version: int
    version_table: str
    tables: tuple[str, ...]
    """Statements that create the tables and indices where they are missing."""
    error: type[HeadwayError]

    @property
    def statements(self) -> list[str]:
        table = self.version_table
        return [
            f"CREATE TABLE IF NOT EXISTS {table} (version BIGINT PRIMARY KEY)",
            f"INSERT INTO {table} (version) SELECT {self.version} "
            f"WHERE NOT EXISTS (SELECT 1 FROM {table})",
            *self.tables,
        ]


class SqlConnection:
    """Runs transactions and queries; every method raises the error of the schema."""

    def __init__(self, dialect: Dialect, schema: Schema, is_reader: bool = False) -> None:
        """Make a connection that is not open yet; a reader does not create tables."""
        self.param = dialect.param
        self._dialect = dialect
        self._schema = schema
        self._is_reader = is_reader
        self._connection: Any = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """Yield a cursor; commit at the end, or roll back after an exception."""
        with self._cursor() as cursor:
            cursor.execute(self._dialect.begin)
            yield cursor
            cursor.execute("COMMIT")

    def query(self, text: str, parameters: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._cursor() as cursor:
            cursor.execute(text, parameters)
            return cursor.fetchall()

    def stream(self, text: str, parameters: Sequence[object]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query; a page of them is in memory."""
        with self._cursor(self._dialect.open_stream) as cursor, contextlib.closing(cursor):
            cursor.execute(text, parameters)
            while rows := cursor.fetchmany(PAGE_ROWS):
                yield from rows

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(self._dialect.error):
                connection.close()

    @contextlib.contextmanager
    def _cursor(self, open_one: Callable[[Any], Any] = open_cursor) -> Iterator[Any]:
        """Yield a cursor; any error closes the connection and drops its transaction."""
        try:
            if self._connection is None:
                self._connection = self._dialect.connect()
                self._ensure_schema(self._connection.cursor())
            yield open_one(self._connection)
        except (self._dialect.error, OSError) as error:
            self.close()
            problem = " ".join(str(error).split()) or type(error).__name__
            place = f"the {self._schema.name}{self._dialect.location}"
            raise self._schema.error(f"{place}: {problem}") from error
        except BaseException:
            self.close()
            raise

    def _ensure_schema(self, cursor: Any) -> None:
        """Create the tables of a new database, or check the schema version."""
        schema = self._schema
        if not self._is_reader:
            cursor.execute(self._dialect.begin)
            if self._dialect.lock_schema:
                cursor.execute(self._dialect.lock_schema)
            for statement in schema.statements:
                cursor.execute(statement)
            cursor.execute("COMMIT")
        cursor.execute(f"SELECT MAX(version) FROM {schema.version_table}")
        found = cursor.fetchone()[0]
        if found != schema.version:
            raise schema.error(
                f"the {schema.name} has schema version {found}; this release of Headway writes "
                f"{schema.version}"
            )
