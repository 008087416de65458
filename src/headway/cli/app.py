"""The subcommands as one typer application."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

from headway._version import __version__
from headway.cli.root import ABOUT, SUMMARIES

GROUPS = ("batch", "bench", "cache", "fleet", "keys", "tenants")
FOLDERS = {
    **dict.fromkeys(("explain", "trace", "usage"), "observe"),
    **dict.fromkeys(("keys", "tenants"), "tenancy"),
    **dict.fromkeys(("profile", "simulate", "plan"), "capacity"),
    **dict.fromkeys(("engine", "frontend", "router", "fleet"), "fleet"),
}
"""Folders of the subcommands that have one."""


def make_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Make the command with the subcommand that `arguments` name.

    Without `arguments`, with all. If they name no subcommand, with the names and summaries of all,
    which is enough for help and for the error.
    """
    app = typer.Typer(
        name="headway",
        help=ABOUT,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    if arguments is not None and (not arguments or arguments[0] not in SUMMARIES):
        for name, summary in SUMMARIES.items():
            app.command(name, help=summary)(_not_imported)
        return app
    for name in SUMMARIES if arguments is None else arguments[:1]:
        place = f"{FOLDERS[name]}.{name}" if name in FOLDERS else name
        module = import_module(f"headway.cli.{place}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def _not_imported() -> None:
    raise NotImplementedError


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
