"""The ledger: accounts of live and recent requests, and a stored row per finished request.

All methods run on the event loop and do not block, except `find_stored`, which queries the database
and belongs in a thread.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from headway.clock import Clock
from headway.config import LedgerConfig, state_dir
from headway.errors import ConfigError
from headway.observe.ledger.databases import make_store, sqlite_path
from headway.observe.ledger.spool import Spool
from headway.observe.ledger.store import Store
from headway.observe.ledger.usage import PriceOf, row_of
from headway.observe.ledger.writer import LedgerWriter, Retention
from headway.observe.requests.table import Changes, RequestTable, TrackedRequest, account
from headway.observe.trace.account import RequestAccount

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
OFF = "none"


@dataclass(frozen=True, slots=True)
class Archive:
    """The stored part of the ledger: its writer, and how to open a reader."""

    writer: LedgerWriter
    open_reader: Callable[[], Store]


def no_prices(_tier: str) -> None:
    """Return no price for any tier."""


class Ledger:
    """Finds requests in the request table and writes a row for each finished one.

    Without an archive, only live and recent requests are found.
    """

    def __init__(
        self,
        requests: RequestTable,
        clock: Clock,
        archive: Archive | None = None,
        price_of: PriceOf = no_prices,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self.archive = archive
        self._requests = requests
        self._clock = clock
        self.price_of = price_of
        self._time_of_day = time_of_day

    def consume(self, changes: Changes) -> None:
        """Write a row for each request that ended."""
        for request in changes.ended:
            self._write(request)

    def set_client_id(self, request_id: str, client_id: str, revision: int = 0) -> None:
        """Set the id that the X-Request-Id header of the response has.

        With a revision, the row replaces all rows of this request with lower ones.
        """
        ended = self._requests.set_client_id(request_id, client_id, revision)
        if ended is not None:
            self._write(ended)

    def is_live(self, request_id: str) -> bool:
        """Return whether a request is known and has not ended."""
        request = self._requests.find(request_id, None)
        return request is not None and request.is_live

    def is_saved(self, request_id: str) -> bool:
        """Return whether a request has ended and a kill of this process would not lose its row."""
        if self.is_live(request_id):
            return False
        return self.archive is None or not self.archive.writer.is_buffered(request_id)

    def find(self, name: str, tenant: str | None) -> RequestAccount | None:
        """Return the account of a live or recent request; of any tenant if `tenant` is None."""
        request = self._requests.find(name, tenant)
        return None if request is None else self._account(request)

    def accounts_since(self, at: float) -> tuple[Iterator[RequestAccount], bool]:
        """Return the accounts of live requests and of those in memory that ended since `at`.

        Also whether these are all. Each account is made when the caller takes it.
        """
        requests, is_complete = self._requests.since(at)
        return map(self._account, requests), is_complete

    def find_stored(self, name: str, tenant: str | None) -> RequestAccount | None:
        """Return the account of a stored request; blocks on the database."""
        if self.archive is None:
            return None
        store = self.archive.open_reader()
        try:
            return store.find(name, tenant)
        finally:
            store.close()

    def start(self) -> None:
        """Start the writer threads."""
        if self.archive is not None:
            self.archive.writer.start()

    def close(self) -> None:
        """Write the remaining rows; blocks for at most some seconds."""
        if self.archive is not None:
            self.archive.writer.stop()

    def _account(self, request: TrackedRequest) -> RequestAccount:
        now = self._clock.now()
        return account(request, now, self._time_of_day() - now)

    def _write(self, request: TrackedRequest) -> None:
        if self.archive is None:
            return
        price = self.price_of(request.terms.tier)
        self.archive.writer.put(row_of(self._account(request), request.revision, price))


def ledger_url(config: LedgerConfig) -> str:
    """Return the URL of the ledger, or "none"."""
    if config.ledger_url == "auto":
        return f"sqlite://{quote(str(Path(state_dir()).absolute() / 'ledger.db'))}"
    return config.ledger_url


def spool_folder(url: str) -> Path:
    """Return the spool folder: beside an SQLite file, else in the state directory."""
    path = sqlite_path(url)
    if path is not None:
        return path.with_name(f"{path.name}.spool")
    parts = urlsplit(url)
    # Without user and password: a new password must not hide rows in the spool.
    location = f"{parts.hostname}:{parts.port}{parts.path}?{parts.query}"
    digest = hashlib.sha256(location.encode()).hexdigest()[:16]
    return Path(state_dir()) / f"ledger-{digest}.spool"


def open_archive(config: LedgerConfig) -> Archive | None:
    """Return the stored part of the ledger; None if it is turned off."""
    url = ledger_url(config)
    if url == OFF:
        return None
    store, folder = make_store(url), spool_folder(url)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        if config.ledger_url != "auto":
            raise ConfigError(f"ledger_url: cannot create the spool {folder}: {error}") from error
        logger.warning("no ledger is written: cannot create %s: %s", folder, error)
        return None
    days = config.ledger_retention_days
    writer = LedgerWriter(
        store,
        Spool(folder, config.ledger_spool_bytes),
        Retention(None if days is None else days * DAY_S),
    )
    return Archive(writer, lambda: make_store(url, is_reader=True))
