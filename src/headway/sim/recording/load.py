"""The requests of a recording as a load: what another policy would have made of them.

Prompts and outputs get stand-in tokens that are equal where the recorded blocks were, so that the
prefix cache has the hits that it would have had. Outputs are as long as they were; those of
requests that the engine refused are drawn from the others of their tenant.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from headway.errors import ConfigError
from headway.record.entries import HASH_BYTES, AddEntry
from headway.record.stand_ins import StandIns
from headway.sim.recording.items import RecordedItem
from headway.sim.recording.observed import ObservedRequest
from headway.workload import Listed

FIRST_TOKEN = 100
"""Stand-in tokens begin above those that the simulated executor samples by itself."""


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """The requests of a recording, and those that had to be left out."""

    workload: Listed
    num_left_out: int
    """Requests that ended without a token, or before the recording did."""
    num_following: int = 0
    """Requests that are sent after the answer that they continue."""
    num_drawn: int = 0
    """Requests that were refused, whose output lengths are drawn."""


class Observed(Protocol):
    """Requests that were recorded, by engine or router."""

    @property
    def block_size(self) -> int: ...
    @property
    def requests(self) -> Mapping[str, ObservedRequest]: ...
    @property
    def refused(self) -> Sequence[AddEntry]: ...


def load_of(observed: Observed, is_closed_loop: bool = False) -> RecordedLoad:
    """Return the requests of a recording; each sample of a prompt is one.

    In a closed loop, the next request of a conversation is sent after the answer to the last one.
    """
    ended = [one for one in observed.requests.values() if one.num_output_tokens]
    if not ended:
        raise ConfigError("the recording has no request that ended with a token")
    num_left_out = len(observed.requests) - len(ended)
    drawn = _draw_refused(observed.refused, ended)
    ended = sorted([*ended, *drawn], key=lambda one: one.entry.arrived_at)
    began_at = ended[0].entry.arrived_at
    block_size = observed.block_size
    stand_ins = StandIns(FIRST_TOKEN, block_size)
    items = [
        replace(_item_of(one, began_at, stand_ins), number=number)
        for number, one in enumerate(ended)
    ]
    followed = _find_followed(ended, block_size) if is_closed_loop else {}
    for number, (before, think_s) in followed.items():
        items[number] = replace(items[number], after=before, think_s=think_s)
    return RecordedLoad(Listed(tuple(items)), num_left_out, len(followed), len(drawn))


def _draw_refused(
    refused: Sequence[AddEntry], ended: Sequence[ObservedRequest]
) -> list[ObservedRequest]:
    """Return refused requests with the output length of another one, of their tenant if any."""
    lengths: dict[str, list[int]] = {}
    for one in ended:
        lengths.setdefault(one.entry.terms.tenant, []).append(one.num_output_tokens)
    every, rng = [one.num_output_tokens for one in ended], random.Random("refused")
    drawn: list[ObservedRequest] = []
    for entry in refused:
        for _ in range(entry.n):
            num_tokens = rng.choice(lengths.get(entry.terms.tenant, every))
            one = ObservedRequest(entry, bytearray(entry.hashes), is_added_idle=False)
            one.num_output_tokens = max(1, min(num_tokens, entry.max_tokens or num_tokens))
            drawn.append(one)
    return drawn


def _find_followed(
    ended: Sequence[ObservedRequest], block_size: int
) -> dict[int, tuple[int, float]]:
    """Return by number the request that one continues, and the seconds between them.

    A prompt continues an answer if it has the last full block of it, with at least one token of
    the answer in that block. Shorter answers leave no trace.
    """
    ends: dict[bytes, list[int]] = {}
    """Last full block of a request with its output -> numbers of such requests."""
    for number, one in enumerate(ended):
        if len(one.hashes) // HASH_BYTES * block_size > one.entry.num_prompt_tokens:
            ends.setdefault(bytes(one.hashes[-HASH_BYTES:]), []).append(number)
    followed: dict[int, tuple[int, float]] = {}
    for number, one in enumerate(ended):
        hashes, num_full = one.hashes, one.entry.num_prompt_tokens // block_size
        for start in range((num_full - 1) * HASH_BYTES, -1, -HASH_BYTES):
            before = [
                (finished_at, other)
                for other in ends.get(bytes(hashes[start : start + HASH_BYTES]), ())
                if (finished_at := ended[other].finished_at) is not None
                and finished_at <= one.entry.arrived_at
            ]
            if before:
                finished_at, other = max(before)
                followed[number] = other, one.entry.arrived_at - finished_at
                break
    return followed


def _item_of(one: ObservedRequest, began_at: float, stand_ins: StandIns) -> RecordedItem:
    entry = one.entry
    num_tokens = entry.num_prompt_tokens + one.num_output_tokens
    tokens = tuple(stand_ins.sequence(bytes(one.hashes), num_tokens))
    return RecordedItem(
        tokens[: entry.num_prompt_tokens],
        one.num_output_tokens,
        entry.arrived_at - began_at,
        entry.terms.tenant or None,
        tokens[entry.num_prompt_tokens :],
        entry.max_tokens,
        entry.terms,
        entry.priority,
    )
