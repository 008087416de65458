"""`headway serve` with injected faults in both processes. Arguments: model, settings as JSON."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from benchmarks.faults.injection import Inbox
from headway.build_server import run_server
from headway.config import load_config
from headway.engine.supervise import launcher
from headway.text import output

ENGINE_COMMAND = (sys.executable, "-m", "benchmarks.faults.faulty_engine")


def corrupt_commands(inbox: Inbox) -> None:
    """Send an invalid command frame when the fault is injected."""
    encode = launcher.encode

    def faulty_encode(command: object) -> bytes:
        return b"\xc1" + encode(command) if inbox.take("garbage") else encode(command)

    launcher.encode = faulty_encode


def fail_detokenizing(inbox: Inbox) -> None:
    push = output.OutputText.push

    def faulty_push(self: Any, token_ids: Any) -> Any:
        if inbox.take("tokenizer"):
            raise ValueError("a fault in the tokenizer")
        return push(self, token_ids)

    output.OutputText.push = faulty_push


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    faults = Inbox("api")
    corrupt_commands(faults)
    fail_detokenizing(faults)
    settings = load_config(msgspec.json.decode(sys.argv[2]) | {"model": sys.argv[1]})
    sys.exit(run_server(settings, ENGINE_COMMAND))
