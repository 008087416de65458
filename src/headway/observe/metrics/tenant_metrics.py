"""The metrics that tell tenants and tiers apart: who waited for what, who got what was promised.

Labels are bounded: a tenant beyond the first so many goes by "other", whether the names were
configured or are taken as they come, and so does a tier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from headway.core.events import (
    Admitted,
    Arrived,
    EngineLost,
    Event,
    Finished,
    Forked,
    Preempted,
    TokensEmitted,
)
from headway.core.terms import Terms
from headway.core.waiting.accounts import CACHED_COST, OUTPUT_COST, PROMPT_COST
from headway.observe.ledger.writer import LedgerWriter
from headway.observe.metrics.goodput import NUM_LATEST, Fairness, GoodputWindow, Verdict, verdict_on
from headway.observe.metrics.lifetimes import Timings
from headway.observe.trace.account import CauseShare

OTHER = "other"
MAX_TENANTS = 20
MAX_TIERS = 8


class Labels:
    """The first names seen are kept; the rest share one."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        if name not in self._known:
            if len(self._known) >= self._max_names:
                return OTHER
            self._known.add(name)
        return name


class TenantMetrics:
    """Consumes events, and the timings that the other metrics work out."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        self._registry = registry
        self._labels = dict(labels)
        self._tenants = Labels(max_tenants)
        self._tiers = Labels(MAX_TIERS)
        self._fairness = Fairness()
        self._goodput = GoodputWindow()
        self._terms: dict[str, Terms] = {}
        self._waiting: set[str] = set()
        self._make_metrics()

    def consume(self, event: Event) -> None:
        match event:
            case TokensEmitted():
                self._emit(event)
            case Arrived():
                self._terms[event.request_id] = event.terms
                self._waiting.add(event.request_id)
                self._fairness.arrive(event.terms)
            case Forked():
                if terms := self._terms.get(event.parent_id):
                    self._terms[event.request_id] = terms
                    self._fairness.arrive(terms, is_waiting=False)
            case Admitted():
                self._admit(event)
            case Preempted():
                self._preempt(event)
            case EngineLost():
                self._lose_engine()
            case Finished():
                self._leave(event.request_id)
            case _:
                pass

    def count_wait(self, terms: Terms, causes: Sequence[CauseShare]) -> None:
        """A wait is over."""
        for share in causes:
            self._wait_s.labels(**self._labels_of(terms), cause=share.cause).inc(share.seconds)

    def finish(self, timings: Timings) -> None:
        """A request is over."""
        verdict = verdict_on(timings)
        if verdict is Verdict.UNKNOWN:
            return
        of = self._labels_of(timings.terms)
        self._goodput.add(verdict is Verdict.MET)
        self._slo_requests.labels(**of).inc()
        self._slo_tokens.labels(**of).inc(timings.num_output_tokens)
        if verdict is Verdict.MET:
            self._met_requests.labels(**of).inc()
            self._met_tokens.labels(**of).inc(timings.num_output_tokens)

    def set_model_error(self, share: float) -> None:
        """By how much the step-time model is off, as a share of the measured time."""
        self._model_error.set(share)

    def watch_ledger(self, writer: LedgerWriter) -> None:
        self._gauge("headway_ledger_rows_pending", "Rows not yet in the ledger.").set_function(
            lambda: writer.num_pending
        )
        self._gauge(
            "headway_ledger_rows_dropped", "Ledger rows dropped: spool and buffer were full."
        ).set_function(lambda: writer.num_dropped)
        self._gauge(
            "headway_ledger_failing", "1 while writes to the ledger's database fail."
        ).set_function(lambda: float(writer.is_failing))

    # ------------------------------------------------------------------ events

    def _admit(self, event: Admitted) -> None:
        terms = self._terms.get(event.request_id)
        if terms is None:
            return
        if event.request_id in self._waiting:
            self._waiting.discard(event.request_id)
            self._fairness.wait(terms, -1)
        if event.is_resumed:
            return
        num_uncached = event.num_tokens - event.num_cached_tokens
        num_cached = event.num_cached_tokens
        self._fairness.serve(terms, PROMPT_COST * num_uncached + CACHED_COST * num_cached)

    def _emit(self, event: TokensEmitted) -> None:
        terms = self._terms.get(event.request_id)
        if terms is not None:
            self._fairness.serve(terms, OUTPUT_COST * len(event.token_ids))

    def _preempt(self, event: Preempted) -> None:
        terms = self._terms.get(event.request_id)
        self._preemptions.labels(
            **self._labels, method=str(event.method), cause=str(event.cause)
        ).inc()
        if terms is not None and event.request_id not in self._waiting:
            self._waiting.add(event.request_id)
            self._fairness.wait(terms, 1)

    def _lose_engine(self) -> None:
        for request_id, terms in self._terms.items():
            if request_id not in self._waiting:
                self._waiting.add(request_id)
                self._fairness.wait(terms, 1)

    def _leave(self, request_id: str) -> None:
        terms = self._terms.pop(request_id, None)
        if terms is not None:
            self._fairness.leave(terms, request_id in self._waiting)
            self._waiting.discard(request_id)

    # ------------------------------------------------------------------- names

    def _labels_of(self, terms: Terms) -> dict[str, str]:
        tenant, tier = self._tenants.of(terms.tenant), self._tiers.of(terms.tier)
        return {**self._labels, "tenant": tenant, "tier": tier}

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(name, text, list(self._labels), registry=self._registry)
        return gauge.labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, [*self._labels, *labels], registry=self._registry)

    def _make_metrics(self) -> None:
        whose = ("tenant", "tier")
        self._wait_s = self._counter(
            "headway_wait_seconds", "Seconds requests waited, by cause.", *whose, "cause"
        )
        self._preemptions = self._counter(
            "headway_preemptions",
            "Requests preempted, by method and by what the requester needed.",
            "method",
            "cause",
        )
        self._slo_requests = self._counter(
            "headway_requests_with_targets", "Requests with targets that ended.", *whose
        )
        self._met_requests = self._counter(
            "headway_requests_within_targets", "Requests that met all their targets.", *whose
        )
        self._slo_tokens = self._counter(
            "headway_tokens_with_targets", "Output tokens of requests with targets.", *whose
        )
        self._met_tokens = self._counter(
            "headway_tokens_within_targets", "Output tokens of requests that met them.", *whose
        )
        self._gauge(
            "headway_goodput", f"Share of the last {NUM_LATEST} with targets that met them."
        ).set_function(lambda: self._goodput.share)
        self._gauge(
            "headway_fairness_gap",
            "Largest difference in weighted tokens served between tenants with work waiting.",
        ).set_function(lambda: self._fairness.gap)
        self._model_error = self._gauge(
            "headway_step_time_model_error", "Median error of the step-time model, as a share."
        )
