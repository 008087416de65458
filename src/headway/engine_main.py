"""The entry point of the engine process.

Settings come as one line on standard input; the only argument is the address of the sockets.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Callable

import msgspec

from headway.build import build_core, engine_info, load_model
from headway.config import Config
from headway.core.engine import EngineCore
from headway.core.events import Sink
from headway.core.executor import Executor
from headway.engine.process.journal import JournaledExecutor
from headway.engine.process.loop import EngineLoop, Progress, ignore_stop_signals
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.launcher import STACKS_SIGNAL


def main(wrap: Callable[[Executor], Executor] = lambda executor: executor) -> int:
    """Run until a Shutdown command; return the exit code. `wrap` may wrap the executor."""
    ignore_stop_signals()
    faulthandler.register(STACKS_SIGNAL)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine: %(message)s")
    config = msgspec.json.decode(sys.stdin.readline(), type=Config)
    loop = EngineLoop(sys.argv[1])

    def factory(sink: Sink, progress: Progress) -> tuple[EngineCore, EngineInfo]:
        model = load_model(config, progress)
        executor = JournaledExecutor(wrap(model.executor), loop.journal)
        return build_core(config, executor, sink), engine_info(config, model)

    return loop.run(factory)


if __name__ == "__main__":
    sys.exit(main())
