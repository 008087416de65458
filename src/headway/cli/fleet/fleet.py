"""`headway fleet`: run many engines and frontends from one file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from headway.errors import ConfigError
from headway.fleet.manage.control import ControlRequest, FleetClient, FleetStatus
from headway.fleet.manage.folders import list_fleets
from headway.fleet.manage.spec import read_spec

app = typer.Typer(no_args_is_help=True, help="Run many engines and frontends from one file.")

FileArgument = Annotated[Path, typer.Argument(help="YAML file of the fleet.")]
NameArgument = Annotated[
    str | None, typer.Argument(help="Name of the fleet; not needed if there is one.")
]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Return at once.")]
PoolOption = Annotated[str, typer.Option("--pool", help="Pool; not needed if there is one.")]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Without Ray: end what runs here, leave the rest.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

MAX_FAILING_S = 30.0
"""Time after which `up` and others stop waiting for a member that does not start."""


@app.callback()
def _root() -> None:
    pass


@app.command("up")
def up(file: FileArgument, no_wait: NoWait = False) -> None:
    """Start a fleet, and wait until every member is ready."""
    spec = read_spec(file)
    client = FleetClient(spec.name)
    is_new = not client.has_state
    client.start(spec)
    _echo(f"the manager of fleet {spec.name} is started; its log: {client.folder.manager_log}")
    if not is_new:
        _echo("the fleet goes on as it was; headway fleet upgrade FILE applies changes of the file")
    if no_wait:
        return
    watch = _Watch(client, fails_early=is_new)
    status = watch.run(lambda one: one.is_settled)
    addresses = {one.address for one in status.members if one.role == "frontend"}
    _echo(f"fleet {spec.name} is up: {', '.join(sorted(addresses)) or 'no frontends'}")


@app.command("status")
def status(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """Show the members of a fleet."""
    found = FleetClient(_name(name)).status()
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
        return
    _print_status(found)


@app.command("scale")
def scale(
    number: Annotated[str, typer.Argument(help="Engines, 0 or more; auto: as the load needs.")],
    name: NameArgument = None,
    pool: PoolOption = "",
    no_wait: NoWait = False,
) -> None:
    """Set the number of engines, and wait until it is reached.

    Autoscaling is off for this pool from then on, until `headway fleet scale auto`.
    """
    if number != "auto" and not (number.isascii() and number.isdecimal() and len(number) < 6):
        raise ConfigError(f"give a number of engines, or auto; got {number[:100]!r}")
    client = FleetClient(_name(name))
    client.ask(ControlRequest("scale", pool, None if number == "auto" else int(number)))
    if not no_wait:
        _Watch(client).run(lambda one: one.is_settled)


@app.command("drain")
def drain(
    member: Annotated[str, typer.Argument(help="Engine, as in `headway fleet status`.")],
    name: NameArgument = None,
    no_wait: NoWait = False,
) -> None:
    """Move the requests of an engine to others, and replace it by a new one."""
    client = FleetClient(_name(name))
    client.ask(ControlRequest("drain", member=member))
    if not no_wait:
        _Watch(client).run(lambda one: one.is_settled)


@app.command("upgrade")
def upgrade(file: FileArgument, no_wait: NoWait = False) -> None:
    """Replace every engine, then every frontend, one after the other, by those of a file."""
    spec = read_spec(file)
    client = FleetClient(spec.name)
    client.ask(ControlRequest("upgrade", spec=spec))
    if not no_wait:
        _Watch(client).run(lambda one: one.is_settled)


@app.command("down")
def down(name: NameArgument = None, force: ForceOption = False) -> None:
    """Stop every frontend, every engine and the manager."""
    client = FleetClient(_name(name))
    watch = _Watch(client)
    try:
        client.down(watch.note, force)
    except KeyboardInterrupt:
        _echo(f"fleet {client.name} goes on stopping; headway fleet status {client.name} shows it")
        raise typer.Exit(130) from None
    for member in watch.abandoned:
        _echo(f"{member} was out of reach: an engine ends when its lease is over, stop a frontend")
    _echo(f"fleet {client.name} is down")


class _Watch:
    """Prints what changes in a fleet while a command waits."""

    def __init__(self, client: FleetClient, fails_early: bool = False) -> None:
        self._client = client
        self._fails_early = fails_early
        self._seen: dict[str, str] = {}
        self.abandoned: list[str] = []
        self._problem = ""
        self._failing_since: float | None = None

    def run(self, is_done: Callable[[FleetStatus], bool]) -> FleetStatus:
        """Wait until a status passes a test; Ctrl-C ends the waiting only."""
        name = self._client.name
        try:
            return self._client.wait(is_done, self.note)
        except KeyboardInterrupt:
            _echo(
                f"fleet {name} goes on: headway fleet status {name} shows it, headway fleet down "
                f"{name} ends it"
            )
            raise typer.Exit(130) from None

    def note(self, status: FleetStatus) -> None:
        """Print what has changed since the last status; raise ConfigError if it is hopeless."""
        for name in self._seen.keys() - {member.name for member in status.members}:
            _echo(f"{name}: gone")
            del self._seen[name]
        for member in status.members:
            text = member.phase if member.phase != "ready" else f"ready at {member.address}"
            if self._seen.get(member.name) != text:
                _echo(f"{member.name}: {text}")
                self._seen[member.name] = text
        if status.problem and status.problem != self._problem:
            _echo(status.problem)
        self._problem, self.abandoned = status.problem, status.abandoned
        self._check(status)

    def _check(self, status: FleetStatus) -> None:
        is_refused = "cannot be joined" in status.problem
        if self._fails_early and is_refused and not any(one.pid for one in status.members):
            self._client.abandon()
            raise ConfigError(status.problem)
        failing = [
            one
            for one in status.members
            if one.problem and one.phase == "starting" and not status.is_ending
        ]
        if not failing:
            self._failing_since = None
            return
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        elif time.monotonic() - self._failing_since > MAX_FAILING_S:
            raise ConfigError(
                f"{failing[0].name} does not start: {failing[0].problem}; the fleet goes on trying "
                f"(headway fleet status {status.name}) until headway fleet down {status.name}"
            )


def _name(given: str | None) -> str:
    """Return the name of the fleet: the one that was given, or the only one there is."""
    if given is not None:
        return given
    names = list_fleets()
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError("no fleet is up; start one with: headway fleet up FILE")
    raise ConfigError(f"name one of the fleets: {', '.join(names)}")


def _print_status(status: FleetStatus) -> None:
    place = f"placed by Ray at {status.ray}" if status.ray else "on this machine"
    state = "ending" if status.is_ending else "settled" if status.is_settled else "changing"
    _print(f"fleet {status.name}: {state}, {place}, generation {status.generation}")
    if status.problem:
        _print(f"problem: {status.problem}")
    for pool in status.pools:
        low, high = pool.bounds
        mode = "set by hand" if pool.is_fixed else f"scaled between {low} and {high}"
        _print(f"pool {pool.name}: {pool.target} engines ({mode}; need {pool.need:.2f})")
    rows = [
        (one.name, one.pool, one.phase, one.node, one.address, str(one.pid or ""), one.problem)
        for one in status.members
    ]
    titles = ("member", "pool", "phase", "node", "address", "pid", "problem")
    widths = [max(len(row[at]) for row in (titles, *rows)) for at in range(len(titles))]
    for row in (titles, *rows):
        cells = zip(row, widths, strict=True)
        _print("  ".join(f"{cell:{width}}" for cell, width in cells).rstrip())


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _echo(text: str) -> None:
    typer.echo(text, err=True)
