"""Databases of the ledger, by URL."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from headway.errors import ConfigError, LedgerError
from headway.observe.ledger.connection import Dialect
from headway.observe.ledger.store import SqlStore

LOCK_WAIT_S = 1.0
CONNECT_S = 5
"""Timeout of one attempt to connect to PostgreSQL."""
_SCHEMA_LOCK = 7_234_298_755
"""Any number that no other program takes for its advisory locks."""
_FILE_MODE = 0o600
_DIR_MODE = 0o700
_HOW = "use sqlite:///path/to/ledger.db, postgresql://user@host/database, or none"


def sqlite_path(url: str) -> Path | None:
    """Return the file of an SQLite ledger; None for another database."""
    parts = _split(url)
    if parts.scheme != "sqlite":
        return None
    if parts.netloc or not parts.path.strip("/"):
        raise ConfigError(f"ledger_url {url!r} names no file; {_HOW}")
    return Path(unquote(parts.path))


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # urlsplit checks the port only on access
        return parts
    except ValueError as error:
        raise ConfigError(f"ledger_url is not a URL: {error}; {_HOW}") from error


def make_store(url: str, is_reader: bool = False) -> SqlStore:
    """Return a store for this URL; the store connects on first use."""
    return SqlStore(dialect_of(url, is_reader), is_reader)


def dialect_of(url: str, is_reader: bool = False) -> Dialect:
    """Return how to connect to the database of this URL; raise ConfigError if there is no way."""
    path = sqlite_path(url)
    if path is not None:
        return sqlite_dialect(path, is_reader)
    if urlsplit(url).scheme in ("postgres", "postgresql"):
        return _postgres(url)
    raise ConfigError(f"ledger_url: unsupported database {urlsplit(url).scheme or url!r}; {_HOW}")


def sqlite_dialect(path: Path, is_reader: bool = False) -> Dialect:
    """Return how to connect to a file, which is created for a writer."""

    def connect() -> sqlite3.Connection:
        if is_reader and not path.exists():
            raise LedgerError(f"there is no ledger at {path}")
        if not is_reader:
            path.parent.mkdir(parents=True, exist_ok=True, mode=_DIR_MODE)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, _FILE_MODE))
        connection = sqlite3.connect(
            path, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
        try:
            if not is_reader:
                # In WAL mode readers and the writer do not block each other.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    return Dialect(connect, sqlite3.Error, "?", "BEGIN IMMEDIATE", location=f" {path}")


def _postgres(url: str) -> Dialect:
    try:
        import psycopg
    except ImportError as error:
        raise ConfigError(
            "a ledger_url of PostgreSQL needs psycopg: pip install 'headway[postgres]'"
        ) from error

    connect: Callable[..., Any] = psycopg.connect

    def open_connection() -> Any:
        return connect(
            url,
            autocommit=True,
            connect_timeout=CONNECT_S,
            # A lost host must be detected within seconds, not hours.
            keepalives_idle=CONNECT_S,
            keepalives_interval=CONNECT_S,
            keepalives_count=2,
            tcp_user_timeout=2 * CONNECT_S * 1000,
            options="-c statement_timeout=30s -c lock_timeout=5s",
        )

    # CREATE TABLE IF NOT EXISTS fails if two servers start together on a new database.
    lock = f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"
    return Dialect(
        open_connection, psycopg.Error, "%s", "BEGIN", lock, open_stream=_open_server_cursor
    )


def _open_server_cursor(connection: Any) -> Any:
    # A plain cursor of psycopg fetches all rows at once. Held: there is no transaction around it.
    return connection.cursor("headway_rows", withhold=True)
