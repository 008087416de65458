"""Reads ledgers in SQLite files."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path


def read_ledger(path: Path) -> dict[str, int]:
    """Return the output tokens of each request."""
    if not path.exists():
        return {}
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT request_id, output_tokens FROM headway_requests")
        return dict(rows.fetchall())
