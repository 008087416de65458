"""Apps with files and batches over scripted engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.support.postgres import PostgresServer
from headway.config import BatchConfig
from headway.observe.ledger.connection import Dialect
from headway.observe.ledger.databases import dialect_of, sqlite_dialect
from headway.server.batches.folder import BatchFolder
from headway.server.batches.store import BatchStore
from headway.text import Tokenizer
from tests.support.local_engine import make_local

MakeApp = Callable[..., Awaitable[SimpleNamespace]]


class WallClock:
    """A time of day that a test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def wall() -> WallClock:
    return WallClock()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.full)])
def dialect(request: pytest.FixtureRequest, tmp_path: Path) -> Dialect:
    """Both databases; each test has a folder, and so records, of its own."""
    if request.param == "sqlite":
        return sqlite_dialect(tmp_path / "batches" / "batches.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    return dialect_of(server.url)


@pytest.fixture
def open_store(tmp_path: Path, wall: WallClock, dialect: Dialect) -> Callable[..., BatchStore]:
    def make(**settings: Any) -> BatchStore:
        folder = BatchFolder(tmp_path / "batches")
        return BatchStore(BatchConfig(**settings), folder, dialect, wall)

    return make


@pytest.fixture
async def batch_app(
    tokenizer: Tokenizer, open_store: Callable[..., BatchStore]
) -> AsyncIterator[MakeApp]:
    """Makes apps; `client(key)` returns a client, `store` has the files."""
    async with AsyncExitStack() as stack:

        async def make(
            script: Any = "abc", batches: dict[str, Any] | None = None, **config: Any
        ) -> SimpleNamespace:
            store = open_store(**(batches or {}))
            stack.callback(store.close)
            policy = config.pop("policy", "fair")
            made = await make_local(tokenizer, script, policy, batches=store, **config)
            stack.push_async_callback(made.engine.close)

            def client(key: str = "") -> httpx.AsyncClient:
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                transport = httpx.ASGITransport(made.app)
                return httpx.AsyncClient(
                    transport=transport, base_url="http://localhost", headers=headers
                )

            made.client, made.store = client, store
            return made

        yield make
