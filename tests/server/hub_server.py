"""`headway serve` over the fake engine. The one argument: the settings as JSON."""

from __future__ import annotations

import logging
import sys

import msgspec

from headway.build_server import run_server
from headway.config import load_config
from headway.errors import HeadwayError

ENGINE_COMMAND = (sys.executable, "-m", "tests.server.hub_engine")

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        code = run_server(load_config(msgspec.json.decode(sys.argv[1])), ENGINE_COMMAND)
    except HeadwayError as error:
        print("headway: error:", error, file=sys.stderr)
        code = 2
    sys.exit(code)
