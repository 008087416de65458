"""`headway cache`: packed weights on this machine."""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headway.build import packed_cache
from headway.config import load_config
from headway.errors import ConfigError
from headway.executors.cpu.packed_cache import PackedCache

app = typer.Typer(
    no_args_is_help=True, help="List or delete packed weights, which speed up starts."
)
Folder = Annotated[
    str | None, typer.Option("--weights-cache", help="Folder of packed weights; default: auto.")
]


@app.command("list")
def list_entries(folder: Folder = None) -> None:
    """List the packed weights, the most recently used first."""
    cache = _open(folder)
    entries = cache.entries()
    if not entries:
        typer.echo(f"no packed weights in {cache.folder}")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("model", "dtype", "MB", "last used"):
        table.add_column(column, overflow="fold", justify="right" if column == "MB" else "left")
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
        table.add_row(
            escape(_model(entry.model)), entry.dtype, f"{entry.num_bytes / 1e6:.0f}", used
        )
    console = Console()
    console.print(table)
    total = sum(entry.num_bytes for entry in entries)
    console.print(
        f"\n{total / 1e6:.0f} of at most {cache.max_bytes / 1e6:.0f} MB in {cache.folder}",
        soft_wrap=True,
    )


@app.command()
def clear(folder: Folder = None) -> None:
    """Delete all packed weights; running engines keep theirs."""
    cache = _open(folder)
    typer.echo(f"deleted {cache.clear() / 1e6:.0f} MB of packed weights in {cache.folder}")


def _open(folder: str | None) -> PackedCache:
    cache = packed_cache(load_config({"weights_cache": folder}))
    if cache is None:
        raise ConfigError("weights_cache is none, so there are no packed weights")
    return cache


def _model(path: str) -> str:
    if not path:
        return "(damaged file)"
    return path if os.path.exists(path) else f"{path} (gone)"
