"""Opens the ledger for a command."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config import load_config
from headway.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from headway.observe.ledger.store import Store


@dataclass(frozen=True, slots=True)
class OpenLedger:
    """An open ledger and its URL."""

    url: str
    store: Store


@contextmanager
def open_ledger(url: str | None) -> Generator[OpenLedger, None, None]:
    """Return the ledger at this URL, or the default ledger of `headway serve`."""
    from headway.observe.ledger.databases import make_store
    from headway.observe.ledger.ledger import OFF, ledger_url

    ledger = ledger_url(load_config({"ledger_url": url}).ledger)
    if ledger == OFF:
        raise ConfigError("there is no ledger; name one with --ledger-url")
    store = make_store(ledger, is_reader=True)
    try:
        yield OpenLedger(ledger, store)
    except LedgerError as error:
        hint = "start a server with a ledger, or set --ledger-url"
        if "is locked" in str(error):
            hint = "another process is using it; try again shortly"
        raise LedgerError(f"{error}; {hint}") from error
    finally:
        store.close()
