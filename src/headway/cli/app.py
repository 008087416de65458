"""The subcommands as one typer application."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

from headway._version import __version__

COMMANDS = ("serve", "chat", "doctor", "explain", "usage")
GROUPS = ("bench", "cache", "keys", "tenants")


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Make the command with the subcommand that `arguments` name, else with all.

    An import of all subcommands takes a second.
    """
    app = typer.Typer(
        name="headway",
        help="A continuous-batching LLM inference server.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    names, first = COMMANDS + GROUPS, arguments[0] if arguments else ""
    if first == "--version":
        names = ()
    elif first in names:
        names = (first,)
    for name in names:
        module = import_module(f"headway.cli.{name}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"headway {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass
