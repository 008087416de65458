"""Token budget of a step, divided between decodes and prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Token budget of one step, shared by decode and prefill.

    Decodes are scheduled first. If prefill work is present, decodes leave `prefill_floor` tokens,
    so that a full decode batch cannot starve new requests. If decodes run, prefill takes at most
    `prefill_cap` tokens, so that a long prompt cannot stall decodes.
    """

    max_num_batched_tokens: int
    prefill_floor: int
    prefill_cap: int

    def for_decode(self, has_prefill: bool) -> int:
        """Return the most tokens that decodes may use."""
        return self.max_num_batched_tokens - (self.prefill_floor if has_prefill else 0)

    def for_prefill(self, num_decode_tokens: int) -> int:
        """Return the most tokens that prefill may use beside these decode tokens."""
        num_left = self.max_num_batched_tokens - num_decode_tokens
        return min(num_left, self.prefill_cap) if num_decode_tokens else num_left
