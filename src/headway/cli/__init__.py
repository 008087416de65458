"""The `headway` command: a file per subcommand.

In reading order:

    root.py         `headway --version` and `headway --help` without typer
    app.py          the subcommands as one typer application
    quick_serve.py  `headway serve` without typer
    options.py      flags from the settings
    progress.py     progress bars
    remote.py       how commands ask a server
    serve.py, chat.py, batch.py, bench.py, doctor.py, replay.py, cache.py
    observe/        explain, trace, usage
    tenancy/        tenants, keys
    capacity/       profile, simulate, plan
    top/            the dashboard in a terminal
    fleet/          engine, frontend, router, fleet
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.cli import root
from headway.errors import HeadwayError

if TYPE_CHECKING:
    from headway.engine.supervise.start import EngineStart


def main() -> None:
    """Run the command; print an error as one line, not a traceback."""
    arguments, engine = sys.argv[1:], None
    try:
        if (text := root.answer(arguments)) is not None:
            sys.stdout.write(f"{text}\n")
            return
        engine = _start_engine(arguments)
        if engine is not None:
            from headway.cli.quick_serve import read_arguments, serve

            config = read_arguments(arguments[1:])
            if config is not None:
                sys.exit(serve(config, engine))
        from headway.cli.app import make_app  # takes long
        from headway.config import completion_words

        words = completion_words()
        make_app(arguments if words is None else words)(obj=engine)
    except HeadwayError as error:
        sys.stderr.write(f"headway: error: {error}\n")
        sys.exit(2)
    except ModuleNotFoundError as error:
        if sys.implementation.name == "cpython":
            raise
        text = "simulate and plan run here, other commands need CPython"
        sys.stderr.write(f"headway: error: {error.name} is not installed: {text}\n")
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
        sys.stderr.write(f"headway: error: {error.strerror}; not everything was written\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        if engine is not None:
            engine.close()


def _start_engine(arguments: Sequence[str]) -> EngineStart | None:
    """Start the engine process of a server.

    It imports its modules while this process reads the settings.
    """
    if arguments[:1] != ["serve"] or "--help" in arguments:
        return None
    from headway.engine.supervise.start import EngineStart, make_memory

    return EngineStart(memory=make_memory())
