"""The `headway` command: one file per subcommand.

In reading order:

    options.py   flags from the settings
    progress.py  progress bars
    ledger.py    opens the ledger for a command
    serve.py, chat.py, bench.py, doctor.py, explain.py, usage.py, keys.py, tenants.py
"""

from __future__ import annotations

import errno
import os
import sys

import typer

from headway._version import __version__
from headway.cli import bench, chat, doctor, explain, keys, serve, tenants, usage
from headway.errors import HeadwayError

app = typer.Typer(
    name="headway",
    help="A continuous-batching LLM inference server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("usage")(usage.usage)
app.add_typer(bench.app, name="bench")
app.add_typer(keys.app, name="keys")
app.add_typer(tenants.app, name="tenants")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"headway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command; print an error as one line, not a traceback."""
    try:
        app()
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
