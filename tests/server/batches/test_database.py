"""The records of batches, with the same tests over SQLite and a real PostgreSQL server."""

from __future__ import annotations

import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from benchmarks.support.postgres import PostgresServer
from headway.config import BatchConfig, LedgerConfig
from headway.errors import BatchStoreError
from headway.observe.ledger.connection import Dialect
from headway.observe.ledger.databases import dialect_of
from headway.server.batches.database import BatchDatabase
from headway.server.batches.records import BatchRecord, FileRecord, RequestCounts
from headway.server.batches.store import open_batch_store
from tests.support.postgres import BOTH_DATABASES

TABLES = "headway_batch_schema, headway_batch_folders, headway_batch_records"


def new_id() -> str:
    return uuid.uuid4().hex


def new_file(**fields: Any) -> FileRecord:
    known: dict[str, Any] = {"purpose": "batch", "created_at": 5, "expires_at": 9}
    named = {"id": new_id(), "tenant": "t", "filename": "in.jsonl", "num_bytes": 1}
    return FileRecord(**{**known, **named, **fields})


def new_batch() -> BatchRecord:
    return BatchRecord(
        id=new_id(),
        tenant="t",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=5,
        expires_at=9,
        output_id="out",
        error_id="err",
        output_keep_s=60,
    )


@BOTH_DATABASES
def test_records_come_back_in_the_order_in_which_they_were_added(dialect: Dialect) -> None:
    mine, other = BatchDatabase(dialect, new_id()), BatchDatabase(dialect, new_id())
    files = [new_file() for _ in range(20)]
    for one in files:
        mine.write([one])
    # An update moves a row of PostgreSQL to the end of its table.
    for number in (3, 0, 11):
        files[number] = replace(files[number], num_bytes=7)
        mine.write([files[number]])
    batches = [new_batch(), new_batch()]
    mine.write(batches, [files[19].id, "no-such"])
    expected = [*files[:19], *batches]
    assert mine.load() == expected
    assert other.load() == []
    other.write([], [files[0].id])
    assert mine.load() == expected, "nobody removes a record of another folder"
    mine.write([], [one.id for one in expected])
    assert mine.load() == []
    mine.close()
    other.close()


@BOTH_DATABASES
def test_a_record_keeps_every_character(dialect: Dialect) -> None:
    folder_id = new_id()
    database = BatchDatabase(dialect, folder_id)
    file = new_file(filename="a\x00'%s?\"\\\n\u2028\U0001f600", tenant="%(x)s'; --")
    counts = RequestCounts(3, 2, 1)
    batch = new_batch().become("completed", 7.9, counts=counts, metadata={"\x00": "\u00e9"})
    database.write([file, batch])
    database.close()
    again = BatchDatabase(dialect, folder_id)
    assert again.load() == [file, batch]
    again.close()


@BOTH_DATABASES
def test_records_are_written_all_or_none(dialect: Dialect) -> None:
    database = BatchDatabase(dialect, new_id())
    first, second = new_file(), new_file()
    database.write([first])
    changed = replace(first, num_bytes=2)
    with pytest.raises(UnicodeEncodeError):
        database.write([changed, second, new_file(filename="\ud800")], [first.id])
    assert database.load() == [first]
    database.write([changed, second])
    assert database.load() == [changed, second]
    database.close()


@BOTH_DATABASES
def test_starts_are_counted_by_folder(dialect: Dialect) -> None:
    folder_id = new_id()
    for number in (1, 2, 3):
        database = BatchDatabase(dialect, folder_id)
        assert database.count_start() == number
        database.close()


def test_servers_may_start_together_on_a_new_database(postgres: PostgresServer) -> None:
    with psycopg.connect(postgres.url) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {TABLES}")
    together = Barrier(8)

    def start(_number: int) -> int:
        database = BatchDatabase(dialect_of(postgres.url), new_id())
        together.wait()
        try:
            return database.count_start()
        finally:
            database.close()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(start, range(8))) == [1] * 8


async def test_a_ledger_in_postgres_has_the_records_too(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    config, ledger = BatchConfig(batch_dir=str(tmp_path)), LedgerConfig(ledger_url=postgres.url)
    store = open_batch_store(config, ledger)
    assert store is not None
    await store.add_file(file := new_file(expires_at=2**40))
    store.close()
    assert not (tmp_path / "batches.db").exists()
    again = open_batch_store(config, ledger)
    assert again is not None
    assert again.files_of("t") == [file]
    again.close()


async def test_a_store_outlives_a_crash_of_postgres(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    config, ledger = BatchConfig(batch_dir=str(tmp_path)), LedgerConfig(ledger_url=postgres.url)
    store = open_batch_store(config, ledger)
    assert store is not None
    await store.add_file(before := new_file(expires_at=2**40))
    postgres.stop(signal.SIGQUIT)
    try:
        with pytest.raises(BatchStoreError):
            await store.add_file(new_file(expires_at=2**40))
    finally:
        postgres.start()
    await store.add_file(after := new_file(expires_at=2**40))
    assert store.files_of("t") == [before, after]
    store.close()
    again = open_batch_store(config, ledger)
    assert again is not None
    assert again.files_of("t") == [before, after]
    again.close()


def test_a_database_out_of_reach_leaves_the_folder_free(tmp_path: Path) -> None:
    config = BatchConfig(batch_dir=str(tmp_path / "batches"))
    url = f"postgresql://x@/y?host={tmp_path}"
    for _ in range(2):
        with pytest.raises(BatchStoreError, match="batch store"):
            open_batch_store(config, LedgerConfig(ledger_url=url))
    store = open_batch_store(config, LedgerConfig(ledger_url="none"))
    assert store is not None
    store.close()
