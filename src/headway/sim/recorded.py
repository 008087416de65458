"""The requests of a recording as a load: what another policy would have made of them.

Prompts and outputs get stand-in tokens that are equal where the recorded blocks were, so that the
prefix cache has the hits that it would have had. Outputs are as long as they were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from headway.core.terms import NO_TERMS, Terms
from headway.errors import ConfigError
from headway.record.entries import HASH_BYTES
from headway.sim.observed import ObservedEngine, ObservedRequest
from headway.workload import Listed, WorkItem

FIRST_TOKEN = 100
"""Stand-in tokens begin above those that the simulated executor samples by itself."""


@dataclass(frozen=True, slots=True)
class RecordedItem(WorkItem):
    """A recorded request; its output tokens matter to later prompts."""

    output_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    terms: Terms = NO_TERMS
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """The requests of a recording, and those that had to be left out."""

    workload: Listed
    num_left_out: int
    """Requests that ended without a token, or before the recording did."""


def load_of(observed: ObservedEngine) -> RecordedLoad:
    """Return the requests of a recording; each sample of a prompt is one."""
    ended = [one for one in observed.requests.values() if one.num_output_tokens]
    if not ended:
        raise ConfigError("the recording has no request that ended with a token")
    ended.sort(key=lambda one: one.entry.arrived_at)
    began_at = ended[0].entry.arrived_at
    tokens = count(FIRST_TOKEN)
    blocks: dict[bytes, int] = {}
    items = [
        _item_of(
            one, began_at, _stand_ins(one, observed.header.capacity.block_size, blocks, tokens)
        )
        for one in ended
    ]
    return RecordedLoad(Listed(tuple(items)), len(observed.requests) - len(ended))


def _stand_ins(
    one: ObservedRequest, block_size: int, blocks: dict[bytes, int], tokens: Iterator[int]
) -> tuple[int, ...]:
    """Return tokens for prompt and output; equal blocks have equal tokens."""
    num_tokens = one.entry.num_prompt_tokens + one.num_output_tokens
    made: list[int] = []
    for start in range(0, len(one.hashes), HASH_BYTES):
        block_hash = bytes(one.hashes[start : start + HASH_BYTES])
        if block_hash not in blocks:
            blocks[block_hash] = next(tokens)
        made += [blocks[block_hash]] * block_size
    made += [next(tokens)] * max(0, num_tokens - len(made))
    return tuple(made[:num_tokens])


def _item_of(one: ObservedRequest, began_at: float, tokens: tuple[int, ...]) -> RecordedItem:
    entry = one.entry
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
