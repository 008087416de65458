"""Rules by which a request is assigned to an engine.

`ttft` is Headway's. The others are what is in use elsewhere, by our reading and with their default
weights; benchmarks/sim/routing.py compares them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Protocol

from headway.routing.engines import RoutedEngine
from headway.routing.requests import RoutedRequest

DELAY_SHARE = 0.25
"""Part of the work of a request that counts for each request that it delays."""
HASHED_TOKENS = 256
"""Prompt tokens that choose the place on the hash ring."""
NUM_RING_POINTS = 64
MAX_RING_LOAD = 1.25
"""Load of an engine over the mean, beyond which the ring passes it over."""
MIN_MATCH = 0.3
"""Part of a prompt that must be cached for a cache-aware choice."""
MAX_SPREAD = 64
MAX_RATIO_OF_LOADS = 1.5
"""Loads are unbalanced if they differ by more than MAX_SPREAD and by this ratio."""


@dataclass(frozen=True, slots=True)
class Offer:
    """An engine that may take a request, and what it has cached of it."""

    engine: RoutedEngine
    num_cached: int
    ttft_s: float = 0.0
    """Predicted TTFT; 0 for rules that do not use it."""
    work_s: float = 0.0
    """Seconds of prefill and of expected decodes that the request adds to the engine's steps."""

    @property
    def num_seqs(self) -> int:
        return self.engine.num_requests_seqs


class Rule(Protocol):
    """Chooses one of the engines that may take a request."""

    needs_all: bool
    """Whether the rule must see every engine, instead of the likely ones."""
    needs_ttft: bool
    """Whether offers have a predicted TTFT."""

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer: ...


class PredictedTtft:
    """Least predicted TTFT, plus the work added times the requests that it delays.

    It delays those that the engine has and, on an idle engine too, one that is yet to come: a burst
    of one new prefix would scatter over idle engines otherwise.
    """

    needs_all = False
    needs_ttft = True

    def __init__(self, delay_share: float = DELAY_SHARE) -> None:
        self._delay_share = delay_share

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        return min(offers, key=lambda offer: (self.cost_s(one, offer), offer.engine.number))

    def cost_s(self, one: RoutedRequest, offer: Offer) -> float:
        """Return the cost of an engine for a request, in seconds."""
        num_delayed = offer.num_seqs - (one.num_seqs if one.engine is offer.engine else 0)
        return offer.ttft_s + self._delay_share * offer.work_s * (num_delayed + 1)


class RoundRobin:
    """Every engine in turn."""

    needs_all = True
    needs_ttft = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        in_turn = sorted(offers, key=lambda offer: offer.engine.number)
        later = [offer for offer in in_turn if offer.engine.number > self._last]
        chosen = (later or in_turn)[0]
        self._last = chosen.engine.number
        return chosen


class FewestSequences:
    """The engine with the fewest sequences."""

    needs_all = True
    needs_ttft = False

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        return min(offers, key=_by_load)


class PowerOfTwo:
    """The engine with fewer sequences, of two drawn at random."""

    needs_all = True
    needs_ttft = False

    def __init__(self, seed: int = 0) -> None:
        self._draw = Random(seed)

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        return min(self._draw.sample(offers, min(2, len(offers))), key=_by_load)


class BoundedHashRing:
    """Consistent hashing of the first tokens, with bounded loads."""

    needs_all = True
    needs_ttft = False

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._points: list[tuple[bytes, str]] = []

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        by_name = {offer.engine.name: offer for offer in offers}
        self._place(frozenset(by_name))
        request = one.request
        key = repr((request.terms.prefix_salt, request.token_ids[:HASHED_TOKENS])).encode()
        first = bisect_left(self._points, (sha256(key).digest(), ""))
        limit = MAX_RING_LOAD * (sum(offer.num_seqs for offer in offers) + 1) / len(offers)
        for step in range(len(self._points)):
            offer = by_name[self._points[(first + step) % len(self._points)][1]]
            if offer.num_seqs + 1 <= max(1.0, limit):
                return offer
        return min(offers, key=_by_load)

    def _place(self, names: frozenset[str]) -> None:
        if names != self._names:
            self._names = names
            points = ((f"{name}/{at}", name) for name in names for at in range(NUM_RING_POINTS))
            self._points = sorted((sha256(key.encode()).digest(), name) for key, name in points)


class LongestPrefix:
    """The engine with the most cached tokens, then with the fewest sequences."""

    needs_all = True
    needs_ttft = False

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        return min(offers, key=lambda offer: (-offer.num_cached, *_by_load(offer)))


class WeightedScores:
    """Three parts prefix, two parts queue, two parts KV cache, as the scorers of llm-d."""

    needs_all = True
    needs_ttft = False

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        queues = [len(offer.engine.prefilling) + len(offer.engine.queue) for offer in offers]
        least, most = min(queues), max(queues)

        def score(pair: tuple[Offer, int]) -> tuple[float, int]:
            offer, num_queued = pair
            prefix = offer.num_cached / one.request.num_tokens
            queue = 1.0 if most == least else (most - num_queued) / (most - least)
            kv = 1.0 - min(1.0, offer.engine.kv_usage)
            return 3 * prefix + 2 * queue + 2 * kv, -offer.engine.number

        return max(zip(offers, queues, strict=True), key=score)[0]


class CacheAware:
    """The longest match unless loads are unbalanced or little matches, as SGLang's cache_aware.

    A miss goes to the least loaded engine, as in SGLang since the smallest tree drew all traffic to
    an engine that was stuck.
    """

    needs_all = True
    needs_ttft = False

    def choose(self, one: RoutedRequest, offers: Sequence[Offer]) -> Offer:
        loads = [offer.num_seqs for offer in offers]
        is_unbalanced = max(loads) - min(loads) > MAX_SPREAD
        is_unbalanced = is_unbalanced and max(loads) > MAX_RATIO_OF_LOADS * min(loads)
        best = max(offers, key=lambda offer: (offer.num_cached, -offer.engine.number))
        if is_unbalanced or best.num_cached <= MIN_MATCH * one.request.num_tokens:
            return min(offers, key=_by_load)
        return best


def _by_load(offer: Offer) -> tuple[float, ...]:
    return offer.num_seqs, offer.engine.number


RULES: dict[str, Callable[[], Rule]] = {
    "ttft": PredictedTtft,
    "round-robin": RoundRobin,
    "least-loaded": FewestSequences,
    "power-of-two": PowerOfTwo,
    "hash-ring": BoundedHashRing,
    "longest-prefix": LongestPrefix,
    "weighted-scores": WeightedScores,
    "cache-aware": CacheAware,
}
