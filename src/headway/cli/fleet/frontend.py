"""`headway frontend`: serve the OpenAI API over engines on the network."""

from __future__ import annotations

import typer

from headway.cli.options import with_settings
from headway.config import Config
from headway.logs import set_up_logging


@with_settings(
    *("server", "recording", "logs", "tracing", "ledger", "batches"),
    *("cluster", "frontend", "routing"),
)
def frontend(config: Config) -> None:
    """Serve the OpenAI API over engines on the network.

    The engines run with `headway engine`, on this machine or others. MODEL is the model of the
    engines; only its tokenizer and chat template are read. Several frontends share one `headway
    router`.
    """
    set_up_logging(config.logs.log_format, "server")
    from headway.build_fleet import run_frontend

    raise typer.Exit(run_frontend(config))
