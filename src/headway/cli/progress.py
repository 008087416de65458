"""Progress of long work: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINE_EVERY_S = 30.0
"""Time between lines where there is no terminal."""


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float, int], None]]:
    """Return a function (done, total) that shows progress on standard error."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str) -> Callable[[float, int], None]:
    """Return a function (done, total) that writes a line every 30 seconds."""
    last_at = monotonic()

    def write(done: float, total: int) -> None:
        nonlocal last_at
        now = monotonic()
        if now - last_at >= LINE_EVERY_S:
            last_at = now
            typer.echo(f"{title}: {done:,.0f} of {total:,}", err=True)

    return write
