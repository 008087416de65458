"""Clients of a recorded server, with all that makes plans differ. For live/record_steps.py."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec

from benchmarks.faults.kills import engine_pid
from benchmarks.live.account_clients import SETTINGS, write_tenants
from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from headway.bench.load.openai import WORDS
from headway.tenancy.keys import make_key

TIERS = "tiers: {quick: {weight: 4, ttft_ms: 5000, tpot_ms: 500}, night: {spot: true}}"
TENANTS = {
    "quick": "{keys: [%s], tier: quick}",
    "heavy": "{keys: [%s], weight: 2}",
    "plain": "{keys: [%s]}",
    "capped": "{keys: [%s], quotas: {kv_share: 0.4}}",
    "night": "{keys: [%s], tier: night}",
}
AUDITOR = "auditor"
NUM_BLOCKS = 40
"""Few enough that running requests are preempted."""
BLOCK_BYTES = 16 * 23_040
NUM_CLIENTS = 5
NUM_STEMS, STEM_WORDS = 6, 40
MAX_FOLLOWED = 8
PAUSE_S = 0.05
READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Life:
    """One server: its policy, how long clients send, and how often its engine is killed."""

    policy: str
    seconds: float
    seed: int
    num_kills: int = 2
    num_threads: int | None = None


@dataclass(slots=True)
class _Clients:
    """Draws and sends requests, each after the last; counts how they end."""

    life: Life
    http: httpx.AsyncClient
    secrets: dict[str, str]
    ends: Counter[str] = field(default_factory=Counter[str])
    _answered: list[str] = field(default_factory=list[str])
    """Prompts with their outputs, for second turns of conversations."""

    async def run(self, number: int, until: float) -> None:
        draw = random.Random(f"{self.life.seed}/{number}")
        while time.monotonic() < until:
            leaves_after = draw.randint(1, 12) if draw.random() < 0.12 else 0
            # A whole answer costs less than a stream, which leaves more time for steps.
            body = self._body(draw) | {"stream": leaves_after > 0 or draw.random() < 0.1}
            end = await self._send(body, draw.choice(list(TENANTS)), leaves_after)
            self.ends[end] += 1
            if end == "refused":
                await asyncio.sleep(PAUSE_S)

    def _body(self, draw: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {"max_tokens": draw.randint(8, 90), "prompt": self._prompt(draw)}
        if draw.random() < 0.2:
            body |= {"n": draw.choice((2, 3)), "temperature": 0.9, "seed": draw.randint(0, 99)}
        if draw.random() < 0.1:
            body["stop"] = [" and", "\n"]
        if self.life.policy in ("fair", "deadline") and draw.random() < 0.2:
            body |= {"ttft_ms": draw.randint(400, 6000), "deadline_ms": draw.randint(4000, 40_000)}
        if self.life.policy in ("fair", "priority") and draw.random() < 0.2:
            body["priority"] = draw.choice((-1, 1))
        return body

    def _prompt(self, draw: random.Random) -> str:
        kind = draw.random()
        if kind < 0.2 and self._answered:
            return draw.choice(self._answered) + " " + _text(draw, draw.randint(2, 9))
        if kind < 0.6:
            stem = _text(random.Random(draw.randrange(NUM_STEMS)), STEM_WORDS)
            return stem + " " + _text(draw, draw.randint(2, 30))
        return _text(draw, draw.randint(200, 350) if kind > 0.96 else draw.randint(4, 60))

    async def _send(self, body: dict[str, Any], tenant: str, leaves_after: int) -> str:
        """Read an answer, or leave after some events; return how it ended."""
        headers = {"Authorization": f"Bearer {self.secrets[tenant]}"}
        texts: list[str] = []
        try:
            async with self.http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as answer:
                if answer.status_code != 200:
                    return "refused"
                async for line in answer.aiter_lines():
                    if '"error"' in line:
                        return "error in the answer"
                    content = line.removeprefix("data: ")
                    if content.startswith("{"):
                        texts += [one["text"] for one in msgspec.json.decode(content)["choices"]]
                    if leaves_after and len(texts) >= leaves_after:
                        return "left"
        except httpx.HTTPError as error:
            return type(error).__name__
        if "n" not in body:
            self._answered = [*self._answered[1 - MAX_FOLLOWED :], body["prompt"] + "".join(texts)]
        return "completed"

    async def kill(self, server: RunningServer, until: float) -> None:
        """Kill the engine now and then; wait for the next one each time."""
        for _ in range(self.life.num_kills):
            await asyncio.sleep(self.life.seconds / (self.life.num_kills + 1))
            pid = engine_pid(server)
            os.kill(pid, signal.SIGKILL)
            if not await proc_stats.until(lambda pid=pid: engine_pid(server) != pid, READY_S):
                raise RuntimeError(f"no engine replaced the killed one:\n{server.log}")
            self.ends["engines killed"] += 1
            if time.monotonic() > until:
                return


def _text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_words))


def live(model: Path, life: Life, recordings: Path) -> Counter[str]:
    """Serve clients for the seconds of a life; return how their requests ended."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        secrets = {tenant: make_key() for tenant in (*TENANTS, AUDITOR)}
        abouts = {**TENANTS, AUDITOR: "{keys: [%s], admin: true}"}
        tenants_file = write_tenants(folder, TIERS, abouts, secrets)
        settings = {
            **SETTINGS,
            "tenants_file": str(tenants_file),
            "record": str(recordings),
            "scheduling_policy": life.policy,
            "kv_cache_memory_bytes": NUM_BLOCKS * BLOCK_BYTES,
        }
        if life.num_threads is not None:
            settings["num_threads"] = life.num_threads

        async def use(server: RunningServer) -> Counter[str]:
            until = time.monotonic() + life.seconds
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
                clients = _Clients(life, http, secrets)
                async with asyncio.TaskGroup() as group:
                    for number in range(NUM_CLIENTS):
                        group.create_task(clients.run(number, until))
                    group.create_task(clients.kill(server, until))
            return clients.ends

        with proc_stats.started(model, folder, settings, key=secrets[AUDITOR]) as server:
            return proc_stats.run_client(use(server))
