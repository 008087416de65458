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
HOT_TOKENS = 1024
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
    profile: StepProfile = SMOLLM2_135M
    """Step times of an engine of slowness 1."""

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
        return [self.profile.scaled(one) for one in self.slownesses(num_engines)]

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


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request adds to its conversation."""

    num_said: int
    num_output: int
    is_last: bool
    think_s: float
    """Seconds from its answer to the next turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that have all that was said before as their prefix."""

    name: str
    at: float
    system: int
    """Number of its system prompt."""
    num_system: int
    """Tokens of its system prompt."""
    turns: Iterator[Turn]


def drawn_conversations(load: Load) -> Iterator[Conversation]:
    """Yield the conversations that begin before the end of a load."""
    draw = random.Random(f"chat/{load.seed}")
    systems = [draw.randint(256, 1024) for _ in range(NUM_SYSTEM_PROMPTS)]
    weights = [1.0 / (1 + rank) for rank in range(NUM_SYSTEM_PROMPTS)]
    at, numbers = 0.0, count()
    # Each conversation brings MEAN_TURNS requests, so that many fewer begin.
    while (at := at + draw.expovariate(load.rate / MEAN_TURNS)) < load.until_s:
        (system,) = draw.choices(range(NUM_SYSTEM_PROMPTS), weights)
        name = f"chat-{next(numbers)}"
        # Draws of a conversation do not depend on when its turns end.
        turns = _drawn_turns(random.Random(f"{load.seed}/{name}"), load.slowness * THINK_S)
        yield Conversation(name, at, system, systems[system], turns)


def _drawn_turns(draw: random.Random, mean_think_s: float) -> Iterator[Turn]:
    is_last = False
    while not is_last:
        num_said, num_output = draw_length(draw, 128, 8, 512), draw_length(draw, 64, 4, 256)
        is_last = draw.random() < 1.0 / MEAN_TURNS
        yield Turn(num_said, num_output, is_last, draw.expovariate(1.0 / mean_think_s))


class _Chat:
    """Sends conversations to a simulated fleet."""

    def __init__(self, load: Load, fleet: VirtualFleet) -> None:
        self._load = load
        self._fleet = fleet
        self._fresh = count(10_000)
        self._talks: dict[str, Conversation] = {}
        self._turns: dict[str, Turn] = {}
        """The last turn that was sent of each conversation."""
        fleet.on_finish = self._continue

    def send(self) -> None:
        for talk in drawn_conversations(self._load):
            self._talks[talk.name] = talk
            self._send_turn(talk.name, [1000 + talk.system] * talk.num_system, talk.at)

    def _send_turn(self, name: str, context: list[int], at: float) -> None:
        if at >= self._load.until_s:
            return
        turn = self._turns[name] = next(self._talks[name].turns)
        said = [next(self._fresh)] * turn.num_said
        if len(context) + turn.num_said + turn.num_output > MAX_TOKENS:
            return
        record_id = f"{name}.{len(context)}"
        self._fleet.send(FleetRecord(record_id, context + said, turn.num_output, arrived_at=at))

    def _continue(self, record: FleetRecord) -> None:
        name = record.id.partition(".")[0]
        turn = self._turns[name]
        if not turn.is_last:
            context = [*record.token_ids, *record.output_until(record.num_output)]
            self._send_turn(name, context, self._fleet.clock.now() + turn.think_s)


@dataclass(frozen=True, slots=True)
class DrawnPrompt:
    """A request that stands alone."""

    at: float
    is_hot: bool
    """Whether its prompt begins with the HOT_TOKENS that many share."""
    num_own: int
    """Tokens of the prompt that no other has."""
    num_output: int


def drawn_prompts(load: Load) -> Iterator[DrawnPrompt]:
    """Yield the requests of a load that is neither conversations nor a trace."""
    draw, at = random.Random(f"{load.name}/{load.seed}"), 0.0
    while (at := at + draw.expovariate(load.rate)) < load.until_s:
        is_hot = draw.random() < HOT_SHARES[load.name]
        is_long = load.name != "hot" and not is_hot
        num_own = draw_length(draw, 256 if is_long else 128, 16, 2048)
        yield DrawnPrompt(at, is_hot, num_own, draw_length(draw, 48, 4, 256))


def _send_prompts(load: Load, fleet: VirtualFleet) -> None:
    hot = [999] * HOT_TOKENS
    for number, one in enumerate(drawn_prompts(load)):
        own = [10_000 + number] * one.num_own
        tenant = ("pinned" if one.is_hot else "flood") if load.name == "shares" else ""
        terms = Terms(tenant=tenant, cache_group=tenant)
        token_ids = [*hot, *own] if one.is_hot else own
        fleet.send(FleetRecord(f"r{number}", token_ids, one.num_output, terms, one.at))


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
