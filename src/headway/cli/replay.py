"""`headway replay`: replay recordings of engines and routers, and compare every decision."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway._version import __version__
from headway.errors import RecordingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.record.entries import Header
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
    """Replay recordings of engines and routers, and compare every decision.

    A fresh scheduler or router gets the recorded calls at their recorded times. The exit code is 0
    if all decisions are equal, 1 if one differs or a call fails, and 2 if a recording cannot be
    read.
    """
    from headway.record.reader import find_recordings

    say = None if profile is None else _slowness_reporter(profile)
    codes: list[int] = []
    for path in find_recordings(paths):
        is_router, code = _replay_any(path)
        codes.append(code)
        if say is not None and code == EQUAL and not is_router:
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


def _replay_any(path: Path) -> tuple[bool, int]:
    """Replay a recording; return whether it is one of a router, and the exit code."""
    from headway.record.kinds import ROUTER
    from headway.record.reader import kind_of

    try:
        is_router = kind_of(path) == ROUTER.name
    except RecordingError as error:
        typer.echo(f"headway: error: {error}", err=True)
        return False, UNREADABLE
    return is_router, _replay_router(path) if is_router else _replay_engine(path)


def _replay_engine(path: Path) -> int:
    from headway.record.kinds import ENGINE
    from headway.record.reader import RecordingReader
    from headway.record.replay import ReplayedEngine, find_difference

    reader, core = None, None
    try:
        reader = RecordingReader.open(path, ENGINE)
        core = ReplayedEngine(reader.header)
        difference = find_difference(reader, core)
    except RecordingError as error:
        return _unreadable(path, "" if core is None else f"{core.num_steps} steps", error)
    if difference is None:
        return _equal(reader, f"{core.num_steps} steps")
    at = _when(reader.header, difference.now)
    return _different(reader, _describe(difference, at))


def _replay_router(path: Path) -> int:
    from headway.record.kinds import ROUTER
    from headway.record.reader import RecordingReader
    from headway.record.router.replay import CallFailure, ReplayedRouter, find_router_difference

    reader, router = None, None
    try:
        reader = RecordingReader.open(path, ROUTER)
        router = ReplayedRouter(reader.header)
        difference = find_router_difference(reader.entries(), router)
    except RecordingError as error:
        return _unreadable(
            path, "" if router is None else f"{router.num_decisions} decisions", error
        )
    if difference is None:
        return _equal(reader, f"{router.num_decisions} decisions")
    at = _when(reader.header, difference.now)
    title = f"{difference.num_equal} decisions equal; the next one"
    if isinstance(difference, CallFailure):
        return _different(reader, f"{title} fails in the replay, {at}: {difference.error}")
    pairs = [("recorded:", difference.recorded), ("replayed:", difference.replayed)]
    lines = [f"  {name} {line}" for name, found in pairs for line in found or ("nothing",)]
    return _different(reader, "\n".join([f"{title} differs, {at}", *_cut(lines)]))


def _unreadable(path: Path, done: str, error: RecordingError) -> int:
    if done:
        typer.echo(f"{path.name}: {done} equal, then:")
    typer.echo(f"headway: error: {error}", err=True)
    return UNREADABLE


def _equal(reader: RecordingReader[Any, Any], done: str) -> int:
    note = "" if reader.is_complete else f" ({reader.end})"
    typer.echo(f"{reader.path.name}: {done} equal{note}")
    return EQUAL


def _different(reader: RecordingReader[Any, Any], text: str) -> int:
    typer.echo(f"{reader.path.name}: {text}")
    if (hint := _hint(reader.header)) is not None:
        typer.echo(hint)
    return DIFFERENT


def _cut(lines: list[str]) -> list[str]:
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[:MAX_LINES], f"  and {len(lines) - MAX_LINES} more"]


def _when(header: Header, now: float) -> str:
    """Return a time of the recorded clock in words, with the date if it is known."""
    began_at = header.clock_began_at
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
    return "\n".join([title, *_cut(shown)])


def _lines(plan: PlanSummary) -> list[str]:
    """Return one line per request of a plan."""
    chunks = [f"{name} tokens {at} to {at + count - 1}" for name, at, count in plan.chunks]
    return [*(f"{name} decodes" for name in plan.decodes), *chunks] or ["nothing"]


def _hint(header: Header) -> str | None:
    """Return why decisions may differ without a fault, if there is a reason."""
    if header.headway != __version__:
        return f"recorded by release {header.headway}, replayed by {__version__}"
    return f"recorded on {header.platform}: powers and logarithms may differ elsewhere"
