"""The threads that write the ledger; `put` never blocks.

One thread moves rows from memory into the spool; another sends rows from the spool to the database.
While the database fails (locked, full, away), rows stay in the spool, the spool is synced to disk,
and the writer retries with backoff. Rows that do not fit into the spool stay in memory up to a
limit. Rows beyond that limit are dropped, counted and logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.errors import LedgerError
from headway.observe.ledger.spool import Spool, read_rows
from headway.observe.ledger.store import PRUNE_ROWS, WritableStore
from headway.observe.ledger.usage import Row

logger = logging.getLogger(__name__)

MAX_BUFFERED_ROWS = 10_000
"""Most rows in memory that are not in the spool."""
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 5.0
PRUNE_S = 3600.0
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Longest age of a row, and the wall clock."""

    max_age_s: float | None = None
    time_of_day: Callable[[], float] = time.time


class LedgerWriter:
    """Owns the store and the spool while its threads run."""

    def __init__(
        self,
        store: WritableStore,
        spool: Spool,
        retention: Retention | None = None,
        max_buffered_rows: int = MAX_BUFFERED_ROWS,
    ) -> None:
        self.num_dropped = 0
        """Rows dropped because spool and memory were full."""
        self._store = store
        self._spool = spool
        self._retention = retention or Retention()
        self._max_buffered_rows = max_buffered_rows
        self._queue: deque[Row] = deque()
        self._buffer: list[Row] = []
        """Rows from the queue that the spool has no room for."""
        self._lock = threading.Lock()
        self._has_rows = threading.Event()
        self._has_work = threading.Event()
        self._is_stopping = False
        self._has_leftover_files = True
        self._retry_s = 0.0
        self._retry_at = 0.0
        self._pruned_at = -PRUNE_S
        self._saver = threading.Thread(target=self._save_all, name="ledger-spool", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name="ledger", daemon=True)

    @property
    def num_pending(self) -> int:
        """Rows that the database does not have yet."""
        return self.num_buffered + self._spool.num_rows

    @property
    def num_buffered(self) -> int:
        """Pending rows in memory, which a kill would lose."""
        return len(self._queue) + len(self._buffer)

    def is_buffered(self, request_id: str) -> bool:
        """Return whether a row of this request is in memory only."""
        # The queue first: a row is in the buffer before it leaves the queue.
        rows = [*list(self._queue), *list(self._buffer)]
        return any(row.request_id == request_id for row in rows)

    @property
    def is_failing(self) -> bool:
        """Whether the last write to the database failed."""
        return self._retry_s > 0.0

    def start(self) -> None:
        """Start both threads."""
        self._saver.start()
        self._sender.start()

    def put(self, row: Row) -> None:
        """Add a row; never blocks."""
        if self.num_buffered >= self._max_buffered_rows:
            self._drop(1)
            return
        self._queue.append(row)
        self._has_rows.set()

    def stop(self) -> None:
        """Write the pending rows, or leave them in the spool for the next process."""
        self._is_stopping = True
        self._has_rows.set()
        self._saver.join(STOP_S)
        self._has_work.set()
        self._sender.join(STOP_S)
        if self._sender.is_alive():
            logger.error("the ledger database does not answer; pending rows stay in the spool")
        if self._buffer:
            self._drop(len(self._buffer))

    # -------------------------------------------------------- into the spool

    def _save_all(self) -> None:
        is_last = False
        while not is_last:
            self._has_rows.wait()
            self._has_rows.clear()
            is_last = self._is_stopping
            try:
                self._save()
            except Exception:
                logger.exception("the ledger's spool cannot be written")
            self._has_work.set()

    def _save(self) -> None:
        """Move rows to the spool; rows that do not fit stay in memory."""
        with self._lock:
            while self._queue:
                # Append first: a row is counted twice for a moment rather than not at all.
                self._buffer.append(self._queue[0])
                self._queue.popleft()
            if not self._buffer:
                return
            try:
                num_taken = self._spool.append(self._buffer)
                del self._buffer[:num_taken]
                if self.is_failing:
                    self._spool.sync()
            except OSError as error:
                if not self.is_failing:
                    logger.warning("the ledger's spool cannot be written: %s", error)

    # ----------------------------------------------------- into the database

    def _send_all(self) -> None:
        is_last = False
        while not is_last:
            self._has_work.wait(self._pause_s())
            self._has_work.clear()
            is_last = self._is_stopping and not self._saver.is_alive()
            try:
                if is_last or time.monotonic() >= self._retry_at:
                    self._send()
                    self._prune()
            except Exception:
                # An unexpected error must not end the thread silently.
                logger.exception("the ledger cannot be written")
                self._back_off("the ledger: an unexpected error")
        self._store.close()
        try:
            self._spool.close()
        except OSError as error:
            logger.warning("the ledger's spool: %s", error)

    def _pause_s(self) -> float:
        if self.is_failing:
            return max(0.0, self._retry_at - time.monotonic())
        return 0.0 if self._has_leftover_files else PRUNE_S

    def _send(self) -> None:
        """Send every pending row; the database ignores rows that it has."""
        try:
            if self._has_leftover_files:
                for path in self._spool.leftover_files():
                    self._send_file(path)
                self._has_leftover_files = False
            while (path := self._spool.sealed()) is not None:
                self._send_file(path)
                self._spool.remove_sealed()
            self._send_buffer()
        except (LedgerError, OSError) as error:
            self._back_off(str(error))
            return
        if self.is_failing:
            logger.info("the ledger is written again")
            self._retry_s = self._retry_at = 0.0

    def _send_file(self, path: Path) -> None:
        for rows in read_rows(path):
            self._store.write(rows)

    def _send_buffer(self) -> None:
        with self._lock:
            rows = list(self._buffer)
        self._store.write(rows)
        written = set(map(id, rows))
        with self._lock:
            self._buffer = [row for row in self._buffer if id(row) not in written]

    def _back_off(self, message: str) -> None:
        if not self.is_failing:
            logger.warning("%s; ledger rows stay in the spool", message)
            # The rows may stay in the spool for long.
            try:
                self._spool.sync()
            except OSError as error:
                logger.warning("the ledger's spool cannot be synced: %s", error)
        self._retry_s = min(2 * self._retry_s or FIRST_RETRY_S, MAX_RETRY_S)
        self._retry_at = time.monotonic() + self._retry_s

    def _prune(self) -> None:
        """Delete rows past their retention, and look for files of dead processes; once per
        PRUNE_S."""
        age_s, now = self._retention.max_age_s, time.monotonic()
        if self.is_failing or now - self._pruned_at < PRUNE_S:
            return
        try:
            # In small batches, so that other writers of the database wait briefly.
            while age_s is not None:
                if self._store.prune(self._retention.time_of_day() - age_s) < PRUNE_ROWS:
                    break
        except LedgerError as error:
            self._back_off(str(error))
            return
        self._pruned_at = now
        self._has_leftover_files = True

    def _drop(self, num_rows: int) -> None:
        is_first = self.num_dropped == 0
        self.num_dropped += num_rows
        if is_first or self.num_dropped % 1000 == 0 or num_rows > 1:
            logger.error(
                "ledger spool and buffer are full: %d rows dropped; see ledger_spool_bytes",
                self.num_dropped,
            )
