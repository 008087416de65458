"""Requests of a ledger as the load of a simulation."""

from __future__ import annotations

from headway.cli.observe.ledger import open_ledger, parse_range, warn_of_spool
from headway.core.executor import Capacity
from headway.errors import ConfigError
from headway.sim.recording.accounts import AccountCounts, load_of_accounts
from headway.workload import Listed

FLAG = "--from-ledger"


def ledger_load(
    url: str, since: str | None, until: str | None, capacity: Capacity
) -> tuple[Listed, str]:
    """Return the requests that arrived in a time range, and a text that says how many."""
    span = parse_range(since, until)
    with open_ledger(url, FLAG) as ledger:
        load = load_of_accounts(ledger.store.accounts(span), capacity)
    warn_of_spool(ledger.url)
    if not load.workload.requests:
        # Without the URL, which may have a password.
        words = ["the ledger has no request with an output token"]
        words += [f"since {since}"] if since else []
        words += [f"until {until}"] if until else []
        hint = "`headway usage --by day` says when there were some"
        raise ConfigError(f"{' '.join(words)}{_left_out(load.counts)}; {hint}")
    return load.workload, _describe(load.counts, len(load.workload.requests))


def _describe(counts: AccountCounts, num_items: int) -> str:
    text = f"{counts.num_requests} requests of the ledger, coarse: shared prefixes are assumed"
    text += _left_out(counts)
    if counts.num_divided:
        text += f"; {counts.num_divided} had several prompts or samples, which are requests here"
        text += f" ({num_items} in all"
        text += f", {counts.num_even} with equal parts)" if counts.num_even else ")"
    if counts.num_old:
        text += f"; {counts.num_old} by an older release have default terms and priority"
    return text


def _left_out(counts: AccountCounts) -> str:
    text = ""
    if counts.num_left_out:
        text += f", {counts.num_left_out} left out that have no output"
    if counts.num_unreadable:
        text += f", {counts.num_unreadable} left out that cannot be read"
    return text
