"""Runs the checks of one client against a server that is started for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients.catalog import Client
from benchmarks.clients.environments import prepare, python_of
from benchmarks.clients.uses.checks import Result
from benchmarks.support.commands import CommandFailed
from benchmarks.support.servers import ROOT, ServerFailed, start_model_server

MODEL_NAME = "smollm2"
KEY = "clients-key"
TIMEOUT_S = 1500
QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "true",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Keeps clients from sending telemetry and from looking for files on the network."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one client; `problem` says why checks were not run."""

    client: Client
    versions: dict[str, str]
    results: tuple[Result, ...] = ()
    problem: str = ""

    is_installed: bool = True

    @property
    def is_expected(self) -> bool:
        """Whether nothing speaks against the server: a client that is not installed does not."""
        is_complete = not self.problem or not self.is_installed
        return is_complete and all(result.is_expected for result in self.results)


def run_client(client: Client, cache: Path, model: Path) -> Outcome:
    """Install a client, start a server, and run its checks."""
    try:
        packages = prepare(client, cache)
    except (CommandFailed, OSError) as error:
        return Outcome(client, {}, problem=f"not installed: {error}", is_installed=False)
    versions = {name: packages[name] for name in client.shown}
    logs = cache / "logs" / client.name
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    flags = ("--api-key", KEY, "--served-model-name", MODEL_NAME)
    flags += ("--kv-cache-memory-bytes", "512M", "--batch-dir", str(logs / "batches"))
    server = start_model_server(model, logs / "server.log", *flags, *client.server_flags)
    try:
        server.wait_ready(KEY)
        results, problem = _run_checks(client, python_of(client, cache), server.url, logs, model)
    except ServerFailed as error:
        return Outcome(client, versions, problem=str(error))
    finally:
        if server.process.poll() is None:
            server.stop()
    return Outcome(client, versions, results, problem)


def _run_checks(
    client: Client, python: Path, url: str, logs: Path, model: Path
) -> tuple[tuple[Result, ...], str]:
    """Return the results, and why there may be too few of them."""
    command = [str(python), "-m", f"benchmarks.clients.uses.{client.module}", url, MODEL_NAME, KEY]
    variables = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), "MODEL_PATH": str(model)}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        variables.pop(name, None)
        variables.pop(name.lower(), None)
    with (logs / "client.log").open("w") as log:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env=variables,
                cwd=logs,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return (), f"not done after {TIMEOUT_S} s"
    (logs / "client.jsonl").write_text(done.stdout)
    results = tuple(_results(done.stdout))
    if done.returncode != 0 or not results:
        log = (logs / "client.log").read_text().strip().splitlines()
        return results, f"ended with {done.returncode}: {' '.join(log[-3:])}"
    return results, ""


def _results(output: str) -> list[Result]:
    """Read the lines of results; clients may print other lines between them."""
    lines = [line for line in output.splitlines() if line.startswith('{"name": ')]
    return [Result(**json.loads(line)) for line in lines]
