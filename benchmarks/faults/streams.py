"""Clients that stream continuously and check every response."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

LICENSE = Path(__file__).parents[2] / "LICENSE"


@dataclass(frozen=True, slots=True)
class Answer:
    """Texts of one streamed answer, or its error."""

    texts: tuple[str, ...] = ()
    finish_reasons: tuple[str | None, ...] = ()
    num_tokens: int = 0
    error: str = ""
    """Error answer of the server, or how the connection ended."""


@dataclass(slots=True)
class Tally:
    """Counts of the answers that clients received."""

    num_same: int = 0
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_tokens: int = 0
    received_at: dict[int, float] = field(default_factory=dict)
    """When each client last received an event."""


def make_jobs(num_jobs: int, max_output: int = 160) -> list[dict[str, Any]]:
    """Return bodies with prompts of many lengths, greedy or seeded, some with n > 1."""
    words = LICENSE.read_text().split()
    draw = random.Random(0)
    jobs = []
    for number in range(num_jobs):
        at = draw.randrange(len(words) - 200)
        job: dict[str, Any] = {
            "prompt": " ".join(words[at : at + draw.randint(4, 150)]),
            "max_tokens": draw.randint(max_output // 4, max_output),
            "temperature": 0.0,
            "ignore_eos": draw.random() < 0.7,
            "n": draw.choice((1, 1, 1, 2, 3)),
        }
        if number % 2 or job["n"] > 1:
            job |= {"temperature": 0.8, "seed": number, "top_p": 0.95}
        jobs.append(job)
    return jobs


async def stream(client: httpx.AsyncClient, job: dict[str, Any], on_event: Any = None) -> Answer:
    """Read one answer to its end."""
    texts = [""] * job["n"]
    reasons: list[str | None] = [None] * job["n"]
    num_tokens = 0
    body = {**job, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return Answer(error=f"{response.status_code} {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if on_event is not None:
                    on_event()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Answer(error=json.dumps(event["error"]))
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"]
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        return Answer(error=f"connection: {error!r}")
    return Answer(tuple(texts), tuple(reasons), num_tokens)


async def expected_answers(
    client: httpx.AsyncClient, jobs: Sequence[dict[str, Any]]
) -> list[Answer]:
    """Return the expected answers; run each job twice, beside different jobs."""
    limit = asyncio.Semaphore(16)

    async def one(job: dict[str, Any]) -> Answer:
        async with limit:
            return await stream(client, job)

    first = await asyncio.gather(*(one(job) for job in jobs))
    again = await asyncio.gather(*(one(job) for job in reversed(jobs)))
    failed = [answer.error for answer in (*first, *again) if answer.error]
    if failed:
        raise RuntimeError(f"undisturbed streams failed: {failed[:3]}")
    if first != again[::-1]:
        raise RuntimeError("answers differ from run to run without any fault")
    return first


class StreamClients:
    """Clients that run random jobs, one after another, until `stop`."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        jobs: Sequence[dict[str, Any]],
        expected: Sequence[Answer],
        num_clients: int,
    ) -> None:
        self.tally = Tally()
        self._client = client
        self._jobs = jobs
        self._expected = expected
        self._is_stopped = False
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(num_clients)]

    async def _run(self, number: int) -> None:
        draw = random.Random(number)
        tally = self.tally

        def on_event() -> None:
            tally.received_at[number] = time.monotonic()

        while not self._is_stopped:
            at = draw.randrange(len(self._jobs))
            answer = await stream(self._client, self._jobs[at], on_event)
            tally.num_tokens += answer.num_tokens
            if answer.error:
                tally.errors.append(answer.error)
                await asyncio.sleep(0.1)
            elif answer == self._expected[at]:
                tally.num_same += 1
            else:
                tally.different.append(f"job {at}: {answer.texts} not {self._expected[at].texts}")

    async def wait_all_received(self, since: float, timeout_s: float = 90.0) -> None:
        """Wait until every client has received an event after `since`."""
        deadline = time.monotonic() + timeout_s
        while any(self.tally.received_at.get(at, 0.0) <= since for at in range(len(self._tasks))):
            if time.monotonic() > deadline:
                raise TimeoutError("some streams do not continue")
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Start no more jobs; wait for the answers in progress."""
        self._is_stopped = True
        await asyncio.gather(*self._tasks)
