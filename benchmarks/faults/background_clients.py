"""Clients that leave background responses and come back, while the engine is killed.

    python -m benchmarks.faults.background_clients [MODEL] [--clients 200] [--kills 5] [--seed 5]
        [--json FILE]

With MODEL, or with the fake engine. In each round every client starts a background response, greedy
or sampled, streamed or not. It closes its socket after a random number of events, and comes back
after a random time for the events after the last one that it has; some do so several times. The
engine gets SIGKILL meanwhile. What a client has in the end is compared with an undisturbed run of
the same request: the same events in the same order, sequence numbers without a gap, one end. (An
event may have the text of several tokens, so the texts of neighbouring deltas are joined first.)
The ledger must have one row per response, with its output tokens: none was computed twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.kills import bodies, engine_pid, start_server
from benchmarks.support.ledgers import read_ledger
from benchmarks.support.servers import Launcher, RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level

PATH = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")
MAX_SEQS = 64
MAX_TOKENS = 48
MAX_AWAY_S = 2.0
TIMEOUT_S = 600.0
SHARE_BEFORE_KILL = 0.5
"""Of the clients that have text when the engine is killed."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Visit:
    """How many events a client reads before it leaves, and how long it is away."""

    num_events: int
    away_s: float


@dataclass
class Client:
    """One response, and what its client saw of it over all visits."""

    body: Json
    visits: Sequence[Visit] = ()
    """Those that end early; the last one reads to the end."""
    is_streamed: bool = True
    """Whether the request that starts the response gets its events."""
    events: list[Json] = field(default_factory=list[Json])
    num_done: int = 0
    num_returns: int = 0
    errors: list[str] = field(default_factory=list[str])
    response_id: str = ""
    final: Json = field(default_factory=dict[str, Any])
    """The response as it is read after its end."""

    @property
    def has_text(self) -> bool:
        return any(event["type"].endswith("_text.delta") for event in self.events)


