"""`headway engine`: run an engine that frontends use over the network."""

from __future__ import annotations

import typer

from headway.cli.options import with_settings
from headway.config import Config
from headway.engine.supervise.start import EngineStart, make_memory
from headway.logs import set_up_logging


@with_settings(
    *("model", "cache", "scheduler", "supervision", "recording", "logs"),
    *("cluster", "listener", "orphans"),
)
def engine(config: Config) -> None:
    """Run an engine that waits for frontends.

    Start frontends with `headway frontend`. An engine process that fails is replaced. Ctrl-C stops
    the engine: its requests go on in other engines.
    """
    set_up_logging(config.logs.log_format, "host")
    # The engine process imports its modules while this process imports those below.
    first = EngineStart(memory=make_memory())
    try:
        from headway.build_fleet import run_engine

        code = run_engine(config, first=first)
    finally:
        first.close()
    raise typer.Exit(code)
