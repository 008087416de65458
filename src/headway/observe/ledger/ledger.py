"""The ledger: follows requests by their events, explains them, and has each written when it ends.

Everything here is for the event loop and waits for nothing, but for `find_stored`, which asks the
database and is for a thread.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from headway.clock import Clock
from headway.config import LedgerConfig, state_dir
from headway.core.events import Event
from headway.errors import ConfigError
from headway.observe.ledger.databases import make_store, sqlite_path
from headway.observe.ledger.spool import Spool
from headway.observe.ledger.store import Store
from headway.observe.ledger.usage import PriceOf, row_of
from headway.observe.ledger.writer import LedgerWriter, Retention
from headway.observe.trace.account import RequestAccount
from headway.observe.trace.audit import Audit, TrackedRequest, account

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
OFF = "none"


@dataclass(frozen=True, slots=True)
class Archive:
    """The written side: who writes, and how to open the store for one question."""

    writer: LedgerWriter
    open_reader: Callable[[], Store]


def no_prices(_tier: str) -> None:
    """Nothing costs anything."""


class Ledger:
    """Consumes events. Without an archive it knows the live requests and the latest ended ones."""

    def __init__(
        self,
        audit: Audit,
        clock: Clock,
        archive: Archive | None = None,
        price_of: PriceOf = no_prices,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self.archive = archive
        self._audit = audit
        self._clock = clock
        self.price_of = price_of
        self._time_of_day = time_of_day

    def consume(self, events: Iterable[Event]) -> None:
        """Take in the events of at most one step, in the order they happened."""
        for request in self._audit.consume(events):
            self._write(request)

    def set_client_id(self, request_id: str, client_id: str) -> None:
        """The client knows this request by the id in the header of its answer, too."""
        ended = self._audit.set_client_id(request_id, client_id)
        if ended is not None:
            self._write(ended)

    def find(self, name: str, tenant: str | None) -> RequestAccount | None:
        """A live request, or one that has just ended; any tenant's if it is None."""
        request = self._audit.find(name, tenant)
        return None if request is None else self._account(request)

    def find_stored(self, name: str, tenant: str | None) -> RequestAccount | None:
        """One that was written. Takes as long as the database takes."""
        if self.archive is None:
            return None
        store = self.archive.open_reader()
        try:
            return store.find(name, tenant)
        finally:
            store.close()

    def start(self) -> None:
        if self.archive is not None:
            self.archive.writer.start()

    def close(self) -> None:
        """Write what there is; waits for the database for some seconds."""
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
    """Where the ledger is, if it is anywhere."""
    if config.ledger_url == "auto":
        return f"sqlite://{quote(str(Path(state_dir()).absolute() / 'ledger.db'))}"
    return config.ledger_url


def spool_folder(url: str) -> Path:
    """Beside an SQLite file; for another database, in the state directory."""
    path = sqlite_path(url)
    if path is not None:
        return path.with_name(f"{path.name}.spool")
    parts = urlsplit(url)
    # Not by the whole URL: a new password must not hide the rows that wait.
    location = f"{parts.hostname}:{parts.port}{parts.path}?{parts.query}"
    digest = hashlib.sha256(location.encode()).hexdigest()[:16]
    return Path(state_dir()) / f"ledger-{digest}.spool"


def open_archive(config: LedgerConfig) -> Archive | None:
    """The written side of the ledger as configured; None if there is to be none."""
    url = ledger_url(config)
    if url == OFF:
        return None
    store, folder = make_store(url), spool_folder(url)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        if config.ledger_url != "auto":
            raise ConfigError(f"the ledger's spool {folder} cannot be made: {error}") from error
        logger.warning("no ledger is written: %s cannot be made: %s", folder, error)
        return None
    days = config.ledger_retention_days
    writer = LedgerWriter(
        store,
        Spool(folder, config.ledger_spool_bytes),
        Retention(None if days is None else days * DAY_S),
    )
    return Archive(writer, lambda: make_store(url, is_reader=True))
