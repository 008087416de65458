"""Opens the ledger for a command, and reads its flags."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from headway.config import load_config
from headway.errors import ConfigError, LedgerError

if TYPE_CHECKING:
    from headway.observe.ledger.store import Store, TimeRange

LEDGER_FLAG = "--ledger-url"


@dataclass(frozen=True, slots=True)
class OpenLedger:
    """An open ledger and its URL."""

    url: str
    store: Store


@contextmanager
def open_ledger(url: str | None, flag: str = LEDGER_FLAG) -> Generator[OpenLedger, None, None]:
    """Return the ledger at this URL, or the default ledger of `headway serve`.

    Messages name the flag that has the URL.
    """
    from headway.observe.ledger.databases import make_store
    from headway.observe.ledger.ledger import OFF, ledger_url

    try:
        ledger = ledger_url(load_config({"ledger_url": url}).ledger)
        if ledger == OFF:
            raise ConfigError(f"there is no ledger; name one with {flag}")
        store = make_store(ledger, is_reader=True)
    except ConfigError as error:
        raise ConfigError(str(error).replace("ledger_url", flag, 1)) from error
    try:
        yield OpenLedger(ledger, store)
    except LedgerError as error:
        hint = f"start a server with a ledger, or set {flag}"
        if "is locked" in str(error):
            hint = "another process is using it; try again shortly"
        raise LedgerError(f"{error}; {hint}") from error
    finally:
        store.close()


def warn_of_spool(url: str) -> None:
    """Say on stderr if rows wait in the spool for the ledger at this URL."""
    from headway.observe.ledger.ledger import spool_folder
    from headway.observe.ledger.spool import num_waiting_bytes

    if num_bytes := num_waiting_bytes(spool_folder(url)):
        typer.echo(f"{num_bytes} bytes of rows are not in the ledger yet", err=True)


def parse_range(since: str | None, until: str | None) -> TimeRange:
    """Return the range of --since and --until; ConfigError unless the first is earlier."""
    from headway.observe.ledger.store import TimeRange

    span = TimeRange(_time(since, "--since"), _time(until, "--until"))
    if span.since is not None and span.until is not None and span.since >= span.until:
        raise ConfigError(f"--since {since} must be before --until {until}")
    return span


def _time(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is not a day or time such as 2026-01-31") from error
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
