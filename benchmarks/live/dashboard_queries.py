"""Runs every query of the Grafana dashboard against a real Prometheus that scrapes real servers.

    python -m benchmarks.live.dashboard_queries MODEL [--json FILE]

A server with three tenants, a batch and too few KV blocks, whose engine is killed once, and a
frontend of one engine, both under load. Needs `prometheus` (Debian's package of that name). Exits
with 1 if a query fails or has no data, or if a rule cannot be evaluated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.support.servers import RunningServer, free_port, start_model_server, start_process
from headway.tenancy.keys import digest_of

DEPLOY = Path(__file__).parents[2] / "deploy"
KEYS = {"alice": "key-of-alice", "bob": "key-of-bob", "carol": "key-of-carol"}
SCRAPE_S, WINDOW = 1, "20s"
LOAD_S = 45.0


def tenants_file(folder: Path) -> Path:
    tiers = {
        "gold": {"weight": 4, "ttft_ms": 2000, "tpot_ms": 200},
        "free": {"ttft_ms": 50},
        "batch": {"spot": True},
    }
    tenants = {
        name: {"keys": [f"sha256:{digest_of(key.encode()).hex()}"], "tier": tier, "admin": True}
        for (name, key), tier in zip(KEYS.items(), ("gold", "free", "default"), strict=True)
    }
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tiers": tiers, "tenants": tenants}))
    return path


@contextmanager
def stopping(server: RunningServer) -> Iterator[RunningServer]:
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


@contextmanager
def prometheus(folder: Path, targets: list[int]) -> Iterator[str]:
    """A Prometheus with the rules of deploy/; yields its address."""
    shutil.copy(DEPLOY / "prometheus/rules.yml", folder)
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": "2s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            {
                "job_name": "headway",
                "authorization": {"credentials": KEYS["alice"]},
                "static_configs": [{"targets": [f"127.0.0.1:{port}" for port in targets]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = start_process(command, port, folder / "prometheus.log")
    try:
        deadline = time.monotonic() + 60
        while not _answers(f"{server.url}/-/ready"):
            if server.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"prometheus does not start:\n{server.log}")
            time.sleep(0.1)
        yield server.url
    finally:
        server.process.terminate()
        server.process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


async def load(url: str, seconds: float) -> int:
    """Send requests of all tenants for a while; return how many were answered."""
    until = time.monotonic() + seconds
    answered = 0

    async def client(http: httpx.AsyncClient, key: str, number: int) -> None:
        nonlocal answered
        while time.monotonic() < until:
            body: dict[str, Any] = {
                "prompt": f"Story {number % 3}. " + "Once upon a time there was a king. " * 12,
                "max_tokens": 60,
                "temperature": 0.8,
            }
            if number % 4 == 3:
                body["deadline_ms"] = 60  # cannot be met: refused
            answer = await http.post(
                "/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )
            answered += answer.status_code == 200
            if answer.status_code != 200:
                await asyncio.sleep(0.2)

    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        clients = [client(http, key, number) for number in range(4) for key in KEYS.values()]
        await asyncio.gather(*clients)
    return answered


def submit_batch(url: str, num_lines: int) -> None:
    headers = {"authorization": f"Bearer {KEYS['bob']}"}
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            # The second line is too long for the model: a line of the error file.
            "body": {"prompt": "word " * (2000 if number == 1 else 5), "max_tokens": 4},
        }
        for number in range(num_lines)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    files = {"file": ("lines.jsonl", content)}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        stored = http.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status()
        body = {
            "input_file_id": stored.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "1h",
        }
        http.post("/v1/batches", json=body).raise_for_status()


def kill_engine(server: RunningServer) -> None:
    [engine] = [
        one
        for one in psutil.Process(server.process.pid).children()
        if any("engine" in word for word in one.cmdline())
    ]
    os.kill(engine.pid, signal.SIGKILL)


def panel_queries() -> Iterator[tuple[str, str, str]]:
    """(panel, legend, query) of the dashboard as it was made."""
    dashboard = json.loads((DEPLOY / "grafana/headway.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$model", ".*").replace("$__rate_interval", WINDOW)
            yield panel["title"], target["legendFormat"], expr


def ask(url: str, expr: str) -> list[float]:
    """Return the values of a query, one per series."""
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expr}, timeout=30)
    if answer.status_code != 200:
        raise SystemExit(f"{expr}\n{answer.text}")
    return [float(one["value"][1]) for one in answer.json()["data"]["result"]]


def rule_problems(url: str) -> list[str]:
    groups = httpx.get(f"{url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    found = [rule for group in groups for rule in group["rules"]]
    print(f"rules: {len(found)} evaluated")
    return [f"{rule['name']}: {rule['health']}" for rule in found if rule["health"] != "ok"]


def start_servers(model: Path, folder: Path, stack: ExitStack) -> list[RunningServer]:
    tenants = str(tenants_file(folder))
    blocks = ("--kv-cache-memory-bytes", "24M", "--max-model-len", "512")
    whole = start_model_server(
        model,
        folder / "server.log",
        *(*blocks, "--tenants-file", tenants, "--batch-dir", str(folder / "batches")),
        *("--preemption-method", "recompute", "--served-model-name", "whole"),
    )
    stack.enter_context(stopping(whole))
    address = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "headway", "engine", str(model), "--listen", address, *blocks]
    engine = start_process(command, 0, folder / "engine.log")
    stack.callback(lambda: engine.process.poll() is None and engine.stop())
    port, admin_port = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "headway", "frontend", str(model), "--engine", address),
        *("--port", str(port), "--admin-port", str(admin_port), "--tenants-file", tenants),
        *("--served-model-name", "fleet", "--ledger-url", "none"),
    ]
    frontend = start_process(command, port, folder / "frontend.log", admin_port)
    stack.enter_context(stopping(frontend))
    return [whole.wait_ready(), frontend.wait_ready()]


async def drive(servers: list[RunningServer]) -> list[int]:
    """Load all servers; in the middle the engine of the first is killed."""

    async def disturb() -> int:
        await asyncio.sleep(LOAD_S / 3)
        kill_engine(servers[0])
        return 0

    submit_batch(servers[0].url, 40)
    loads = [load(server.url, LOAD_S) for server in servers]
    return await asyncio.gather(*loads, disturb())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("there is no prometheus: install the package of that name")
    version = subprocess.run(
        ["prometheus", "--version"], capture_output=True, text=True, check=True
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        servers = start_servers(given.model, folder, stack)
        ports = [server.admin_port for server in servers]
        url = stack.enter_context(prometheus(folder, ports))
        answered = asyncio.run(drive(servers))
        print(f"answered: {answered[:-1]} requests")
        for panel, legend, expr in panel_queries():
            values = ask(url, expr)
            numbers = [value for value in values if not math.isnan(value)]
            has_data = bool(numbers)
            rows.append(
                {"panel": panel, "legend": legend, "series": len(values), "has_data": has_data}
            )
            shown = ", ".join(f"{value:.3g}" for value in numbers[:4])
            print(f"{'ok   ' if has_data else 'EMPTY'} {panel} [{legend}]: {len(values)}: {shown}")
        problems = rule_problems(url)
        firing = ask(url, 'ALERTS{alertstate="firing"}')
    empty = [row for row in rows if not row["has_data"]]
    print(f"{len(rows) - len(empty)} of {len(rows)} queries have data; {len(firing)} alerts fire")
    for problem in problems:
        print(problem)
    if given.json:
        told = {"prometheus": version.stdout.split()[2], "queries": rows, "problems": problems}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if empty or problems else 0


if __name__ == "__main__":
    sys.exit(main())
