"""Headroom: blocks that admission leaves free for running requests to grow into.

The length of an output is not known at admission. Reserving for the longest output would leave much
of the pool unused; reserving no block would cause preemptions soon after. So the headroom is
learned: each preemption for a growing table widens it, and each step narrows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.request import Request

BLOCKS_PER_PREEMPTION = 0.5
"""Blocks per running request that one preemption adds."""
DECAY_PER_STEP = 0.995
"""Factor per step; halves the headroom in 138 steps."""
MAX_BLOCKS_PER_REQUEST = 4.0


@dataclass(slots=True)
class Headroom:
    """A number of blocks per running request, at least `min_blocks` in total."""

    min_blocks: int
    _per_request: float = 0.0

    def num_blocks(self, num_running: int, growing: Sequence[Request] | None) -> int:
        """Return how many blocks admission must leave free.

        With `growing`, for admission by preemption: the minimum, and one block for each of these
        running requests. Without running requests: 0, so that each request that can ever fit fits
        into an empty engine.
        """
        if not num_running:
            return 0
        if growing is not None:
            return self.min_blocks + len(growing)
        return max(self.min_blocks, int(self._per_request * num_running))

    def widen(self) -> None:
        """Widen the headroom after a preemption."""
        self._per_request = min(MAX_BLOCKS_PER_REQUEST, self._per_request + BLOCKS_PER_PREEMPTION)

    def decay(self) -> None:
        """Narrow the headroom; called once per step."""
        self._per_request *= DECAY_PER_STEP
