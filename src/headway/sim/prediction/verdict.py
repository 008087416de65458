"""What engines can do at most, and how near to it a load is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count, islice
from math import inf

from headway.errors import ConfigError
from headway.sim.prediction.figures import Interval, Prediction, Runs, begun_anywhere
from headway.sim.prediction.served import ServedRequest
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.sim.recording.items import RecordedItem, follows
from headway.workload import Gamma, Listed, Poisson, Synthetic, WorkItem, Workload

KNEE_SHARE = 0.8
"""Share of the saturated rate from which latency rises steeply with the load."""
STRETCH_S = 600.0
"""A load that varies is planned and judged by its busiest stretch of so many seconds."""
REQUESTS_PER_SLOT = 6
MIN_REQUESTS = 1500
"""Of all engines together: with a few hundred, chance would decide how much is served."""
MAX_SATURATED_RUNS = 5
MIN_SERVED = 20


class Regime(StrEnum):
    """How near a load is to what the engines can do."""

    STABLE = "stable"
    NEAR_THE_KNEE = "near the knee"
    OVERLOADED = "overloaded"
    REFUSING = "refusing"
    """Requests are refused, for their targets or their size: what can be served says little."""


REFUSALS = {
    "deadline": "because their targets cannot be met beside the others",
    "never_fits": "because they are larger than the KV cache or the KV quota of their tenant",
}
"""Reasons of refusals in words."""


def saturated_rate(setup: Setup, workload: Workload, runs: Runs) -> Interval:
    """Return the requests per second that the engines finish if requests never run out."""
    num_slots = setup.spec.scheduler.max_num_seqs
    num_requests = max(MIN_REQUESTS, REQUESTS_PER_SLOT * num_slots * setup.num_engines)
    rates: list[float] = []
    for seed in replace(runs, count=min(runs.count, MAX_SATURATED_RUNS)).seeds:
        items = islice(_endless(workload, seed), num_requests)
        waiting = Listed(tuple(replace(item, at=0.0) for item in items))
        load = serve_load(setup, waiting, Limits(num_requests), seed, seed)
        rates.append(_served_rate(load.requests))
    return Interval.of(rates)


def _endless(workload: Workload, seed: int) -> Iterator[WorkItem]:
    """Yield the requests of the busiest stretch, or those of a list again with other tokens."""
    if not isinstance(workload, Listed):
        yield from begun_anywhere(workload.busiest(STRETCH_S), seed).items(seed)
        return
    if not workload.requests:
        return
    most = max(max(_tokens_of(item)) for item in workload.requests)
    for turn in count():
        for item in workload.requests:
            yield _with_other_tokens(item, turn * (most + 1)) if turn else item


def _tokens_of(item: WorkItem) -> tuple[int, ...]:
    outputs = item.output_ids if isinstance(item, RecordedItem) else ()
    return (*item.prompt_token_ids, *outputs)


def _with_other_tokens(item: WorkItem, offset: int) -> WorkItem:
    """Return a request that shares no block with the same one with another offset."""
    moved = replace(item, prompt_token_ids=tuple(one + offset for one in item.prompt_token_ids))
    if isinstance(moved, RecordedItem):
        moved = replace(moved, output_ids=tuple(one + offset for one in moved.output_ids))
    return moved


def _served_rate(requests: Sequence[ServedRequest]) -> float:
    """Return the requests per second while the engines are full, with parts of requests.

    Requests of one length end together: counted at their ends, a wave more or less would matter.
    """
    spans = [
        (one.first_token_at, one.finished_at)
        for one in requests
        if one.first_token_at is not None and one.finished_at is not None
    ]
    if len(spans) < MIN_SERVED:
        raise ConfigError(
            f"{len(spans)} requests were served; to find what the engines can do takes {MIN_SERVED}"
        )
    # While the running set fills and when it empties, engines finish less.
    ends = sorted(end for _, end in spans)
    low, high = ends[len(ends) // 5], ends[4 * len(ends) // 5]
    if low == high:
        raise ConfigError("all requests end at once: they are too few for the engines")
    num_served = 0.0
    for start, end in spans:
        if end > start:
            num_served += max(0.0, min(end, high) - max(start, low)) / (end - start)
        else:
            num_served += low < end <= high
    return num_served / (high - low)


def regime_of(rate: float, saturated: Interval) -> Regime:
    """Return how near a rate is to saturation; in doubt, nearer."""
    if rate >= saturated.low:
        return Regime.OVERLOADED
    return Regime.STABLE if rate < KNEE_SHARE * saturated.low else Regime.NEAR_THE_KNEE


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """Whether a load can be served, and how far it is from what can be."""

    regime: Regime
    reason: str

    @property
    def text(self) -> str:
        return f"{self.regime}: {self.reason}"


def judge(
    setup: Setup, workload: Workload, prediction: Prediction, runs: Runs
) -> LoadVerdict | None:
    """Judge a load; None for a closed loop or too few requests, unless some are refused."""
    if refused := _describe_refusals(prediction):
        return LoadVerdict(Regime.REFUSING, refused)
    if isinstance(workload, Listed) and any(map(follows, workload.requests)):
        return None
    requests = prediction.loads[0].requests
    if workload.concurrency is not None or len(requests) < MIN_SERVED:
        return None
    rate, when = _arrival_rate(workload, requests)
    found = saturated_rate(setup.fixed(setup.most_engines), workload, runs)
    most = f"{found.middle:.3g} ({found.low:.3g} - {found.high:.3g})"
    arrive = "all requests arrive at once" if rate == inf else f"{rate:.3g} requests/s arrive{when}"
    return LoadVerdict(regime_of(rate, found), f"{arrive}; at most {most} can be served")


def _arrival_rate(workload: Workload, requests: Sequence[ServedRequest]) -> tuple[float, str]:
    """Return the requests per second of a load, and when it has them if it varies."""
    if isinstance(workload, Synthetic) and isinstance(workload.arrivals, Poisson | Gamma):
        return workload.arrivals.rate, ""
    times = sorted(one.scheduled_at for one in requests)
    span_s = min(STRETCH_S, times[-1] - times[0])
    if span_s == 0.0:
        return inf, ""
    first = most = 0
    for number, at in enumerate(times):
        while at - times[first] > span_s:
            first += 1
        most = max(most, number + 1 - first)
    is_part = span_s < times[-1] - times[0]
    return most / span_s, f" in the busiest {span_s / 60:g} minutes" if is_part else ""


def _describe_refusals(prediction: Prediction) -> str:
    """Return which share of the requests is refused, and why; empty if none is."""
    loads = [one.requests for one in prediction.loads if one.requests]
    parts: list[str] = []
    for reason, words in REFUSALS.items():
        counts = [sum(one.refusal_reason == reason for one in requests) for requests in loads]
        if any(counts):
            pairs = zip(counts, loads, strict=True)
            found = Interval.of([100 * number / len(requests) for number, requests in pairs])
            share = f"{found.middle:.3g} % ({found.low:.3g} - {found.high:.3g}) of the requests"
            parts.append(f"{share} are refused, {words}")
    return "; ".join(parts)
