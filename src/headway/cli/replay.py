"""`headway replay`: replay recordings of an engine, and compare every plan."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway._version import __version__
from headway.errors import RecordingError

if TYPE_CHECKING:
    from collections.abc import Callable

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
    profile: Annotated[
        str | None,
        typer.Option(help="Say how long steps took by this profile: a file, or the name of one."),
    ] = None,
) -> None:
    """Replay recordings of an engine, and compare every plan.

    A fresh scheduler gets the recorded calls at their recorded times. The exit code is 0 if all
    plans are equal, 1 if one differs or a call fails, and 2 if a recording cannot be read.
    """
    from headway.record.reader import find_recordings

    say = None if profile is None else _slowness_reporter(profile)
    codes: list[int] = []
    for path in find_recordings(paths):
        codes.append(_replay_one(path))
        if say is not None and codes[-1] == EQUAL:
            say(path)
        elif say is not None:
            typer.echo("not compared with the profile")
    raise typer.Exit(max(codes))


def _slowness_reporter(name: str) -> Callable[[Path], None]:
    """Return what prints how long the steps of a recording took by a profile."""
    from headway.sim.profile.catalog import find_profile
    from headway.sim.profile.slowness import measure_slowness
    from headway.sim.recording.observed import read_observed

    profile = find_profile(name)

    def report(path: Path) -> None:
        observed = read_observed(path)
        model = observed.header.model
        if not observed.steps:
            typer.echo("no steps to compare with the profile")
            return
        found = measure_slowness(observed.steps, profile)
        text = f"steps took {found.total:.2f} times as long as profiled"
        settings = f"--set slowness={found.total:.2f}"
        if len(found.windows) > 1:
            text += f", {min(found.windows):.2f} to {max(found.windows):.2f} times by minute"
            settings += f" --set drift={max(found.drift, profile.drift):.2f}"
        if model != profile.model:
            typer.echo(f"{text}, but the recording is of {model}, the profile of {profile.model}")
        elif profile.is_datasheet:
            typer.echo(text)
        else:
            typer.echo(f"{text}: plan with {settings}")

    return report


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
    at = _when(reader, difference.now)
    typer.echo(f"{path.name}: {_describe(difference, at)}")
    if (hint := _hint(reader)) is not None:
        typer.echo(hint)
    return DIFFERENT


def _when(reader: RecordingReader, now: float) -> str:
    """Return a time of the engine's clock in words, with the date if it is known."""
    began_at = reader.header.clock_began_at
    if began_at is None:
        return f"at {now:.6f} s"
    date = datetime.fromtimestamp(began_at + now, UTC)
    return f"at {now:.6f} s, {date:%Y-%m-%d %H:%M:%S} UTC"


def _describe(difference: Difference, at: str) -> str:
    from headway.record.replay import AdmissionDifference, ReplayFailure

    if isinstance(difference, AdmissionDifference):
        words = ("refused", "accepted") if difference.was_refused else ("accepted", "refused")
        return (
            f"{difference.step} steps equal; then request {difference.request_id} was {words[0]} "
            f"in the recording and is {words[1]} in the replay, {at}"
        )
    num_equal = max(0, difference.step - 1)
    if isinstance(difference, ReplayFailure):
        step = difference.step
        return f"{num_equal} steps equal; step {step} fails in the replay, {at}: {difference.error}"
    recorded, replayed = _lines(difference.recorded), _lines(difference.replayed)
    title = f"{num_equal} steps equal; step {difference.step} differs, {at}"
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
