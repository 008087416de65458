"""By which method a preempted request gives up blocks: the one that will have cost least time.

Pure. The time to compute tokens again comes from the step-time model, the time to move a block
from measured copies; both are passed in.

    trim         the tail is lost and will be computed again; the head stays where it is
    checkpoint   the tail is moved to the second store and will be moved back
    recompute    nothing stays: what trimming comes to if the tail is everything
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headway.core.causes import PreemptionMethod
from headway.errors import ConfigError

AUTO = "auto"
COPY_SMOOTHING = 0.2
"""How much of the last measurement goes into the time of a copy."""


class PrefillCost(Protocol):
    """The part of the step-time model that is needed here."""

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """What computing so many tokens from a position on adds to the steps that do it."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCost:
    """A PrefillCost for as long as nothing has been measured, and for tests."""

    per_token_s: float = 0.25e-3

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        return self.per_token_s * num_tokens


class Tail(NamedTuple):
    """What is to go: the last blocks of a request, and what it has in slots behind them."""

    start: int
    """The position of the first token in these blocks."""
    num_tokens: int
    """Computed tokens in them; the last block may be partly filled."""
    num_blocks: int
    num_slots: int = 0
    """Slots it owns already: its tokens behind these blocks."""
    num_slot_tokens: int = 0


class Means(NamedTuple):
    """What there is to do it with."""

    cost: PrefillCost
    block_copy_s: float
    num_free_slots: int
    block_size: int


class Choice(NamedTuple):
    """A method for a tail: seconds it will have cost in the end, and tokens lost by it."""

    method: PreemptionMethod
    seconds: float
    num_tokens_lost: int


def choose_method(tail: Tail, means: Means, method: str = AUTO) -> Choice:
    """The cheapest way for a tail to go; `method` restricts the choice where it can be had."""
    lost = trimmed(tail, means)
    saved = checkpointed(tail, means)
    if saved is None or method in (PreemptionMethod.TRIM, PreemptionMethod.RECOMPUTE):
        return lost
    if method == PreemptionMethod.CHECKPOINT:
        return saved
    return saved if saved.seconds < lost.seconds else lost


def trimmed(tail: Tail, means: Means) -> Choice:
    """Losing the tail. Slots behind it are lost with it: a request continues where it ends."""
    num_tokens = tail.num_tokens + tail.num_slot_tokens
    method = PreemptionMethod.TRIM if tail.start else PreemptionMethod.RECOMPUTE
    return Choice(method, means.cost.prefill_s(num_tokens, tail.start), num_tokens)


def checkpointed(tail: Tail, means: Means) -> Choice | None:
    """Saving the tail; if slots run out, into the request's own last ones, whose tokens are then
    lost instead. None if even these are too few."""
    num_reused = max(0, tail.num_blocks - means.num_free_slots)
    if num_reused > tail.num_slots:
        return None
    end = tail.start + tail.num_tokens + tail.num_slot_tokens
    num_lost = 0
    if num_reused:
        in_last = tail.num_slot_tokens - (tail.num_slots - 1) * means.block_size
        num_lost = in_last + (num_reused - 1) * means.block_size
    # Saved now and loaded later; a reused slot's old contents will not be loaded.
    copies_s = means.block_copy_s * (2 * tail.num_blocks - num_reused)
    seconds = copies_s + (means.cost.prefill_s(num_lost, end - num_lost) if num_lost else 0.0)
    return Choice(PreemptionMethod.CHECKPOINT, seconds, num_lost)


class CopyTime:
    """Seconds to move one block, as the executor's steps show it."""

    def __init__(self, block_copy_s: float) -> None:
        self.block_copy_s = block_copy_s

    def observe(self, num_blocks: int, copy_s: float) -> None:
        if num_blocks and copy_s > 0.0:
            latest = copy_s / num_blocks
            before = self.block_copy_s or latest
            self.block_copy_s = before + COPY_SMOOTHING * (latest - before)


def check_method(name: str) -> str:
    """The name of a method, or auto."""
    if name not in (AUTO, *PreemptionMethod):
        known = ", ".join((AUTO, *PreemptionMethod))
        raise ConfigError(f"preemption_method must be one of {known}, got {name!r}")
    return name
