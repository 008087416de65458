"""Choose the cheapest method to free blocks of a preempted request.

Pure. The cost of recomputing comes from the step-time model, the cost of copying a block from
measured copies; both are passed in.

    trim         drop the tail and recompute it later; the head stays in its blocks
    checkpoint   copy the tail to the offload store and load it later
    recompute    drop all blocks: a trim whose tail is the whole request
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headway.core.causes import PreemptionMethod
from headway.errors import ConfigError

AUTO = "auto"
COPY_SMOOTHING = 0.2
"""Weight of the last measurement in the moving average of a copy's time."""


class PrefillCost(Protocol):
    """The cost of prefill, by the step-time model."""

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """Return the seconds that prefill of `num_tokens` from `start` on adds to steps."""
        ...


@dataclass(frozen=True, slots=True)
class TokenCost:
    """A constant cost per token, for use before any step is measured."""

    per_token_s: float = 0.25e-3

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        return self.per_token_s * num_tokens


@dataclass(frozen=True, slots=True)
class Tail:
    """The blocks to free at the end of a table, and the slots behind them."""

    start: int
    """Position of the first token in these blocks."""
    num_tokens: int
    """Computed tokens in these blocks; the last block may be partly filled."""
    num_blocks: int
    num_slots: int = 0
    """Slots that the request owns; they store the tokens behind these blocks."""
    num_slot_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PreemptionCosts:
    """Costs and free slots that the choice depends on."""

    prefill: PrefillCost
    block_copy_s: float
    num_free_slots: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, its total cost in seconds, and the tokens to recompute."""

    method: PreemptionMethod
    seconds: float
    num_tokens_lost: int


def choose_method(tail: Tail, costs: PreemptionCosts, method: str = AUTO) -> Choice:
    """Return the cheapest choice, or that of `method` where slots allow it."""
    trim = cost_of_trim(tail, costs)
    checkpoint = cost_of_checkpoint(tail, costs)
    if checkpoint is None or method in (PreemptionMethod.TRIM, PreemptionMethod.RECOMPUTE):
        return trim
    if method == PreemptionMethod.CHECKPOINT:
        return checkpoint
    return checkpoint if checkpoint.seconds < trim.seconds else trim


def cost_of_trim(tail: Tail, costs: PreemptionCosts) -> Choice:
    """Return the cost of dropping the tail.

    The slots behind the tail are dropped too, because a kept prefix has no gap.
    """
    num_tokens = tail.num_tokens + tail.num_slot_tokens
    method = PreemptionMethod.TRIM if tail.start else PreemptionMethod.RECOMPUTE
    return Choice(method, costs.prefill.prefill_s(num_tokens, tail.start), num_tokens)


def cost_of_checkpoint(tail: Tail, costs: PreemptionCosts) -> Choice | None:
    """Return the cost of saving the tail; None if there are too few slots.

    Without free slots the request reuses its own last slots and loses the tokens in them.
    """
    num_reused = max(0, tail.num_blocks - costs.num_free_slots)
    if num_reused > tail.num_slots:
        return None
    end = tail.start + tail.num_tokens + tail.num_slot_tokens
    num_lost = 0
    if num_reused:
        in_last = tail.num_slot_tokens - (tail.num_slots - 1) * costs.block_size
        num_lost = in_last + (num_reused - 1) * costs.block_size
    # Each block is saved now and loaded later; the old contents of a reused slot are not loaded.
    copies_s = costs.block_copy_s * (2 * tail.num_blocks - num_reused)
    seconds = copies_s + (costs.prefill.prefill_s(num_lost, end - num_lost) if num_lost else 0.0)
    return Choice(PreemptionMethod.CHECKPOINT, seconds, num_lost)


class CopyTime:
    """Moving average of the seconds to copy one block."""

    def __init__(self, block_copy_s: float) -> None:
        self.block_copy_s = block_copy_s

    def observe(self, num_blocks: int, copy_s: float) -> None:
        if num_blocks and copy_s > 0.0:
            latest = copy_s / num_blocks
            mean = self.block_copy_s or latest
            self.block_copy_s = mean + COPY_SMOOTHING * (latest - mean)


def check_method(name: str) -> str:
    """Return `name` if it is a method or auto; raise ConfigError otherwise."""
    if name not in (AUTO, *PreemptionMethod):
        known = ", ".join((AUTO, *PreemptionMethod))
        raise ConfigError(f"preemption_method must be one of {known}, got {name!r}")
    return name
