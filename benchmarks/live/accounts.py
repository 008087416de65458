"""Checks that accounts of requests add up and name the true cause of each wait.

    python -m benchmarks.live.accounts MODEL [--requests 2000] [--json FILE]
    python -m benchmarks.live.accounts --fake --requests 200

A real server over real sockets, with more demand than sequences and KV blocks: tenants of unequal
weight, a tenant with a small KV quota, a spot tenant, priorities, several samples, clients that
disconnect. Afterwards an admin reads the explanation of every request:

    the seconds of its causes add up to its wait, within 1 ms or 1 %, and none is unrecorded; the
    same for each single wait
    its first wait is not longer than its client waited
    the requester of each preemption is known, ran, and has an explanation; the preempted request
    ran again, or its client disconnected

Then three situations with a known cause: KV blocks of another tenant, a tenant at its KV quota,
requests of a better tier. The text must name that cause first. tests/sharing has the same on a
virtual clock, without the server.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live.account_clients import (
    MAX_NUM_SEQS,
    TENANTS,
    SentRequest,
    TenantClients,
    started,
)
from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from benchmarks.support.wait_checker import SECONDS, differ
from headway.tenancy.keys import make_key

NUM_CLIENTS = 96
ABORT_SHARE = 0.06
CLOCK_SLACK_S = 0.05
"""Allowance for the rounding of two clocks."""


# --------------------------------------------------------------------- the load


def draw_jobs(count: int, letters: range, seed: int) -> list[tuple[str, dict[str, Any], float]]:
    """Return tenant, body and seconds until the disconnect (0: none) of each request."""
    draw = random.Random(f"accounts/{seed}")
    names = list(TENANTS)
    jobs: list[tuple[str, dict[str, Any], float]] = []
    for _ in range(count):
        (tenant,) = draw.choices(names, [TENANTS[name][0] for name in names])
        most = 400 if tenant == "capped" else 1000
        num_prompt = min(most, max(4, int(draw.lognormvariate(4.6, 0.9))))
        prompt = draw.choices(letters, k=num_prompt)
        if draw.random() < 0.35:
            prompt[:64] = [letters[0]] * min(64, num_prompt)
        body = {
            "prompt": prompt,
            "max_tokens": min(200, max(1, int(draw.lognormvariate(3.4, 0.8)))),
            "priority": draw.choice((0, 0, 0, 1, 2)),
            "n": draw.choices((1, 2, 4), (0.92, 0.05, 0.03))[0],
        }
        if body["n"] > 1:
            body |= {"temperature": 1.0, "seed": 1}
        disconnects_s = draw.expovariate(0.3) if draw.random() < ABORT_SHARE else 0.0
        jobs.append((tenant, body, disconnects_s))
    return jobs


async def run_load(
    clients: TenantClients, jobs: Sequence[tuple[str, dict[str, Any], float]]
) -> None:
    """Run all jobs with NUM_CLIENTS clients, one request per client at a time."""
    remaining = iter(jobs)

    async def client() -> None:
        for tenant, body, disconnects_s in remaining:
            await clients.complete(tenant, body, disconnects_s)

    await asyncio.gather(*[client() for _ in range(NUM_CLIENTS)])


# ------------------------------------------------------------------- the checks


def problems_of(sent: SentRequest, found: Mapping[str, Any] | None) -> list[str]:
    """Return the problems of the explanation of one request."""
    if sent.error:
        return [f"{sent.id} failed: {sent.error}"]
    if found is None:
        return [] if sent.has_disconnected else [f"{sent.id} has no explanation"]
    problems: list[str] = []
    causes = {share["cause"]: share["seconds"] for share in found.get("causes", ())}
    queue_s = found.get("queue_s", 0.0)
    if differ(sum(causes.values()), queue_s):
        problems.append(f"{sent.id} waited {queue_s} s for {causes}")
    if differ(queue_s - causes.get("unrecorded", 0.0), queue_s):
        problems.append(f"{sent.id}: {causes['unrecorded']} s of {queue_s} s are unexplained")
    waits = [entry for entry in found["timeline"] if entry["kind"] == "waited"]
    for entry in waits:
        of_wait = sum(share["seconds"] for share in entry.get("causes", ()))
        if differ(of_wait, entry["seconds"]):
            problems.append(f"{sent.id}: a wait of {entry['seconds']} s has causes for {of_wait} s")
    is_whole = not found.get("num_entries_left_out")
    if is_whole and differ(sum(entry["seconds"] for entry in waits), queue_s):
        problems.append(f"{sent.id}: its waits do not add up to {queue_s} s")
    first_s = waits[0]["seconds"] if waits else 0.0
    if (
        sent.ended_s is not None
        and not sent.has_disconnected
        and first_s > sent.ended_s + CLOCK_SLACK_S
    ):
        problems.append(f"{sent.id} waited {first_s} s, its client {sent.ended_s} s")
    return problems


async def problems_of_preemptions(
    clients: TenantClients, sent: SentRequest, found: Mapping[str, Any]
) -> list[str]:
    """Return problems of preemptions: an unknown requester, or no resumption."""
    problems: list[str] = []
    for entry in found["timeline"]:
        if entry["kind"] != "preempted":
            continue
        by = entry.get("by", "")
        requester = await clients.finished_explanation(by.partition("#")[0]) if by else None
        if requester is None:
            problems.append(f"{sent.id} was preempted for {by!r}, which is unknown")
        elif not any(other["kind"] == "admitted" for other in requester["timeline"]):
            problems.append(f"{sent.id} was preempted for {by}, which never ran")
        if entry.get("seconds") is None and found["finish_reason"] not in ("abort", "timeout"):
            problems.append(f"{sent.id} did not run again, and ended by {found['finish_reason']}")
    return problems


async def check_all(clients: TenantClients) -> dict[str, Any]:
    problems: list[str] = []
    causes: Counter[str] = Counter()
    num_preemptions = num_waiting = num_left = 0
    for sent in list(clients.sent):
        found = await clients.finished_explanation(sent.id) if not sent.error else None
        problems += problems_of(sent, found)
        if found is None:
            continue
        problems += await problems_of_preemptions(clients, sent, found)
        num_preemptions += found.get("num_preemptions", 0)
        num_waiting += found.get("queue_s", 0.0) > SECONDS
        num_left += sent.has_disconnected
        for share in found.get("causes", ()):
            causes[share["cause"]] += share["seconds"]
    return {
        "num_requests": len(clients.sent),
        "num_waited": num_waiting,
        "num_left": num_left,
        "num_preemptions": num_preemptions,
        "causes_s": dict(causes.most_common()),
        "problems": problems,
    }


# --------------------------------------------------------------- the situations


Job = tuple[str, int, int]
"""Tenant, prompt tokens, output tokens."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Requests sent first, the state to wait for, the request sent then, and its cause."""

    name: str
    first: tuple[Job, ...]
    num_running: int
    num_waiting: int
    then: Job
    cause: str
    text: str


