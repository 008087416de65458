from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.postgres import PostgresServer


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> Iterator[str]:
    import psycopg

    yield postgres.url
    with psycopg.connect(postgres.url) as connection:
        connection.execute("DROP TABLE IF EXISTS headway_requests, headway_schema")


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite://{tmp_path}/ledger.db"


@pytest.fixture(params=["sqlite", "postgres"])
def any_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(f"{request.param}_url")
