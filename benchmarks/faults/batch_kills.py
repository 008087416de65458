"""Kills the server with SIGKILL while it runs a batch; the next server goes on with it.

    python -m benchmarks.faults.batch_kills [MODEL] [--kills 20] [--lines 200] [--alive 4]
        [--seed 5] [--json FILE]

With the fake engine or with MODEL. Each kill comes a random moment after the server is ready. At
the end every line must be in the output once, with the text of the same request in an undisturbed
batch. The ledger must have one row per line, with the tokens of its answer and the price of the
tier of batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.support.batches import content, get, line, submit, until
from benchmarks.support.servers import Launcher, RunningServer, start_model_server
from benchmarks.support.tiny_tokenizers import write_byte_level

KEY = "batch-kills"
PRICE = {"prompt": 1.0, "cached_prompt": 0.25, "output": 4.0}
END_S = 600.0


@dataclass(frozen=True)
class Kills:
    number: int = 20
    max_alive_s: float = 4.0
    """Longest time from ready to the next kill."""
    seed: int = 5


@dataclass
class Outcome:
    """What became of a batch under kills."""

    num_kills: int = 0
    num_lines: int = 0
    num_rows: int = 0
    completed_at_kills: list[int] = field(default_factory=list[int])
    problems: list[str] = field(default_factory=list[str])
    wall_s: float = 0.0


StartServer = Callable[[], RunningServer]


def bodies(num_lines: int, max_tokens: int) -> list[dict[str, Any]]:
    """Lines that are greedy or sampled, some with stop strings and several samples."""
    lines: list[dict[str, Any]] = []
    for number in range(num_lines):
        options: dict[str, Any] = {"seed": number, "max_tokens": max_tokens}
        options["temperature"] = 0 if number % 2 else 0.8
        if number % 5 == 0:
            options["stop"] = ["e"]
        if number % 7 == 0:
            options["n"] = 2
        lines.append(line(number, **options))
    return lines


def client_of(server: RunningServer) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60)


async def run(
    start: StartServer, ledger: Path, lines: list[dict[str, Any]], kills: Kills
) -> Outcome:
    """Kill servers under a batch, then compare it with an undisturbed one."""
    outcome, begun = Outcome(num_lines=len(lines)), time.monotonic()
    servers: list[RunningServer] = []

    def start_next() -> RunningServer:
        servers.append(start())
        return servers[-1].wait_ready(KEY)

    try:
        found = await _run_killed(start_next, outcome, lines, kills)
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.stop()
    rows = read_rows(ledger)
    outcome.num_rows = sum(one["response"]["body"]["id"] in rows for one in found.values())
    outcome.problems += check_rows(found, rows)
    if len(rows) != 2 * len(lines):
        outcome.problems.append(f"{len(rows)} rows for two batches of {len(lines)} lines")
    outcome.wall_s = time.monotonic() - begun
    return outcome


async def _run_killed(
    start: StartServer, outcome: Outcome, lines: list[dict[str, Any]], kills: Kills
) -> dict[str, Any]:
    """Run a batch under kills, and one without; return the results of the first."""
    server, chance = start(), random.Random(kills.seed)
    async with client_of(server) as client:
        batch_id = (await submit(client, lines))["id"]
    while outcome.num_kills < kills.number:
        await asyncio.sleep(chance.uniform(0.02, kills.max_alive_s))
        async with client_of(server) as client:
            batch = await get(client, batch_id)
        if batch["status"] == "completed":
            outcome.problems.append(f"it was done after {outcome.num_kills} kills; give it lines")
            break
        outcome.completed_at_kills.append(batch["request_counts"]["completed"])
        server.process.kill()
        server.process.wait()
        outcome.num_kills += 1
        server = start()
    async with client_of(server) as client:
        ended = await until(client, batch_id, timeout_s=END_S)
        found = await content(client, ended["output_file_id"])
        again = await until(client, (await submit(client, lines))["id"], timeout_s=END_S)
        undisturbed = await content(client, again["output_file_id"])
    outcome.problems += compare(lines, ended, found, undisturbed)
    return found


def compare(
    lines: list[dict[str, Any]],
    batch: dict[str, Any],
    found: dict[str, Any],
    undisturbed: dict[str, Any],
) -> list[str]:
    """Return what is wrong with the results of a batch."""
    problems: list[str] = []
    counts = {"total": len(lines), "completed": len(lines), "failed": 0}
    if batch["status"] != "completed" or batch["request_counts"] != counts:
        problems.append(f"{batch['status']}, {batch['request_counts']}")
    for one in lines:
        name = one["custom_id"]
        texts = [
            [choice["text"] for choice in results[name]["response"]["body"]["choices"]]
            if name in results
            else None
            for results in (found, undisturbed)
        ]
        if texts[0] is None or texts[0] != texts[1]:
            problems.append(f"{name}: {texts[0]} is not {texts[1]}")
    return problems


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute("SELECT * FROM headway_requests").fetchall()
    return {row["request_id"]: dict(row) for row in found}


def check_rows(found: dict[str, Any], rows: dict[str, dict[str, Any]]) -> list[str]:
    """Return where the ledger differs from the answers."""
    problems: list[str] = []
    for name, one in found.items():
        body = one["response"]["body"]
        row, usage = rows.get(body["id"]), body["usage"]
        if row is None:
            problems.append(f"{name}: no row")
            continue
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        cost = (
            (usage["prompt_tokens"] - num_cached) * PRICE["prompt"]
            + num_cached * PRICE["cached_prompt"]
            + usage["completion_tokens"] * PRICE["output"]
        )
        expected = {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
            "cost_e12": round(cost * 1e6),
            "tier": "batch",
        }
        wrong = {key: row[key] for key, value in expected.items() if row[key] != value}
        if wrong:
            problems.append(f"{name}: {wrong} is not {expected}")
    return problems


def write_tenants(path: Path) -> Path:
    """Write a tenants file with the key, and a price for batches only."""
    from headway.tenancy.keys import digest_of

    prices = ", ".join(f"{name}: {value}" for name, value in PRICE.items())
    path.write_text(
        f"tiers:\n  batch: {{spot: true, price: {{{prices}}}}}\n"
        f"tenants:\n  a: {{keys: ['sha256:{digest_of(KEY.encode()).hex()}']}}\n"
    )
    return path


def make_start(folder: Path, model: Path | None) -> StartServer:
    """Return what starts a server over the files of a folder."""
    tenants, num_starts = write_tenants(folder / "tenants.yaml"), 0
    if model is not None:
        flags = ("--batch-dir", str(folder / "batches"), "--tenants-file", str(tenants))

        def start_model() -> RunningServer:
            nonlocal num_starts
            num_starts += 1
            return start_model_server(model, folder / f"server-{num_starts}.log", *flags)

        return start_model
    tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
    launcher = Launcher(folder, tokenizer)
    settings: dict[str, object] = {
        "batch_dir": str(folder / "batches"),
        "tenants_file": str(tenants),
        "ledger_url": f"sqlite://{folder}/ledger.db",
    }
    return lambda: launcher(server=settings, step_s=0.02, scheduling_policy="fair")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--lines", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--alive", type=float, default=4.0, help="most seconds before a kill")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start = make_start(folder, options.model)
        lines = bodies(options.lines, options.max_tokens)
        kills = Kills(options.kills, options.alive, options.seed)
        outcome = asyncio.run(run(start, folder / "ledger.db", lines, kills))
    print(
        f"{outcome.num_kills} kills at {outcome.completed_at_kills} of {outcome.num_lines} lines; "
        f"{outcome.num_rows} rows; {len(outcome.problems)} problems; {outcome.wall_s:.0f} s"
    )
    for problem in outcome.problems[:20]:
        print(problem)
    if options.json:
        options.json.write_text(json.dumps(asdict(outcome), indent=2))
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
