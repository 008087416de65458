"""The subcommands as one typer application."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import typer

from headway._version import __version__

SUMMARIES = {
    "serve": "Serve a model over HTTP with the OpenAI API.",
    "chat": "Chat with a model.",
    "doctor": "Show the hardware: cores, instruction sets, torch, memory, KV cache.",
    "explain": "Explain a request: a paragraph and a timeline.",
    "usage": "Sum usage and cost of requests.",
    "bench": "Measure throughput and latency.",
    "cache": "List or delete packed weights, which speed up starts.",
    "keys": "Create keys for --api-keys-file.",
    "tenants": "Edit the file for --tenants-file.",
}
"""First line of the help of each subcommand; an import of all of them takes a second."""
GROUPS = ("bench", "cache", "keys", "tenants")


def make_app(arguments: Sequence[str] | None = None) -> typer.Typer:
    """Make the command with the subcommand that `arguments` name.

    Without `arguments`, with all. If they name no subcommand, with the names and summaries of all,
    which is enough for help and for the error.
    """
    app = typer.Typer(
        name="headway",
        help="A continuous-batching LLM inference server.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    if arguments is not None and (not arguments or arguments[0] not in SUMMARIES):
        for name, summary in SUMMARIES.items():
            app.command(name, help=summary)(_not_imported)
        return app
    for name in SUMMARIES if arguments is None else arguments[:1]:
        module = import_module(f"headway.cli.{name}")
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
