"""Workloads of benchmarks/sim/routing.py: what arrives at a fleet, and when.

chat      conversations that begin with one of 24 system prompts, by Zipf's law
hot       60 % of requests share one prefix of 1,024 tokens
unique    no two prompts share anything
slow      chat, with a quarter of the machines 2.5 times slower
mooncake  a Mooncake trace, lengths divided by 8
joining   unique, with half of the engines joining after half of the time
shares    two tenants: a quarter of the requests share a prefix of 1,024 tokens and are measured,
          the others are like `unique`
"""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from headway.core.terms import Terms
from headway.errors import ConfigError
from headway.sim import SMOLLM2_135M, StepProfile
from headway.sim.fleet import FleetRecord, VirtualFleet
from headway.workload.trace import read_trace

NUM_SYSTEM_PROMPTS = 24
MEAN_TURNS = 4.0
THINK_S = 5.0
MAX_TOKENS = 3500
HOT_SHARES = {"hot": 0.6, "unique": 0.0, "joining": 0.0, "shares": 0.25}
MOONCAKE_SCALE = 8
MOONCAKE_BLOCK = 512 // MOONCAKE_SCALE
NAMES = ("chat", "hot", "unique", "slow", "mooncake", "joining", "shares")
CHATS = ("chat", "slow")
WARM_UP_S, CHAT_WARM_UP_S = 10.0, 40.0
"""Seconds before a load is measured; conversations take longer to be as many as they stay."""
SLOWER = 2.5
"""How much slower a quarter of the machines are with the load `slow`."""
MEASURED = {"shares": "pinned"}
"""Tenant whose requests count, by load; all count in the others."""


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives, at how many requests per second, for how long after the warm-up."""

    name: str
    rate: float
    seconds: float
    seed: int
    trace: Path | None = None
    slowness: float = 1.0
    """How much longer everything takes, and is waited for."""

    @property
    def is_chat(self) -> bool:
        return self.name in CHATS

    @property
    def warm_up_s(self) -> float:
        return self.slowness * (CHAT_WARM_UP_S if self.is_chat else WARM_UP_S)

    @property
    def until_s(self) -> float:
        return self.warm_up_s + self.slowness * self.seconds

    def slownesses(self, num_engines: int) -> list[float]:
        """Return how much longer the steps of each engine take, at the start."""
        if self.name == "joining":
            return [self.slowness] * (num_engines // 2)
        num_slow = num_engines // 4 if self.name == "slow" else 0
        slow = SLOWER * self.slowness
        return [slow] * num_slow + [self.slowness] * (num_engines - num_slow)

    def profiles(self, num_engines: int) -> list[StepProfile]:
        """Return the step profiles of so many engines."""
        return [SMOLLM2_135M.scaled(one) for one in self.slownesses(num_engines)]

    def send(self, fleet: VirtualFleet, num_engines: int) -> None:
        """Have all requests of this load arrive."""
        if self.is_chat:
            _Chat(self, fleet).send()
        elif self.name == "mooncake":
            _send_trace(self, fleet)
        else:
            _send_prompts(self, fleet)
        if self.name == "joining":
            for profile in self.profiles(num_engines):
                fleet.at(self.until_s / 2, partial(fleet.add_engine, profile))


def draw_length(draw: random.Random, median: float, low: int, high: int) -> int:
    """Return a number of tokens, lognormal around a median."""
    return min(high, max(low, int(median * draw.lognormvariate(0.0, 0.6))))


class _Chat:
    """Conversations: each turn has all that was said before as its prefix."""

    def __init__(self, load: Load, fleet: VirtualFleet) -> None:
        self._load = load
        self._fleet = fleet
        self._draw = random.Random(f"chat/{load.seed}")
        self._fresh = count(10_000)
        self._systems = [
            [1000 + number] * self._draw.randint(256, 1024) for number in range(NUM_SYSTEM_PROMPTS)
        ]
        self._weights = [1.0 / (1 + rank) for rank in range(NUM_SYSTEM_PROMPTS)]
        self._drawn: dict[str, random.Random] = {}
        fleet.on_finish = self._continue

    def send(self) -> None:
        # Each conversation brings MEAN_TURNS requests, so that many fewer begin.
        at, numbers = 0.0, count()
        while at < self._load.until_s:
            at += self._draw.expovariate(self._load.rate / MEAN_TURNS)
            (system,) = self._draw.choices(self._systems, self._weights)
            name = f"chat-{next(numbers)}"
            # Draws of a conversation do not depend on when its turns end.
            self._drawn[name] = random.Random(f"{self._load.seed}/{name}")
            self._send_turn(name, list(system), at)

    def _send_turn(self, name: str, context: list[int], at: float) -> None:
        draw = self._drawn[name]
        said = [next(self._fresh)] * draw_length(draw, 128, 8, 512)
        num_output = draw_length(draw, 64, 4, 256)
        if len(context) + len(said) + num_output > MAX_TOKENS or at >= self._load.until_s:
            return
        record_id = f"{name}.{len(context)}"
        record = FleetRecord(record_id, context + said, num_output, arrived_at=at)
        self._fleet.send(record)

    def _continue(self, record: FleetRecord) -> None:
        name = record.id.partition(".")[0]
        draw = self._drawn[name]
        if draw.random() < 1.0 / MEAN_TURNS:
            return
        at = self._fleet.clock.now() + draw.expovariate(1.0 / THINK_S)
        # The simulated model repeats one token, and ends with token 0.
        context = [*record.token_ids, *[7] * (record.num_output - 1)]
        self._send_turn(name, context, at)


def _send_prompts(load: Load, fleet: VirtualFleet) -> None:
    draw = random.Random(f"{load.name}/{load.seed}")
    at, numbers = 0.0, count()
    hot = [999] * 1024
    while True:
        at += draw.expovariate(load.rate)
        if at >= load.until_s:
            return
        number = next(numbers)
        is_hot = draw.random() < HOT_SHARES[load.name]
        is_long = load.name != "hot" and not is_hot
        own = [10_000 + number] * draw_length(draw, 256 if is_long else 128, 16, 2048)
        tenant = ("pinned" if is_hot else "flood") if load.name == "shares" else ""
        terms = Terms(tenant=tenant, cache_group=tenant)
        token_ids = [*hot, *own] if is_hot else own
        fleet.send(FleetRecord(f"r{number}", token_ids, draw_length(draw, 48, 4, 256), terms, at))


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a Mooncake trace, its lengths divided by MOONCAKE_SCALE."""

    at: float
    blocks: Sequence[int]
    """Ids of the blocks of MOONCAKE_BLOCK tokens that its prompt begins with."""
    num_prompt: int
    num_output: int


