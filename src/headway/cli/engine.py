"""`headway engine`: run an engine that frontends use over the network."""

from __future__ import annotations

import logging

import typer

from headway.cli.options import with_settings
from headway.config import Config
from headway.engine.supervise.start import EngineStart, make_memory


@with_settings(
    *("model", "cache", "scheduler", "supervision", "recording", "cluster", "listener", "orphans")
)
def engine(config: Config) -> None:
    """Run an engine that waits for frontends.

    Start frontends with `headway frontend`. An engine process that fails is replaced. Ctrl-C stops
    the engine: its requests go on in other engines.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # The engine process imports its modules while this process imports those below.
    first = EngineStart(memory=make_memory())
    try:
        from headway.build_fleet import run_engine

        code = run_engine(config, first=first)
    finally:
        first.close()
    raise typer.Exit(code)
