"""The threads that write the ledger. Whoever has a row hands it over and goes on at once.

One thread moves rows from memory into the spool; another sends them on to the database. While the
database does not take them (locked, full, away) they stay in the spool, which is then synced to
disk, and the database is tried again and again. If the spool cannot take a row either, it stays in
memory, up to a bound; what is beyond every bound is dropped, counted and logged.
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
from headway.observe.ledger.store import PRUNE_ROWS, Store
from headway.observe.ledger.usage import Row

logger = logging.getLogger(__name__)

MAX_BUFFERED_ROWS = 10_000
"""Rows in memory that are not in the spool."""
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 5.0
PRUNE_S = 3600.0
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Retention:
    """How long rows are kept, and what the time of day is."""

    max_age_s: float | None = None
    time_of_day: Callable[[], float] = time.time


class LedgerWriter:
    """Owns the store and the spool while it runs."""

    def __init__(
        self,
        store: Store,
        spool: Spool,
        retention: Retention | None = None,
        max_buffered_rows: int = MAX_BUFFERED_ROWS,
    ) -> None:
        self.num_dropped = 0
        """Rows lost because nothing had room for them."""
        self._store = store
        self._spool = spool
        self._retention = retention or Retention()
        self._max_buffered_rows = max_buffered_rows
        self._queue: deque[Row] = deque()
        self._buffer: list[Row] = []
        """Taken from the queue, and not in the spool: it has no room for them."""
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
        """Rows that the database has yet to take."""
        return self.num_buffered + self._spool.num_rows

    @property
    def num_buffered(self) -> int:
        """Those of them that would be lost if the process were killed now."""
        return len(self._queue) + len(self._buffer)

    @property
    def is_failing(self) -> bool:
        """The database did not take rows when last asked to."""
        return self._retry_s > 0.0

    def start(self) -> None:
        self._saver.start()
        self._sender.start()

    def put(self, row: Row) -> None:
        """Hand over a row; never waits."""
        if self.num_buffered >= self._max_buffered_rows:
            self._drop(1)
            return
        self._queue.append(row)
        self._has_rows.set()

    def stop(self) -> None:
        """Write what there is, or leave it in the spool for the next process."""
        self._is_stopping = True
        self._has_rows.set()
        self._saver.join(STOP_S)
        self._has_work.set()
        self._sender.join(STOP_S)
        if self._sender.is_alive():
            logger.error("the ledger's database does not answer; its rows stay in the spool")
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
        """What does not go into the spool is held in memory."""
        with self._lock:
            while self._queue:
                # Counted in both for a moment, rather than in neither.
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
                # A ledger that is broken in a way nobody thought of must not become silent.
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
        """Everything there is; what is told twice is taken once."""
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
            logger.warning("%s; its rows wait", message)
            # They may have to wait for long.
            try:
                self._spool.sync()
            except OSError as error:
                logger.warning("the ledger's spool cannot be synced: %s", error)
        self._retry_s = min(2 * self._retry_s or FIRST_RETRY_S, MAX_RETRY_S)
        self._retry_at = time.monotonic() + self._retry_s

    def _prune(self) -> None:
        """Now and then: forget what is too old, and see whether another process died."""
        age_s, now = self._retention.max_age_s, time.monotonic()
        if self.is_failing or now - self._pruned_at < PRUNE_S:
            return
        try:
            # A few at a time, so that nobody else is kept waiting for long.
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
            logger.error("the ledger has no room left: %d requests dropped", self.num_dropped)
