"""PostgreSQL for the tests that need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.support.postgres import PostgresServer, find_binaries

BOTH_DATABASES = pytest.mark.parametrize("dialect", ["sqlite", "postgres"], indirect=True)
"""For tests of batches that run over PostgreSQL by default too; the others do with --full."""


def make_server(folder: Path) -> PostgresServer:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server here: install Debian's package postgresql")
    return PostgresServer(folder, binaries)
