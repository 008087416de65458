"""The `headway` command: one file per subcommand.

In reading order:

    options.py   flags from the settings
    progress.py  progress bars
    ledger.py    opens the ledger for a command
    serve.py, engine.py, frontend.py, chat.py, bench.py, doctor.py, explain.py, usage.py, keys.py,
    tenants.py, cache.py
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from headway._version import __version__
from headway.errors import HeadwayError

COMMANDS = ("serve", "engine", "frontend", "chat", "doctor", "explain", "usage")
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


def main() -> None:
    """Run the command; print an error as one line, not a traceback."""
    try:
        make_app(sys.argv[1:])()
    except HeadwayError as error:
        typer.echo(f"headway: error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output is gone; a flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"headway: error: {error.strerror}; not everything was written", err=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
