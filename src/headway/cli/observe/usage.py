"""`headway usage`: usage and cost of tenants, from the ledger."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated

import typer

from headway.cli.observe.ledger import open_ledger, parse_range, warn_of_spool
from headway.errors import ConfigError
from headway.observe.ledger.store import GROUPS, TimeRange, Totals

COLUMNS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "recomputed_tokens",
    "speculative_tokens",
    "kv_block_s",
    "queue_s",
    "cost",
)
Cell = str | int | float


def usage(
    by: Annotated[
        str, typer.Option("--by", help="Group by tenant, tier, day, or several of them.")
    ] = "tenant",
    since: Annotated[
        str | None, typer.Option("--since", help="From this day or time on (UTC), ISO 8601.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", help="Before this day or time (UTC), ISO 8601.")
    ] = None,
    ledger_url: Annotated[
        str | None,
        typer.Option(
            "--ledger-url", help="URL of the ledger; default: the ledger of `headway serve`."
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sum usage and cost of requests.

    A request counts on the day it ended. Recomputed tokens are shown and not billed.
    """
    groups = [name.strip() for name in by.split(",") if name.strip()]
    wrong = [name for name in groups if name not in GROUPS]
    if wrong or len(set(groups)) < len(groups):
        raise ConfigError(f"--by takes {', '.join(GROUPS)}, each once; got {by!r}")
    if as_csv and as_json:
        raise ConfigError("give --csv or --json, not both")
    rows = _totals(ledger_url, groups, parse_range(since, until))
    header = [*groups, *COLUMNS]
    cells = [_cells(row) for row in rows]
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerows([header, *cells])
        sys.stdout.flush()  # here, so that `main` handles a reader that is gone
    elif as_json:
        records = [dict(zip(header, row, strict=True)) for row in cells]
        typer.echo(json.dumps(records, indent=2))
    else:
        typer.echo(_table(header, cells, len(groups)))


def _totals(url: str | None, groups: Sequence[str], span: TimeRange) -> list[Totals]:
    with open_ledger(url) as ledger:
        found = ledger.store.totals(groups, span)
    warn_of_spool(ledger.url)
    return found


def _cells(row: Totals) -> list[Cell]:
    values: list[Cell] = [getattr(row, name) for name in COLUMNS[:-1]]
    rounded = [round(value, 3) if isinstance(value, float) else value for value in values]
    return [*row.group, *rounded, cost_of(row)]


def cost_of(row: Totals) -> str:
    """Return the exact cost in the unit of the prices."""
    text = f"{Decimal(row.cost_e12).scaleb(-12):f}".rstrip("0").rstrip(".")
    return text or "0"


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]], num_groups: int) -> str:
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[source]) for line in lines) for source in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if source < num_groups else cell.rjust(width)
            for source, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