async def run_client(client: httpx.AsyncClient, one: Client) -> None:
    """Run a response through all visits of its client."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _begin(client, one)
            for visit in (*one.visits[1:], None):
                await _return(client, one, visit)
            one.final = (await client.get(f"{PATH}/{one.response_id}")).json()
    except (httpx.HTTPError, TimeoutError, KeyError, ValueError) as error:
        one.errors.append(f"{type(error).__name__}: {error}")


async def _begin(client: httpx.AsyncClient, one: Client) -> None:
    body = {**one.body, "background": True, "stream": one.is_streamed}
    first = one.visits[0] if one.visits else None
    if not one.is_streamed:
        response = await client.post(PATH, json=body)
        if response.status_code != 200 or response.json()["status"] != "queued":
            raise ValueError(f"{response.status_code} {response.text[:300]}")
        one.response_id = response.json()["id"]
        return
    async with client.stream("POST", PATH, json=body) as response:
        # Without its first event a client does not know what to come back for.
        await _read(response, one, None if first is None else max(1, first.num_events))
    one.response_id = one.events[0]["response"]["id"]
    if first is not None:
        await asyncio.sleep(first.away_s)


async def _return(client: httpx.AsyncClient, one: Client, visit: Visit | None) -> None:
    if one.num_done:
        return
    one.num_returns += 1
    after = f"&starting_after={one.events[-1]['sequence_number']}" if one.events else ""
    path = f"{PATH}/{one.response_id}?stream=true{after}"
    async with client.stream("GET", path) as response:
        await _read(response, one, None if visit is None else visit.num_events)
    if visit is not None:
        await asyncio.sleep(visit.away_s)


async def _read(response: httpx.Response, one: Client, num_events: int | None) -> None:
    """Read a number of events, or all."""
    if response.status_code != 200:
        raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
    most = inf if num_events is None else len(one.events) + num_events
    if len(one.events) >= most:
        return
    async for data in _data_of(response):
        if data == "[DONE]":
            one.num_done += 1
        else:
            one.events.append(json.loads(data))
            if len(one.events) >= most:
                return


async def _data_of(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def plan(every: Sequence[Json], draw: random.Random) -> list[Client]:
    """Return clients with one to four random visits; three in four get the events at once."""
    clients: list[Client] = []
    for body in every:
        num_visits = draw.choice((1, 1, 2, 4))
        visits = [
            Visit(draw.randint(0, MAX_TOKENS), draw.random() * MAX_AWAY_S)
            for _ in range(num_visits)
        ]
        clients.append(Client(body, visits, is_streamed=draw.random() < 0.75))
    return clients


def problems(one: Client, reference: Client) -> list[str]:
    """Return how a response differs from an undisturbed one of the same request."""
    found = list(one.errors)
    numbers = [event["sequence_number"] for event in one.events]
    if numbers != list(range(len(numbers))):
        doubled = sorted(number for number, count in Counter(numbers).items() if count > 1)
        lost = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers))
        found.append(f"sequence numbers: lost {lost[:5]}, doubled {doubled[:5]}, or out of order")
    ends = [event["type"] for event in one.events if event["type"] in ENDS]
    if len(ends) != 1 or one.events[-1]["type"] not in ENDS or one.num_done != 1:
        found.append(f"ends {ends}, [DONE] {one.num_done} times")
    got, expected = joined(one), joined(reference)
    if got != expected:
        pairs = enumerate(zip(got, expected, strict=False))
        at = next((at for at, (a, b) in pairs if a != b), min(len(got), len(expected)))
        found.append(f"event {at} of {len(got)}: {got[at : at + 1]}, not {expected[at : at + 1]}")
    if not found and one.final and one.final != one.events[-1]["response"]:
        found.append("the response that is read later differs from the last event")
    return found


def joined(one: Client) -> list[Json]:
    """Return the events without what differs from run to run, neighbouring deltas as one."""
    name = one.events[0]["response"]["id"].removeprefix("resp_") if one.events else ""
    result: list[Json] = []
    for event in json.loads(json.dumps(one.events).replace(name or " ", "ID")):
        del event["sequence_number"]
        _blank(event)
        last = result[-1] if result else {}
        if event["type"].endswith(".delta") and last.get("type") == event["type"]:
            last["delta"] += event["delta"]
            last["logprobs"] = last.get("logprobs", []) + event.get("logprobs", [])
        else:
            result.append(event)
    return result


def _blank(event: Json) -> None:
    """Blank the times of a response, and the tokens that others have left in the cache."""
    response = event.get("response")
    if response is not None:
        response["created_at"] = response["completed_at"] = None
        if response["usage"] is not None:
            response["usage"]["input_tokens_details"] = None


@dataclass
class Round:
    """What one kill did."""

    num_clients: int
    num_returns: int
    num_events: int
    problems: list[str]


class Battery:
    """A server, its references, and the rounds so far."""

    def __init__(self, server: RunningServer, every: Sequence[Json], seed: int) -> None:
        self.rounds: list[Round] = []
        self._server = server
        self._every = every
        self._draw = random.Random(seed)
        self._references: list[Client] = []
        self._clients: list[Client] = []

    async def kill(self) -> Round:
        """Run all clients once, and kill the engine under them."""
        if not self._references:
            self._references = [Client(body) for body in self._every]
            await self._run(self._references, is_killed=False)
            failed = [error for one in self._references for error in problems(one, one)]
            if failed:
                raise RuntimeError(failed[0])
        clients = plan(self._every, self._draw)
        await self._run(clients, is_killed=True)
        found = [
            f"client {number}: {problem}"
            for number, pair in enumerate(zip(clients, self._references, strict=True))
            for problem in problems(*pair)
        ]
        num_returns = sum(one.num_returns for one in clients)
        num_events = sum(len(one.events) for one in clients)
        self.rounds.append(Round(len(clients), num_returns, num_events, found))
        return self.rounds[-1]

    async def _run(self, clients: list[Client], is_killed: bool) -> None:
        self._clients += clients
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with (
            httpx.AsyncClient(
                base_url=self._server.url, timeout=TIMEOUT_S, limits=limits
            ) as client,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(run_client(client, one)) for one in clients]
            if is_killed:
                least = SHARE_BEFORE_KILL * len(clients)
                while sum(one.has_text for one in clients) < least and not all(
                    task.done() for task in tasks
                ):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self._draw.random() * 0.3)
                os.kill(engine_pid(self._server), signal.SIGKILL)

    async def check_ledger(self, path: Path, timeout_s: float = 30.0) -> list[str]:
        """Return where the ledger differs from what the clients got."""
        expected = {
            one.response_id: one.events[-1]["response"]["usage"]["output_tokens"]
            for one in self._clients
            if one.events and one.events[-1]["type"] in ENDS
        }
        deadline = time.monotonic() + timeout_s
        while (found := read_ledger(path)) != expected and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        names = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        return [
            f"{name}: {found.get(name)} output tokens in the ledger, not {expected.get(name)}"
            for name in names
        ]


def report(battery: Battery, ledger_problems: Sequence[str]) -> Json:
    """Return the figures of all rounds."""
    rounds = battery.rounds
    return {
        "kills": len(rounds),
        "clients": sum(one.num_clients for one in rounds),
        "returns": sum(one.num_returns for one in rounds),
        "events": sum(one.num_events for one in rounds),
        "problems": [problem for one in rounds for problem in one.problems] + [*ledger_problems],
        "rounds": [asdict(one) for one in rounds],
    }


def line_of(figures: Json) -> str:
    return (
        f"{figures['clients']} clients, {figures['kills']} kills, {figures['returns']} returns, "
        f"{figures['events']} events, {len(figures['problems'])} problems"
    )


async def run(battery: Battery, num_kills: int, ledger: Path) -> Json:
    for number in range(num_kills):
        one = await battery.kill()
        print(
            f"kill {number + 1}: {one.num_clients} clients, {one.num_returns} returns, "
            f"{len(one.problems)} problems",
            file=sys.stderr,
            flush=True,
        )
    return report(battery, await battery.check_ledger(ledger))


def requests(num_clients: int) -> list[Json]:
    """Return bodies, every other one greedy; some with log-probabilities."""
    every: list[Json] = []
    for number, body in enumerate(bodies(num_clients, {})):
        sampling = {"temperature": 0.8, "top_p": 0.95} if number % 2 else {"temperature": 0}
        one = {"input": body["prompt"], "seed": number, "max_output_tokens": MAX_TOKENS, **sampling}
        every.append({**one, "top_logprobs": 1} if number % 5 == 0 else one)
    return every


@contextlib.contextmanager
def started(model: Path | None, folder: Path) -> Iterator[RunningServer]:
    """Yield a server with the model, or with the fake engine; then stop it."""
    if model is not None:
        server = start_server(model, folder, MAX_SEQS)
    else:
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        settings: dict[str, object] = {"ledger_url": f"sqlite://{folder}/ledger.db"}
        settings |= {"max_engine_restarts": 1000, "max_queue_wait_s": 600.0}
        launch = Launcher(folder, tokenizer)
        server = launch(server=settings, step_s=0.01, num_blocks=2048)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(args.model, folder) as server:
            battery = Battery(server, requests(args.clients), args.seed)
            figures = asyncio.run(run(battery, args.kills, folder / "ledger.db"))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    for problem in figures["problems"][:20]:
        print(problem[:500], file=sys.stderr)
    print(line_of(figures))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