def check_trace(parser: ArgumentParser, names: Sequence[str], path: Path | None) -> None:
    """End the program if the load mooncake has no trace that can be read."""
    if "mooncake" not in names:
        return
    if path is None:
        parser.error("the load mooncake needs --trace FILE")
    try:
        read_trace(path)
    except ConfigError as error:
        parser.error(str(error))


def traced_requests(load: Load) -> Iterator[TracedRequest]:
    """Yield what a trace brings at the rate of a load."""
    if load.trace is None:
        raise ValueError("the load mooncake has no trace")
    trace = read_trace(load.trace).jittered(random.Random(load.seed))
    speed = load.rate / trace.mean_rate
    for row in trace.rows:
        at = row.at / speed
        if at >= load.until_s:
            return
        num_prompt = min(MAX_TOKENS - 300, max(8, row.num_prompt_tokens // MOONCAKE_SCALE))
        num_output = min(256, max(2, row.num_output_tokens // MOONCAKE_SCALE))
        yield TracedRequest(at, row.hash_ids, num_prompt, num_output)


def _send_trace(load: Load, fleet: VirtualFleet) -> None:
    for number, one in enumerate(traced_requests(load)):
        token_ids = [10_000 + block for block in one.blocks for _ in range(MOONCAKE_BLOCK)]
        prompt = token_ids[: one.num_prompt] or [1]
        fleet.send(FleetRecord(f"r{number}", prompt, one.num_output, arrived_at=one.at))
