"""`headway serve`: serve a model with the OpenAI API."""

from __future__ import annotations

import logging

import typer

from headway.cli.options import with_settings
from headway.config import Config
from headway.engine.supervise.start import EngineStart, make_memory


@with_settings("model", "cache", "scheduler", "supervision", "server", "ledger")
def serve(config: Config) -> None:
    """Serve a model over HTTP with the OpenAI API.

    The first Ctrl-C drains the server; the second stops it at once.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # The engine process imports its modules while this process imports those below.
    first = EngineStart(memory=make_memory(config))
    try:
        from headway.build import run_server

        code = run_server(config, first=first)
    finally:
        first.close()
    raise typer.Exit(code)
