"""`headway serve`: serve a model with the OpenAI API."""

from __future__ import annotations

import typer

from headway.cli import quick_serve
from headway.cli.options import with_settings
from headway.config import Config


@with_settings(*quick_serve.SERVE_SECTIONS)
def serve(config: Config, context: typer.Context) -> None:
    """Serve a model over HTTP with the OpenAI API.

    The first Ctrl-C drains the server; the second stops it at once.
    """
    raise typer.Exit(quick_serve.serve(config, context.obj))
