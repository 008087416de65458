"""How a step's tokens are divided between decodes and prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """One budget for both kinds of work.

    Decodes go first, but while prefill work is present they leave `prefill_floor` tokens to it,
    so that a full decode batch cannot starve arrivals. While decodes run, prefill takes at most
    `prefill_cap` tokens, so that a long prompt cannot stall them.
    """

    max_num_batched_tokens: int
    prefill_floor: int
    prefill_cap: int

    def for_decode(self, has_prefill: bool) -> int:
        return self.max_num_batched_tokens - (self.prefill_floor if has_prefill else 0)

    def for_prefill(self, num_decode_tokens: int) -> int:
        left = self.max_num_batched_tokens - num_decode_tokens
        return min(left, self.prefill_cap) if num_decode_tokens else left
