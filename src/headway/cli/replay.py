"""`headway replay`: replay recordings of an engine, and compare every plan."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway._version import __version__
from headway.errors import RecordingError

if TYPE_CHECKING:
    from headway.record.reader import RecordingReader
    from headway.record.replay import Difference, PlanSummary

EQUAL, DIFFERENT, UNREADABLE = 0, 1, 2
COLUMN_CHARS = 44
MAX_LINES = 40


def replay(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="A file of each recording, or a folder of recordings, as given to --record.",
        ),
    ],
) -> None:
    """Replay recordings of an engine, and compare every plan.

    A fresh scheduler gets the recorded calls at their recorded times. The exit code is 0 if all
    plans are equal, 1 if one differs, and 2 if a recording cannot be read.
    """
    from headway.record.reader import find_recordings

    codes = [_replay_one(path) for path in find_recordings(paths)]
    raise typer.Exit(max(codes))


def _replay_one(path: Path) -> int:
    from headway.record.reader import RecordingReader
    from headway.record.replay import ReplayedEngine, find_difference

    reader, core = None, None
    try:
        reader = RecordingReader.open(path)
        core = ReplayedEngine(reader.header)
        difference = find_difference(reader, core)
    except RecordingError as error:
        if core is not None:
            typer.echo(f"{path.name}: {core.num_steps} steps equal, then:")
        typer.echo(f"headway: error: {error}", err=True)
        return UNREADABLE
    if difference is None:
        note = "" if reader.is_complete else f" ({reader.end})"
        typer.echo(f"{path.name}: {core.num_steps} steps equal{note}")
        return EQUAL
    typer.echo(f"{path.name}: {_describe(difference)}")
    if (hint := _hint(reader)) is not None:
        typer.echo(hint)
    return DIFFERENT


def _describe(difference: Difference) -> str:
    from headway.record.replay import AdmissionDifference

    if isinstance(difference, AdmissionDifference):
        words = ("refused", "accepted") if difference.was_refused else ("accepted", "refused")
        return (
            f"{difference.step} steps equal; then request {difference.request_id} was {words[0]} "
            f"in the recording and is {words[1]} in the replay, at {difference.now:.6f} s"
        )
    recorded, replayed = _lines(difference.recorded), _lines(difference.replayed)
    title = f"{difference.step - 1} steps equal; step {difference.step} differs, at "
    title += f"{difference.now:.6f} s"
    if recorded == replayed:
        return f"{title}: the same requests and tokens, in another order or in other blocks"
    rows = list(zip_longest(recorded, replayed, fillvalue=""))
    odd = set(recorded) ^ set(replayed)
    shown = [
        f"{'*' if {left, right} & odd else ' '} {left:{COLUMN_CHARS}} {right}"
        for left, right in [("recorded", "replayed"), *rows]
    ]
    if len(shown) > MAX_LINES:
        shown = [*shown[:MAX_LINES], f"  and {len(shown) - MAX_LINES} more"]
    return "\n".join([title, *shown])


def _lines(plan: PlanSummary) -> list[str]:
    """Return one line per request of a plan."""
    chunks = [f"{name} tokens {at} to {at + count - 1}" for name, at, count in plan.chunks]
    return [*(f"{name} decodes" for name in plan.decodes), *chunks] or ["nothing"]


def _hint(reader: RecordingReader) -> str | None:
    """Return why plans may differ without a fault, if there is a reason."""
    header = reader.header
    if header.headway != __version__:
        return f"recorded by release {header.headway}, replayed by {__version__}"
    return f"recorded on {header.platform}: powers and logarithms may differ elsewhere"
