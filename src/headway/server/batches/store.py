"""The files and batches of this server.

One owner of the records: they are read from the database once, then kept in memory, and each change
is in the database before it is visible. Methods without `async` do not block.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

from headway.config import BatchConfig, LedgerConfig
from headway.errors import InvalidRequestError
from headway.observe.ledger.connection import Dialect
from headway.observe.ledger.databases import dialect_of, sqlite_dialect, sqlite_path
from headway.observe.ledger.ledger import OFF, ledger_url
from headway.server.batches.database import BatchDatabase, Record
from headway.server.batches.folder import BatchFolder
from headway.server.batches.records import BatchRecord, FileRecord
from headway.server.http.errors import ApiError, ErrorResponse

logger = logging.getLogger(__name__)
T = TypeVar("T")

DAY_S = 86_400
MAX_FILES = 1000
"""Files of one tenant, results included."""
MAX_OPEN_BATCHES = 100
"""Batches of one tenant that have not ended."""
MAX_ALL_OPEN, MAX_ALL_FILES = 10_000, 100_000
"""The same for all tenants together."""
MAX_BATCHES = 1000
"""Batches of one tenant; beyond, the one that ended first is forgotten."""
MAX_TRANSFERS, MAX_TENANT_TRANSFERS = 16, 4
"""Files that are uploaded or downloaded at a time; each takes a descriptor."""
WRITE_BYTES = 256 * 1024
"""Bytes of an upload that are collected before they are written."""
_BUSY = ErrorResponse(
    503,
    "the server has too many files or batches of others; try again later",
    "service_unavailable_error",
    "server_is_overloaded",
    headers={"Retry-After": "2"},
)
_BUSY_TENANT = ErrorResponse(
    429,
    f"{MAX_TENANT_TRANSFERS} files of this tenant are being transferred; wait for one to end",
    "rate_limit_error",
    "rate_limit_exceeded",
    headers={"Retry-After": "2"},
)


class BatchStore:
    """Finds, adds and removes files and batches."""

    def __init__(
        self,
        config: BatchConfig,
        folder: BatchFolder,
        dialect: Dialect,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        """Read the records; blocks, and raises BatchStoreError if the database fails."""
        self.config = config
        self.folder = folder
        self.time_of_day = time_of_day
        self.changed = asyncio.Event()
        """Set when the feeder may have something to do."""
        self._changes = asyncio.Lock()
        self._database = BatchDatabase(dialect, folder.id)
        self._pool = ThreadPoolExecutor(1, "batches")
        self._files: dict[str, FileRecord] = {}
        self._stored: Counter[str] = Counter()
        """Bytes of files, by tenant."""
        self._batches: dict[str, BatchRecord] = {}
        self._open_ids: dict[str, None] = {}
        """Ids of the batches that have not ended."""
        self._uploading: Counter[str] = Counter()
        """Bytes of unfinished uploads, by tenant."""
        self._transfers: Counter[str] = Counter()
        self.num_starts = self._database.count_start()
        """How often a server has used the folder; grows with each start."""
        for record in self._database.load():
            self._keep(record)
        results = {name for one in self.open_batches() for name in (one.output_id, one.error_id)}
        folder.remove_others(self._files.keys() | results)

    def close(self) -> None:
        """Wait for the writes under way, then free the folder; blocks."""
        self._pool.submit(self._database.close)
        self._pool.shutdown()
        self.folder.close()

    # ------------------------------------------------------------------- files

    def find_file(self, file_id: str, tenant: str) -> FileRecord | None:
        """Return a file of a tenant that has not expired."""
        record = self._files.get(file_id)
        if record is None or record.tenant != tenant or record.expires_at <= self.time_of_day():
            return None
        return record

    def files_of(self, tenant: str) -> list[FileRecord]:
        """Return the files of a tenant, oldest first."""
        now = self.time_of_day()
        found = self._files.values()
        return [one for one in found if one.tenant == tenant and one.expires_at > now]

    def batch_using(self, file_id: str) -> BatchRecord | None:
        """Return the batch that still reads a file."""
        return next((one for one in self.open_batches() if one.input_file_id == file_id), None)

    async def remove_file(self, record: FileRecord) -> None:
        await self._write([], [record])

    @contextmanager
    def transfer(self, tenant: str) -> Generator[None, None, None]:
        """Count an upload or a download of a tenant, or refuse it."""
        if self._transfers[tenant] >= MAX_TENANT_TRANSFERS:
            raise ApiError(_BUSY_TENANT)
        if self._transfers.total() >= MAX_TRANSFERS:
            raise ApiError(_BUSY)
        self._transfers[tenant] += 1
        try:
            yield
        finally:
            self._transfers -= Counter({tenant: 1})

    @asynccontextmanager
    async def upload(self, tenant: str) -> AsyncGenerator[Upload, None]:
        """Open a new file; its data is deleted unless `finish` made it a file."""
        if len(self.files_of(tenant)) >= MAX_FILES:
            raise _too_much(f"this tenant has {MAX_FILES} files")
        if len(self._files) >= MAX_ALL_FILES:
            raise ApiError(_BUSY)
        self.check_room(tenant, 0)
        file_id = f"file-{secrets.token_hex(16)}"
        upload = Upload(self, tenant, file_id, await asyncio.to_thread(self._open, file_id))
        try:
            yield upload
        finally:
            self._uploading -= Counter({tenant: upload.num_bytes})
            await asyncio.to_thread(upload.close)

    def check_room(self, tenant: str, num_more: int) -> None:
        """Refuse more bytes than the tenant, or the server, may have."""
        own = self._stored[tenant] + self._uploading[tenant]
        if own + num_more > self.config.batch_tenant_bytes:
            raise _too_much(
                f"the files of this tenant would have more than {self.config.batch_tenant_bytes} "
                "bytes (batch_tenant_bytes)"
            )
        total = self._stored.total() + self._uploading.total()
        if total + num_more > self.config.batch_total_bytes:
            raise _too_much("the server has no room for more files (batch_total_bytes)")

    def count_upload(self, tenant: str, num_bytes: int) -> None:
        """Count bytes of an upload that is under way, or refuse them."""
        self.check_room(tenant, num_bytes)
        self._uploading[tenant] += num_bytes

    async def add_file(self, record: FileRecord) -> None:
        await self._write([record])

    def _open(self, file_id: str) -> int:
        try:
            return self.folder.open_upload(file_id)
        except OSError as error:
            raise disk_error(error) from error

    # ----------------------------------------------------------------- batches

    def find_batch(self, batch_id: str, tenant: str) -> BatchRecord | None:
        record = self._batches.get(batch_id)
        return None if record is None or record.tenant != tenant else record

    def batches_of(self, tenant: str) -> list[BatchRecord]:
        """Return the batches of a tenant, oldest first."""
        return [one for one in self._batches.values() if one.tenant == tenant]

    def open_batches(self) -> list[BatchRecord]:
        """Return the batches that have not ended, oldest first."""
        return [self._batches[batch_id] for batch_id in self._open_ids]

    def num_open(self, status: str) -> int:
        """Return how many batches that have not ended have this status."""
        return sum(one.status == status for one in self.open_batches())

    def current(self, batch_id: str) -> BatchRecord:
        """Return the record of a batch that is known to exist."""
        return self._batches[batch_id]

    async def add_batch(self, record: BatchRecord) -> None:
        """Add a batch, or refuse it; a tenant has a limit of batches."""
        own = self.batches_of(record.tenant)
        if sum(one.is_open for one in own) >= MAX_OPEN_BATCHES:
            message = f"{MAX_OPEN_BATCHES} batches of this tenant have not ended; wait for one"
            headers = {"Retry-After": "60"}
            raise ApiError(
                ErrorResponse(
                    429, message, "rate_limit_error", "rate_limit_exceeded", headers=headers
                )
            )
        if len(self._open_ids) >= MAX_ALL_OPEN:
            raise ApiError(_BUSY)
        ended = [one for one in own if not one.is_open]
        await self._write([record], ended[: max(0, len(own) + 1 - MAX_BATCHES)])
        self.changed.set()

    async def change_batch(
        self,
        batch_id: str,
        change: Callable[[BatchRecord], BatchRecord],
        files: Sequence[FileRecord] = (),
    ) -> BatchRecord:
        """Write a change of a batch, and its new files, all or none; return the batch."""
        async with self._changes:
            record = change(self._batches[batch_id])
            await self._write([record, *files])
            return record

    async def cancel_batch(self, batch_id: str) -> BatchRecord:
        """Return the batch as one that is being cancelled; one that has ended stays as it is."""

        def change(record: BatchRecord) -> BatchRecord:
            if record.status not in ("validating", "in_progress"):
                return record
            return record.become("cancelling", self.time_of_day())

        record = await self.change_batch(batch_id, change)
        self.changed.set()
        return record

    async def remove_expired(self) -> None:
        """Remove files past their time, and batches that ended long ago."""
        now = self.time_of_day()
        old = now - self.config.batch_keep_days * DAY_S
        used = {one.input_file_id for one in self.open_batches()}
        files = [
            one for one in self._files.values() if one.expires_at <= now and one.id not in used
        ]
        batches = [
            one
            for one in self._batches.values()
            if not one.is_open and max(one.times.values(), default=0) < old
        ]
        if files or batches:
            await self._write([], [*files, *batches])

    # ----------------------------------------------------------------- records

    async def _write(self, records: Sequence[Record], removed: Sequence[Record] = ()) -> None:
        ids = [one.id for one in removed]
        # Not cut off halfway: what the database has must be what is in memory.
        await asyncio.shield(self._write_through(records, ids))

    async def _write_through(self, records: Sequence[Record], removed_ids: Sequence[str]) -> None:
        await self._in_thread(lambda: self._database.write(records, removed_ids))
        for record in records:
            self._keep(record)
        for record_id in removed_ids:
            self._batches.pop(record_id, None)
            if self._forget_file(record_id):
                await asyncio.to_thread(self.folder.remove, record_id)

    def _forget_file(self, file_id: str) -> bool:
        record = self._files.pop(file_id, None)
        if record is not None:
            self._stored -= Counter({record.tenant: record.num_bytes})
        return record is not None

    def _keep(self, record: Record) -> None:
        if isinstance(record, FileRecord):
            self._forget_file(record.id)
            self._files[record.id] = record
            self._stored[record.tenant] += record.num_bytes
        else:
            self._batches[record.id] = record
            if record.is_open:
                self._open_ids[record.id] = None
            else:
                self._open_ids.pop(record.id, None)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run database work in the one thread that has the connection."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class Upload:
    """A file that is being written; its owner is `BatchStore.upload`."""

    def __init__(self, store: BatchStore, tenant: str, file_id: str, file: int) -> None:
        self.num_bytes = 0
        self._store = store
        self._tenant = tenant
        self._id = file_id
        self._file = file
        self._buffer: list[bytes] = []
        self._num_buffered = 0

    async def write(self, data: bytes) -> None:
        """Append data; refuse more than a file may have."""
        limit = self._store.config.batch_file_bytes
        if self.num_bytes + len(data) > limit:
            message = f"the file has more than {limit} bytes (batch_file_bytes); split it"
            headers = {"Connection": "close"}
            raise ApiError(
                ErrorResponse(
                    413, message, "invalid_request_error", "file_too_large", "file", headers
                )
            )
        self._store.count_upload(self._tenant, len(data))
        self.num_bytes += len(data)
        self._buffer.append(data)
        self._num_buffered += len(data)
        if self._num_buffered >= WRITE_BYTES:
            await self._flush()

    async def finish(self, filename: str, keep_s: int) -> FileRecord:
        """Return the record of the whole file, which is on disk and in the database."""
        await self._flush()
        await self._run(self._keep)
        now = int(self._store.time_of_day())
        record = FileRecord(
            id=self._id,
            tenant=self._tenant,
            purpose="batch",
            filename=filename,
            num_bytes=self.num_bytes,
            created_at=now,
            expires_at=now + keep_s,
        )
        try:
            await self._store.add_file(record)
        except BaseException:
            await asyncio.to_thread(self._store.folder.remove, self._id)
            raise
        return record

    def close(self) -> None:
        os.close(self._file)
        self._store.folder.remove_upload(self._id)

    async def _flush(self) -> None:
        data, self._buffer, self._num_buffered = b"".join(self._buffer), [], 0
        if data:
            await self._run(lambda: write_all(self._file, data))

    def _keep(self) -> None:
        os.fsync(self._file)
        self._store.folder.keep_upload(self._id)

    async def _run(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(work)
        except OSError as error:
            raise disk_error(error) from error


def write_all(file: int, data: bytes) -> None:
    """Write all of the data, or raise OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def disk_error(error: OSError) -> ApiError:
    """Return the answer to a client whose file cannot be stored."""
    logger.error("batch_dir: %s", error)
    message = "the server cannot store files now; try again later"
    headers = {"Retry-After": "60"}
    kind, code = "service_unavailable_error", "service_unavailable"
    return ApiError(ErrorResponse(503, message, kind, code, headers=headers))


def _too_much(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"{reason}; delete files that are no longer needed", "file")


def open_batch_store(config: BatchConfig, ledger: LedgerConfig) -> BatchStore | None:
    """Return the store of the settings; None if there is no folder for it.

    The records are in the PostgreSQL of the ledger, or else in an SQLite file in the folder.
    """
    if config.batch_dir is None:
        return None
    path = Path(os.path.expanduser(config.batch_dir)).absolute()
    url = ledger_url(ledger)
    folder = BatchFolder(path)
    try:
        is_shared = url != OFF and sqlite_path(url) is None
        dialect = dialect_of(url) if is_shared else sqlite_dialect(path / "batches.db")
        return BatchStore(config, folder, dialect)
    except BaseException:
        folder.close()
        raise
