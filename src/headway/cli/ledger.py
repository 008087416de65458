"""The ledger as commands read it: where it is, and what to do if it cannot be read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config import load_config
from headway.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from headway.observe.store import Store


@dataclass(frozen=True, slots=True)
class Place:
    """An open ledger."""

    url: str
    store: Store


@contextmanager
def reading(url: str | None) -> Generator[Place, None, None]:
    """The ledger at this URL, or the one that a server started here would write."""
    from headway.observe.databases import make_store
    from headway.observe.ledger import OFF, ledger_url

    place = ledger_url(load_config({"ledger_url": url}).ledger)
    if place == OFF:
        raise ConfigError("there is no ledger; name one with --ledger-url")
    store = make_store(place, is_reader=True)
    try:
        yield Place(place, store)
    except LedgerError as error:
        hint = "a server with a ledger writes one; --ledger-url names another"
        if "is locked" in str(error):
            hint = "somebody else is busy with it; try again shortly"
        raise LedgerError(f"{error}; {hint}") from error
    finally:
        store.close()
