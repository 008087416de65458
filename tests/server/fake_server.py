"""The real server over the fake engine; arguments: port, settings as JSON, tokenizer file."""

from __future__ import annotations

import logging
import sys

from headway.clock import SystemClock
from headway.config import ServerConfig
from headway.engine.async_engine import AsyncEngine
from headway.engine.launcher import EngineProcess
from headway.errors import ConfigError
from headway.observe import Metrics
from headway.server import create_app, listen, run, serve
from headway.text import ChatTemplate, Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


async def main(port: int, settings: bytes, tokenizer_path: str) -> int:
    config = ServerConfig(port=port, log_interval_s=0.2, max_body_bytes=100_000)
    try:
        listener = listen(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "tests.server.fake_engine"]
    tokenizer = Tokenizer.from_gguf(tokenizer_path)
    engine = AsyncEngine(EngineProcess(command, settings), tokenizer, SystemClock())
    print("engine", engine.pid, flush=True)
    app = create_app(engine, config, ("fake",), ChatTemplate(TEMPLATE, {}), Metrics("fake"))
    return await serve(engine, app, config, listener)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    sys.exit(run(main(int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3])))
