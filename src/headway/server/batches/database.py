"""The records of files and batches in a database, SQLite or PostgreSQL.

A record is a JSON document under its id. Several servers may use one database: each reads and
writes the records of its own folder only, in the order in which they were added. Every call may
block.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.errors import BatchStoreError
from headway.observe.ledger.connection import Dialect, Schema, SqlConnection
from headway.server.batches.records import BatchRecord, FileRecord

Record = FileRecord | BatchRecord
SCHEMA = Schema(
    "batch store",
    2,
    "headway_batch_schema",
    (
        "CREATE TABLE IF NOT EXISTS headway_batch_folders "
        "(folder TEXT PRIMARY KEY, num_starts BIGINT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS headway_batch_records (id TEXT PRIMARY KEY, "
        "folder TEXT NOT NULL, number BIGINT NOT NULL, kind TEXT NOT NULL, "
        "document TEXT NOT NULL, UNIQUE (folder, number))",
    ),
    BatchStoreError,
)
_KINDS: dict[str, type[Record]] = {"file": FileRecord, "batch": BatchRecord}


class BatchDatabase:
    """The records of one folder; every method raises BatchStoreError if the database fails."""

    def __init__(self, dialect: Dialect, folder_id: str) -> None:
        self._connection = SqlConnection(dialect, SCHEMA)
        self._folder_id = folder_id

    def count_start(self) -> int:
        """Return how often a server has used this folder, this time included."""
        param = self._connection.param
        with self._connection.transaction() as cursor:
            cursor.execute(
                f"INSERT INTO headway_batch_folders (folder, num_starts) VALUES ({param}, 1) "
                "ON CONFLICT (folder) DO UPDATE "
                "SET num_starts = headway_batch_folders.num_starts + 1",
                [self._folder_id],
            )
        found = self._connection.query(
            f"SELECT num_starts FROM headway_batch_folders WHERE folder = {param}",
            [self._folder_id],
        )
        return int(found[0][0])

    def load(self) -> list[Record]:
        """Return every record of the folder, the one that was added first at the start."""
        found = self._connection.query(
            "SELECT kind, document FROM headway_batch_records WHERE folder = "
            f"{self._connection.param} ORDER BY number",
            [self._folder_id],
        )
        return [msgspec.json.decode(document, type=_KINDS[kind]) for kind, document in found]

    def write(self, records: Sequence[Record], removed_ids: Sequence[str] = ()) -> None:
        """Write records and remove others, all or none."""
        mark = self._connection.param
        with self._connection.transaction() as cursor:
            for record in records:
                kind = "file" if isinstance(record, FileRecord) else "batch"
                document = msgspec.json.encode(record).decode()
                cursor.execute(
                    "INSERT INTO headway_batch_records (id, folder, number, kind, document) "
                    f"SELECT {mark}, {mark}, COALESCE(MAX(number), 0) + 1, {mark}, {mark} "
                    f"FROM headway_batch_records WHERE folder = {mark} "
                    "ON CONFLICT (id) DO UPDATE SET document = excluded.document",
                    [record.id, self._folder_id, kind, document, self._folder_id],
                )
            for record_id in removed_ids:
                cursor.execute(
                    f"DELETE FROM headway_batch_records WHERE id = {mark} AND folder = {mark}",
                    [record_id, self._folder_id],
                )

    def close(self) -> None:
        self._connection.close()
