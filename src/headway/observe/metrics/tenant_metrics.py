"""Metrics by tenant and tier: waits by cause, preemptions, goodput, the service gap.

The number of label values is bounded: tenants beyond the first `max_tenants` share the label
"other", and so do tiers beyond the first `MAX_TIERS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from headway.core.events import Event, Preempted, Stepped
from headway.core.terms import Terms
from headway.observe.ledger.writer import LedgerWriter
from headway.observe.metrics.goodput import NUM_LATEST, GoodputWindow, Verdict, verdict_on
from headway.observe.requests.parts import RequestPart
from headway.observe.trace.account import CauseShare

OTHER = "other"
MAX_TENANTS = 20
MAX_TIERS = 8


class Labels:
    """The first `max_names` names; every later name becomes "other"."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        """Return the label value for a name."""
        if name not in self._known:
            if len(self._known) >= self._max_names:
                return OTHER
            self._known.add(name)
        return name


class TenantMetrics:
    """Metrics by tenant and tier, from events, waits and finished requests."""

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
        self._goodput = GoodputWindow()
        self._make_metrics()

    def consume(self, event: Event) -> None:
        """Update the metrics that depend on a single event."""
        match event:
            case Preempted():
                labels = {"method": str(event.method), "cause": str(event.cause)}
                self._preemptions.labels(**self._labels, **labels).inc()
            case Stepped():
                self._service_gap.set(event.service_gap)
            case _:
                pass

    def count_wait(self, terms: Terms, causes: Sequence[CauseShare]) -> None:
        """Add the seconds of a finished wait, by cause."""
        for share in causes:
            self._wait_s.labels(**self._labels_of(terms), cause=share.cause).inc(share.seconds)

    def finish(self, terms: Terms, part: RequestPart) -> None:
        """Count a finished prompt or sample that has targets."""
        verdict = verdict_on(part, terms.targets)
        if verdict is Verdict.UNKNOWN:
            return
        of = self._labels_of(terms)
        self._goodput.add(verdict is Verdict.MET)
        self._slo_requests.labels(**of).inc()
        self._slo_tokens.labels(**of).inc(part.num_output_tokens)
        if verdict is Verdict.MET:
            self._met_requests.labels(**of).inc()
            self._met_tokens.labels(**of).inc(part.num_output_tokens)

    def clear_service_gap(self) -> None:
        """Set the service gap to 0: no tenant waits."""
        self._service_gap.set(0)

    def set_model_error(self, share: float) -> None:
        """Set the error of the step-time model, as a share of the measured time."""
        self._model_error.set(share)

    def watch_ledger(self, writer: LedgerWriter) -> None:
        """Export the state of the ledger writer."""
        self._gauge(
            "headway_ledger_rows_pending", "Ledger rows not yet in the database."
        ).set_function(lambda: writer.num_pending)
        self._gauge(
            "headway_ledger_rows_dropped", "Ledger rows dropped because spool and buffer were full."
        ).set_function(lambda: writer.num_dropped)
        self._gauge(
            "headway_ledger_failing", "1 while writes to the ledger's database fail."
        ).set_function(lambda: float(writer.is_failing))

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
            "headway_tokens_within_targets",
            "Output tokens of requests that met all their targets.",
            *whose,
        )
        self._gauge(
            "headway_goodput",
            f"Share of the last {NUM_LATEST} requests with targets that met them.",
        ).set_function(lambda: self._goodput.share)
        self._service_gap = self._gauge(
            "headway_fairness_gap",
            "Largest difference between the service counters of waiting tenants, spot not counted.",
        )
        self._model_error = self._gauge(
            "headway_step_time_model_error",
            "Median error of the step-time model, as a share of the measured time.",
        )
