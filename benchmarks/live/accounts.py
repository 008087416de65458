"""Checks that accounts of requests add up and name the true cause of each wait.

    python -m benchmarks.live.accounts MODEL [--requests 2000] [--json FILE]
    python -m benchmarks.live.accounts --fake --requests 200

A real server over real sockets, with more demand than it has seats and KV blocks: tenants of
unequal weight, one that may hold few blocks, one of a spot tier, priorities, several samples,
clients that leave. Afterwards an administrator asks for the explanation of every request:

    the seconds of its causes add up to the time it waited, within 1 ms or 1 %, and nothing of it
    is unexplained; so do those of each single wait
    it did not wait longer than its client saw it take
    whoever took its place is known, ran, and has an explanation of its own; and it ran again,
    or its client left

Then three situations in which the cause is known by construction: KV blocks held by another
tenant, a tenant that holds all it may, requests of a higher tier. The readable paragraph must
give that cause as the first. tests/sharing has the same on a virtual clock, without the server.
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

from benchmarks.live.account_clients import NUM_SEATS, TENANTS, Caller, Sent, started
from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from benchmarks.support.wait_checker import SECONDS, differ
from headway.tenancy.keys import make_key

NUM_CLIENTS = 96
ABORT_SHARE = 0.06
CLOCK_SLACK_S = 0.05
"""The client hears of things after they happened, not before; for what the two clocks round."""


# --------------------------------------------------------------------- the load


def draw_jobs(count: int, letters: range, seed: int) -> list[tuple[str, dict[str, Any], float]]:
    """Tenant, body, and after how long the client leaves (0: it does not)."""
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
        leaves_s = draw.expovariate(0.3) if draw.random() < ABORT_SHARE else 0.0
        jobs.append((tenant, body, leaves_s))
    return jobs


async def run_load(caller: Caller, jobs: Sequence[tuple[str, dict[str, Any], float]]) -> None:
    """So many clients at a time, each of which asks again when it is answered."""
    left = iter(jobs)

    async def client() -> None:
        for tenant, body, leaves_s in left:
            await caller.complete(tenant, body, leaves_s)

    await asyncio.gather(*[client() for _ in range(NUM_CLIENTS)])


# ------------------------------------------------------------------- the checks


def problems_of(sent: Sent, found: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with the explanation of one request, by itself."""
    if sent.error:
        return [f"{sent.id} failed: {sent.error}"]
    if found is None:
        return [] if sent.is_left else [f"{sent.id} has no explanation"]
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
    if sent.ended_s is not None and not sent.is_left and first_s > sent.ended_s + CLOCK_SLACK_S:
        problems.append(f"{sent.id} waited {first_s} s, its client {sent.ended_s} s")
    return problems


async def problems_of_preemptions(
    caller: Caller, sent: Sent, found: Mapping[str, Any]
) -> list[str]:
    """Whoever took its place must be known and have run, and it must have run again."""
    problems: list[str] = []
    for entry in found["timeline"]:
        if entry["kind"] != "preempted":
            continue
        by = entry.get("by", "")
        causer = await caller.settled(by.partition("#")[0]) if by else None
        if causer is None:
            problems.append(f"{sent.id} gave way to {by!r}, which nobody knows")
        elif not any(other["kind"] == "admitted" for other in causer["timeline"]):
            problems.append(f"{sent.id} gave way to {by}, which never ran")
        if entry.get("seconds") is None and found["finish_reason"] not in ("abort", "timeout"):
            problems.append(f"{sent.id} did not run again, and ended by {found['finish_reason']}")
    return problems


async def check_all(caller: Caller) -> dict[str, Any]:
    problems: list[str] = []
    causes: Counter[str] = Counter()
    num_preemptions = num_waiting = num_left = 0
    for sent in list(caller.sent):
        found = await caller.settled(sent.id) if not sent.error else None
        problems += problems_of(sent, found)
        if found is None:
            continue
        problems += await problems_of_preemptions(caller, sent, found)
        num_preemptions += found.get("num_preemptions", 0)
        num_waiting += found.get("queue_s", 0.0) > SECONDS
        num_left += sent.is_left
        for share in found.get("causes", ()):
            causes[share["cause"]] += share["seconds"]
    return {
        "num_requests": len(caller.sent),
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
    """What is sent first, when it has come so far that the next may be sent, and what that one
    must be told."""

    name: str
    first: tuple[Job, ...]
    num_running: int
    num_waiting: int
    then: Job
    cause: str
    words: str


def situations(num_tokens: int) -> tuple[Situation, ...]:
    """For a cache of so many tokens."""
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
            (("gold", 16, 200),) * (3 * NUM_SEATS),
            1,
            NUM_SEATS,
            ("night", 16, 4),
            "tier_order",
            "because requests of a higher tier went first",
        ),
    )


async def play(
    server: RunningServer, caller: Caller, situation: Situation, letters: range
) -> dict[str, Any]:
    """Send what comes first, wait until it is in the engine, then the one that must wait."""
    draw, key = random.Random(situation.name), caller.secrets["auditor"]

    async def ask(tenant: str, num_prompt: int, num_output: int) -> Sent:
        prompt = draw.choices(letters, k=num_prompt)
        return await caller.complete(tenant, {"prompt": prompt, "max_tokens": num_output})

    def is_there() -> bool:
        seen = proc_stats.scrape(server, key)
        num_running = seen.total("vllm:num_requests_running")
        num_waiting = seen.total("vllm:num_requests_waiting")
        return num_running >= situation.num_running and num_waiting >= situation.num_waiting

    await proc_stats.until_quiet(server, key=key)
    async with asyncio.TaskGroup() as group:
        for job in situation.first:
            group.create_task(ask(*job))
        if not await proc_stats.until(is_there, 60.0, every_s=0.01):
            raise RuntimeError(f"{situation.name}: what was sent first did not arrive")
        late = group.create_task(ask(*situation.then))
    found = await caller.settled(late.result().id)
    assert found is not None, "the request that had to wait has no explanation"
    top = found["causes"][0]["cause"] if found.get("causes") else ""
    first_words = found["text"].partition("It waited")[2].split(",")[0]
    return {
        "situation": situation.name,
        "expected": situation.cause,
        "found": top,
        "queue_s": found.get("queue_s", 0.0),
        "is_named": top == situation.cause and situation.words in first_words,
        "text": found["text"],
        "timeline": found["timeline_text"],
    }


async def run(
    server: RunningServer, secrets: Mapping[str, str], letters: range, num_requests: int
) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        caller = Caller(server.url, secrets, http)
        await run_load(caller, draw_jobs(num_requests, letters, 1))
        report = await check_all(caller)
        num_blocks = proc_stats.scrape(server, secrets["auditor"]).total("headway_kv_blocks_total")
        found = [
            await play(server, caller, situation, letters)
            for situation in situations(int(num_blocks) * 16)
        ]
    return {**report, "situations": found}


def failures_in(report: Mapping[str, Any]) -> list[str]:
    failures = list(report["problems"])
    if not report["num_preemptions"] or report["num_waited"] < report["num_requests"] / 2:
        failures.append("there was nothing to account for: too few waits and preemptions")
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
    print(f"{report['num_preemptions']} preemptions, {report['num_left']} clients left")
    for cause, seconds in report["causes_s"].items():
        print(f"{seconds:12.3f} s {cause}")
    for row in report["situations"]:
        print(f"\n{row['situation']}: {row['text']}\n{row['timeline']}")
    return proc_stats.conclude(report, failures_in(report), args.json)


if __name__ == "__main__":
    sys.exit(main())
