"""Whom to preempt. Pure choices over the running requests; the scheduler carries them out.

`running` is sorted by claim, strongest first. A request that has been preempted
`max_preemptions` times is immune; admission gave it room for its whole output, so it cannot
block anyone for ever.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from headway.core.admission import Wait
from headway.core.kv import KVCache
from headway.core.queue import Claim
from headway.core.request import Request


def choose_victim(
    claimant: Request, running: Sequence[Request], kv: KVCache, max_preemptions: int
) -> Request | None:
    """The request to preempt so that `claimant`, itself running, can have one more block.

    The weakest claim goes first, down to the claimant itself. A preemption that frees no
    usable block does not happen, and the strongest request is never a victim.
    """
    for request in reversed(running):
        if request is running[0]:
            return None
        if request.num_preemptions < max_preemptions and kv.num_freeable([request]) > 0:
            return request
        if request is claimant:
            return None
    return None


def choose_victims(
    wait: Wait, weaker: Sequence[Request], kv: KVCache, max_preemptions: int
) -> Sequence[Request]:
    """Those of `weaker`, weakest first, whose leaving ends `wait`; none if all together would
    not: a preemption without a gain only throws work away."""
    movable = [request for request in reversed(weaker) if request.num_preemptions < max_preemptions]
    if not _would_end(wait, movable, kv):
        return ()
    counts = range(len(movable))
    num_needed = bisect_left(counts, True, key=lambda num: _would_end(wait, movable[:num], kv))
    victims = movable[:num_needed]
    # A weak request that holds little may have been passed on the way to one that holds enough.
    for request in reversed(victims):
        others = [other for other in victims if other is not request]
        if _would_end(wait, others, kv):
            victims = others
    return victims


def _would_end(wait: Wait, victims: Sequence[Request], kv: KVCache) -> bool:
    if sum([request.params.n for request in victims]) < wait.num_seats:
        return False
    # Blocks the claimant matched stay in use when a victim lets go of them.
    return kv.num_freeable(victims, frozenset(wait.match.block_ids)) >= wait.num_blocks


def weaker_than(
    claimant: Request, running: Sequence[Request], claim: Callable[[Request], Claim]
) -> Sequence[Request]:
    """The running requests of strictly weaker rank, strongest first."""
    rank = claim(claimant).rank
    if not running or claim(running[-1]).rank <= rank:
        return ()
    return running[bisect_right(running, rank, key=lambda request: claim(request).rank) :]