def situations(num_tokens: int) -> tuple[Situation, ...]:
    """Return the situations for a KV cache of `num_tokens`."""
    large, few = num_tokens // 4, int(0.15 * num_tokens) // 2
    return (
        Situation(
            "KV blocks",
            (("gold", large - 128, 400),) * 3,
            3,
            0,
            ("plain", large + 600, 4),
            "kv_blocks",
            "for KV blocks held mostly by tenant gold",
        ),
        Situation(
            "KV quota",
            (("capped", few, 250),),
            1,
            0,
            ("capped", few, 4),
            "kv_quota",
            "because its tenant was at its KV quota",
        ),
        Situation(
            "higher tier",
            (("gold", 16, 200),) * (3 * MAX_NUM_SEQS),
            1,
            MAX_NUM_SEQS,
            ("night", 16, 4),
            "tier_order",
            "because requests of a higher tier went first",
        ),
    )


async def run_situation(
    server: RunningServer, clients: TenantClients, situation: Situation, letters: range
) -> dict[str, Any]:
    """Send the first requests, wait until the engine has them, then send the last."""
    draw, key = random.Random(situation.name), clients.secrets["auditor"]

    async def ask(tenant: str, num_prompt: int, num_output: int) -> SentRequest:
        prompt = draw.choices(letters, k=num_prompt)
        return await clients.complete(tenant, {"prompt": prompt, "max_tokens": num_output})

    def is_ready() -> bool:
        metrics = proc_stats.scrape(server, key)
        num_running = metrics.total("vllm:num_requests_running")
        num_waiting = metrics.total("vllm:num_requests_waiting")
        return num_running >= situation.num_running and num_waiting >= situation.num_waiting

    await proc_stats.until_quiet(server, key=key)
    async with asyncio.TaskGroup() as group:
        for job in situation.first:
            group.create_task(ask(*job))
        if not await proc_stats.until(is_ready, 60.0, every_s=0.01):
            raise RuntimeError(f"{situation.name}: the first requests did not reach the engine")
        late = group.create_task(ask(*situation.then))
    found = await clients.finished_explanation(late.result().id)
    assert found is not None, "the request that had to wait has no explanation"
    top = found["causes"][0]["cause"] if found.get("causes") else ""
    first_part = found["text"].partition("It waited")[2].split(",")[0]
    return {
        "situation": situation.name,
        "expected": situation.cause,
        "found": top,
        "queue_s": found.get("queue_s", 0.0),
        "is_named": top == situation.cause and situation.text in first_part,
        "text": found["text"],
        "timeline": found["timeline_text"],
    }


async def run(
    server: RunningServer, secrets: Mapping[str, str], letters: range, num_requests: int
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        clients = TenantClients(server.url, secrets, http)
        await run_load(clients, draw_jobs(num_requests, letters, 1))
        report = await check_all(clients)
        num_blocks = proc_stats.scrape(server, secrets["auditor"]).total("headway_kv_blocks_total")
        found = [
            await run_situation(server, clients, situation, letters)
            for situation in situations(int(num_blocks) * 16)
        ]
    return {**report, "situations": found}


def failures_in(report: Mapping[str, Any]) -> list[str]:
    failures = list(report["problems"])
    if not report["num_preemptions"] or report["num_waited"] < report["num_requests"] / 2:
        failures.append("too few waits and preemptions to check")
    failures += [
        f"{row['situation']}: {row['expected']} is not named: {row['text']}"
        for row in report["situations"]
        if not row["is_named"]
    ]
    return failures


def main() -> int:
    parser = proc_stats.battery_parser(__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    args = proc_stats.arguments(parser)
    secrets = {name: make_key() for name in TENANTS}
    letters = range(97, 123) if args.fake else range(100, 20_000)
    with (
        tempfile.TemporaryDirectory() as name,
        started(args.model, Path(name), secrets) as server,
    ):
        report = proc_stats.run_client(run(server, secrets, letters, args.requests))
    print(f"{report['num_requests']} requests, {report['num_waited']} of which waited;")
    print(f"{report['num_preemptions']} preemptions, {report['num_left']} clients disconnected")
    for cause, seconds in report["causes_s"].items():
        print(f"{seconds:12.3f} s {cause}")
    for row in report["situations"]:
        print(f"\n{row['situation']}: {row['text']}\n{row['timeline']}")
    return proc_stats.conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
