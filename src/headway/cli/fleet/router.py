"""`headway router`: decide for several frontends which engine gets a request, and when."""

from __future__ import annotations

import typer

from headway.cli.options import with_settings
from headway.config import Config
from headway.logs import set_up_logging

LISTEN = "tcp://127.0.0.1:7700"


@with_settings(
    *("recording", "logs", "cluster", "listener", "routing"), has_model=False, listen=LISTEN
)
def router(config: Config) -> None:
    """Decide for several frontends which engine gets a request.

    Fair shares then hold over all frontends that name it with --router. Tokens never pass it. While
    it is gone, frontends decide by themselves; a second router stands by.
    """
    set_up_logging(config.logs.log_format, "router")
    from headway.build_fleet import run_router

    raise typer.Exit(run_router(config))
