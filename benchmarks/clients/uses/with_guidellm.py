# pyright: basic, reportMissingImports=false
"""guidellm: a short load with made-up prompts on each route that it knows."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clients.uses.checks import WRONG_KEY, Check, Server, expect, run
from benchmarks.clients.uses.tools import tokenizer_folder

NUM_REQUESTS = 12
OUTPUT_TOKENS = 8
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def measure(server: Server, route: str, key: str, *, is_stream: bool = True) -> dict[str, Any]:
    """Run the command line; return its report, or raise with the end of its output."""
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": server.model,
        "request_format": route,
        "api_key": key,
        "stream": is_stream,
    }
    tokens = {"prompt_tokens": 32, "output_tokens": OUTPUT_TOKENS}
    report = Path(tempfile.mkdtemp(prefix="report-", dir=".")).resolve() / "benchmarks.json"
    options = {
        "--backend": backend,
        "--profile": {"kind": "concurrent", "streams": [4]},
        "--constraint": {"kind": "max_requests", "count": NUM_REQUESTS},
        "--data": {"kind": "synthetic_text", **tokens},
        "--tokenizer": {"kind": "huggingface_auto", "model": tokenizer_folder()},
        "--output": {"kind": "json", "path": str(report)},
    }
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    for name, value in options.items():
        command += [name, json.dumps(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise AssertionError((done.stdout + done.stderr)[-400:])
    return json.loads(report.read_text())


def load_on(route: str, *, is_stream: bool = True) -> Check:
    """Return a check of one route."""

    def checked(server: Server) -> str:
        (benchmark,) = measure(server, route, server.key, is_stream=is_stream)["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        expect(totals["successful"] == NUM_REQUESTS and not totals["errored"], totals)
        counts = benchmark["metrics"]["output_token_count"]["successful"]
        expect(counts["mean"] == OUTPUT_TOKENS, counts)
        return f"{totals['successful']} requests of {OUTPUT_TOKENS} tokens"

    checked.__name__ = f"{route} {'streamed' if is_stream else 'whole'}"
    return checked


def wrong_key_is_an_error(server: Server) -> str:
    try:
        measure(server, ROUTES[0], WRONG_KEY)
    except AssertionError as error:
        expect("validation request failed" in str(error), str(error)[-200:])
        return "the validation of the client fails"
    raise AssertionError("a wrong key was accepted")


if __name__ == "__main__":
    run(*map(load_on, ROUTES), load_on(ROUTES[0], is_stream=False), wrong_key_is_an_error)
