"""The entry point of the engine process.

Settings come as one line on standard input. A standby process loads the weights and waits for
another line before it takes over the KV blocks.
"""

from __future__ import annotations

import argparse
import faulthandler
import select
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.build import (
    build_core,
    build_matchers,
    build_recording,
    engine_info,
    load_model,
)
from headway.config import Config
from headway.core.engine import EngineCore
from headway.core.events import Sink
from headway.core.executor import Executor
from headway.engine.process.grammar_queue import GrammarQueue
from headway.engine.process.journal import JournaledExecutor
from headway.engine.process.loop import EngineLoop, Progress, ignore_stop_signals
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.start import STACKS_SIGNAL
from headway.logs import set_up_logging


def main(wrap: Callable[[Executor], Executor] = lambda executor: executor) -> int:
    """Run until a Shutdown command; return the exit code. `wrap` may wrap the executor."""
    ignore_stop_signals()
    faulthandler.register(STACKS_SIGNAL)
    arguments = _parse_arguments()
    line = sys.stdin.readline()
    if not line:  # the API process ended before it had settings
        _remove_folder(arguments.address)
        return 0
    config = msgspec.json.decode(line, type=Config)
    set_up_logging(config.logs.log_format, "engine")
    loop = EngineLoop(arguments.address)

    def factory(sink: Sink, progress: Progress) -> tuple[EngineCore, EngineInfo]:
        wait = _wait_for_activation if arguments.standby else lambda: None
        # Blocks that outlive an engine are found again through the prefix index.
        has_index = config.cache.enable_prefix_caching
        descriptor = arguments.kv_descriptor if has_index else None
        model = load_model(config, progress, descriptor, wait)
        matchers = build_matchers(config, model.vocab_size)
        model.executor.use_grammars(matchers)
        loop.use_grammars(GrammarQueue(matchers))
        executor = JournaledExecutor(wrap(model.executor), loop.journal)
        recording = build_recording(config, model)
        core = build_core(config, executor, sink, model.executor.recorder, recording)
        return core, engine_info(config, model)

    code = loop.run(factory)
    if select.select([sys.stdin], [], [], 0)[0]:
        _remove_folder(arguments.address)
    return code


def _remove_folder(address: str) -> None:
    """Remove the folder of the sockets, which an API process that was killed has left."""
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="prefix of the sockets of the API process")
    parser.add_argument("--kv-descriptor", type=int, help="memory for KV blocks that outlives this")
    parser.add_argument("--standby", action="store_true", help="wait before taking over")
    return parser.parse_args()


def _wait_for_activation() -> None:
    if not sys.stdin.readline():  # the API process is gone, or has no use for this process
        sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
