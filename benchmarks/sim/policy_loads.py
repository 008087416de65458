"""Loads of benchmarks/sim/policies.py: recorded ones in files, and a drawn one.

A file of sim/loads has the requests of a recording of the real server, made by
benchmarks/live/record_loads.py: arrivals, lengths, terms, and which blocks of tokens are equal. It
has no tokens, and unlike a recording it needs no scheduler that plans as the recorded one did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import log
from pathlib import Path
from typing import NamedTuple

import msgspec

from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.sim.recording.items import RecordedItem
from headway.workload import (
    Bounds,
    Content,
    Gamma,
    Listed,
    Lognormal,
    Prefixes,
    Synthetic,
    Tenants,
)

FOLDER = Path(__file__).parent / "loads"
BURSTS = Synthetic(
    Gamma(9.0, 3.0),
    Lognormal(log(90), 0.7, Bounds(8, 600)),
    Lognormal(log(45), 0.6, Bounds(4, 160)),
    Content(tenants=Tenants(6), prefixes=Prefixes(0.35, 2, 64)),
)
"""Six tenants by Zipf's law, in bursts: three times the deviation of a Poisson process."""
NUM_BURSTS = 110


class SavedRequest(NamedTuple):
    """One request of a file; `terms` is a position in the table of terms."""

    at: float
    terms: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    priority: int
    blocks: list[int]
    """A number for each block of prompt and output; equal blocks have equal numbers."""


class SavedLoad(msgspec.Struct, kw_only=True):
    """The content of a file."""

    about: str
    settings: list[str]
    """Settings of the simulation, as `headway simulate --set` takes them."""
    block_size: int
    terms: list[Terms]
    requests: list[SavedRequest]


@dataclass(frozen=True, slots=True)
class PolicyLoad:
    """Requests to simulate under each policy, and the settings besides."""

    name: str
    workload: Listed
    settings: tuple[str, ...] = ()
    targets: dict[str, Targets] = field(default_factory=dict[str, Targets])
    """Targets by tenant."""
    weights: dict[str, float] = field(default_factory=dict[str, float])
    has_priorities: bool = False

    @property
    def policies(self) -> tuple[str, ...]:
        """Policies that treat this load differently."""
        found = ("fair", "fcfs", "priority") if self.has_priorities else ("fair", "fcfs")
        return (*found, "deadline") if self.targets else found


def read_loads() -> list[PolicyLoad]:
    """Return all loads, those of files by name."""
    return [*map(read_load, sorted(FOLDER.glob("*.json"))), draw_bursts()]


def draw_bursts() -> PolicyLoad:
    items = tuple(islice(BURSTS.items(seed=1), NUM_BURSTS))
    return PolicyLoad("bursts", Listed(items), ("max_num_seqs=16",))


def read_load(path: Path) -> PolicyLoad:
    """Return the load of a file."""
    saved = msgspec.json.decode(path.read_bytes(), type=SavedLoad)
    return PolicyLoad(
        path.stem,
        Listed(tuple(_item_of(one, saved) for one in saved.requests)),
        tuple(saved.settings),
        {one.tenant: one.targets for one in saved.terms if one.targets != NO_TARGETS},
        {one.tenant: one.weight for one in saved.terms},
        any(one.priority for one in saved.requests),
    )


def _item_of(one: SavedRequest, saved: SavedLoad) -> RecordedItem:
    terms = saved.terms[one.terms]
    num_tokens = one.num_prompt_tokens + one.num_output_tokens
    tokens = [number for number in one.blocks for _ in range(saved.block_size)][:num_tokens]
    return RecordedItem(
        tuple(tokens[: one.num_prompt_tokens]),
        one.num_output_tokens,
        one.at,
        terms.tenant or None,
        tuple(tokens[one.num_prompt_tokens :]),
        one.max_tokens,
        terms,
        one.priority,
    )


def write_load(
    path: Path, about: str, settings: Sequence[str], block_size: int, items: Sequence[RecordedItem]
) -> None:
    """Write the requests of a recording, one per line."""
    terms: dict[Terms, int] = {}
    requests = [_saved(one, block_size, terms) for one in items]
    head = {"about": about, "settings": settings, "block_size": block_size, "terms": list(terms)}
    fields = [f'"{name}": {msgspec.json.encode(one).decode()}' for name, one in head.items()]
    lines = [msgspec.json.encode(one).decode() for one in requests]
    fields.append('"requests": [\n' + ",\n".join(lines) + "\n]")
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def _saved(item: RecordedItem, block_size: int, terms: dict[Terms, int]) -> SavedRequest:
    tokens = (*item.prompt_token_ids, *item.output_ids)
    return SavedRequest(
        round(item.at, 4),
        terms.setdefault(item.terms, len(terms)),
        len(item.prompt_token_ids),
        item.num_output_tokens,
        item.max_tokens,
        item.priority,
        list(tokens[::block_size]),
    )
