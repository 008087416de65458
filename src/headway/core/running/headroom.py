"""How many blocks admission leaves free for running requests to grow into.

What a request will come to need is not known when it is let in. To count with the most it may have
would leave much of the pool unused; to count with nothing lets in requests that others soon have to
be preempted for. So it is learned: every preemption that growth asks for widens the headroom, and
every step narrows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.request import Request

BLOCKS_PER_PREEMPTION = 0.5
"""Blocks for each running request, added by one preemption."""
DECAY_PER_STEP = 0.995
"""What each step leaves of it: half after 138 steps."""
MAX_BLOCKS_PER_REQUEST = 4.0


@dataclass(slots=True)
class Headroom:
    """At least `min_blocks` blocks, and so many for each running request."""

    min_blocks: int
    _per_request: float = 0.0

    def num_blocks(self, num_running: int, growing: Sequence[Request] | None) -> int:
        """To leave free. For one that may take the place of others, only what those of the
        running need now that it may not take from. An empty engine leaves nothing free, so that
        whatever can ever fit fits then."""
        if not num_running:
            return 0
        if growing is not None:
            return self.min_blocks + len(growing)
        return max(self.min_blocks, int(self._per_request * num_running))

    def widen(self) -> None:
        self._per_request = min(MAX_BLOCKS_PER_REQUEST, self._per_request + BLOCKS_PER_PREEMPTION)

    def decay(self) -> None:
        self._per_request *= DECAY_PER_STEP
