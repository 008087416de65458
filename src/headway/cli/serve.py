"""`headway serve`: serve a model with the OpenAI API."""

from __future__ import annotations

import logging

import typer

from headway.build import run_server
from headway.cli.options import with_settings
from headway.config import Config


@with_settings("model", "cache", "scheduler", "server", "ledger")
def serve(config: Config) -> None:
    """Serve a model over HTTP with the OpenAI API.

    The first Ctrl-C drains the server; the second stops it at once.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise typer.Exit(run_server(config))
