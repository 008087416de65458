"""Prometheus metrics, from events and the request table.

Names that start with `vllm:` have the meaning of vLLM, so that its dashboards, autoscalers and
gateways work unchanged. Names that start with `headway_` are Headway's own. Forked samples count as
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from headway.core.events import Arrived, Idled, Preempted, Routed, Stepped
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.observe.ledger.writer import LedgerWriter
from headway.observe.metrics.batch_metrics import BatchMetrics
from headway.observe.metrics.engine_metrics import EngineMetrics, EngineState
from headway.observe.metrics.tenant_metrics import MAX_TENANTS, TenantMetrics
from headway.observe.requests.parts import RequestPart
from headway.observe.requests.table import Changes
from headway.observe.spans.exporter import SpanExporter
from headway.observe.trace.account import CauseShare

CONTENT_TYPE = CONTENT_TYPE_LATEST

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
SAMPLE_BUCKETS = (1, 2, 5, 10, 20)


class Metrics:
    """All metrics of a server, in one registry."""

    def __init__(
        self,
        model_name: str,
        registry: CollectorRegistry | None = None,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        self.registry = registry or CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self.batches = BatchMetrics(self.registry, self._labels)
        self._by_tenant = TenantMetrics(self.registry, self._labels, max_tenants)
        self._by_engine = EngineMetrics(self.registry, self._labels)
        self._num_blocks = 1
        self.refusal_listeners: list[Callable[[str], None]] = []
        """Called with the reason of each refusal."""
        self._make_gauges()
        self._make_counters()
        self._make_histograms()

    def consume(self, changes: Changes) -> None:
        """Consume what the events of at most one step changed."""
        for event in changes.events:
            self._by_tenant.consume(event)
            match event:
                case Stepped():
                    self._step(event)
                case Idled():
                    self._set_idle(event.num_blocks_used)
                case Arrived():
                    self._arrived.inc()
                case Preempted():
                    self._num_preemptions.inc()
                    self._discarded_tokens.inc(event.num_tokens_lost)
                case Routed():
                    self._route(event)
                case _:
                    pass
        for admission in changes.admitted:
            self._prefix_queries.inc(admission.num_tokens)
            self._prefix_hits.inc(admission.num_cached_tokens)
        self._count_tokens(changes)
        for terms, part in changes.finished:
            self._finish(terms, part)
        for terms, causes in changes.waits:
            self.count_wait(terms, causes)

    def observe_params(self, params: SamplingParams) -> None:
        """Record the sampling parameters of an accepted request; events do not carry them."""
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)

    def count_refusal(self, reason: str) -> None:
        """Count a refused request; called by who answers it, not for the event Refused."""
        self._refused.labels(**self._labels, reason=reason).inc()
        for listener in self.refusal_listeners:
            listener(reason)

    def count_restart(self, reason: str, num_resubmitted: int) -> None:
        """Count an engine restart and the requests resent."""
        self._restarts.labels(**self._labels, reason=reason).inc()
        self._set_idle(0)  # the new engine starts empty
        self._resubmitted.inc(num_resubmitted)

    def count_wait(self, terms: Terms, causes: Sequence[CauseShare]) -> None:
        """Add the seconds of a finished wait, by cause."""
        self._by_tenant.count_wait(terms, causes)

    def watch_ledger(self, writer: LedgerWriter) -> None:
        """Export the state of the ledger writer."""
        self._by_tenant.watch_ledger(writer)

    def watch_spans(self, exporter: SpanExporter) -> None:
        """Export the state of the span exporter."""
        self._gauge(
            "headway_otlp_requests_pending", "Ended requests whose spans are not sent yet."
        ).set_function(lambda: exporter.num_pending)
        self._gauge(
            "headway_otlp_requests_dropped", "Ended requests whose spans were dropped."
        ).set_function(lambda: exporter.num_dropped)
        self._gauge(
            "headway_otlp_failing", "1 while the receiver of spans cannot be reached."
        ).set_function(lambda: float(exporter.is_failing))

    def watch_need(self, read: Callable[[], float]) -> None:
        """Export how many engines the work of this frontend needs; read at each scrape."""
        self._gauge(
            "headway_fleet_desired_replicas",
            "Engines that the work of this frontend needs; the sum over frontends, rounded up.",
        ).set_function(read)

    def watch_ttft(self, read: Callable[[], float]) -> None:
        """Export the TTFT of a request that would arrive now; read at each scrape."""
        self._expected_ttft.set_function(read)

    def describe_cache(self, num_blocks: int, block_size: int) -> None:
        """Export the size of the KV cache."""
        labels = {**self._labels, "block_size": block_size, "num_gpu_blocks": num_blocks}
        self._cache_config.labels(**labels).set(1)
        self._blocks_total.set(num_blocks)

    def describe_engines(self, engines: list[EngineState]) -> None:
        """Export the state of each engine of a fleet."""
        self._by_engine.describe(engines)

    def render(self) -> bytes:
        """Return the text of a scrape."""
        return generate_latest(self.registry)

    # ------------------------------------------------------------------ events

    def _count_tokens(self, changes: Changes) -> None:
        self._generation_tokens.inc(changes.num_output_tokens)
        for part in changes.first_tokens:
            _observe(self._ttft, part.ttft_s)
            self._by_engine.observe_ttft(part.id, part.ttft_s)
            self._prompt_tokens.inc(0 if part.is_fork else part.num_prompt_tokens)
        for gap_s in changes.token_gaps_s:
            self._token_gap.observe(gap_s)

    def _finish(self, terms: Terms, part: RequestPart) -> None:
        self._by_tenant.finish(terms, part)
        self._by_engine.forget(part.id)
        if part.reason is FinishReason.ABORT:
            self._aborted.inc()
        self._finished.labels(**self._labels, finished_reason=str(part.reason)).inc()
        self._request_prompt_tokens.observe(part.num_prompt_tokens)
        self._request_generation_tokens.observe(part.num_output_tokens)
        _observe(self._e2e, part.e2e_s)
        _observe(self._queue_time, part.first_wait_s)
        _observe(self._prefill_time, part.prefill_s)
        _observe(self._decode_time, part.decode_s)
        _observe(self._time_per_output_token, part.tpot_s)

    def _step(self, event: Stepped) -> None:
        occupancy = event.num_scheduled / event.max_num_seqs
        fill = event.num_tokens / event.token_budget
        self._running.set(event.num_running)
        self._waiting.set(event.num_waiting)
        self._blocks_used.set(event.num_blocks_used)
        self._num_blocks = event.num_blocks
        self._blocks_total.set(event.num_blocks)
        self._kv_usage.set(event.num_blocks_used / event.num_blocks)
        self._occupancy.set(occupancy)
        self._fill.set(fill)
        self._steps.inc()
        self._occupancy_sum.inc(occupancy)
        self._fill_sum.inc(fill)
        self._step_tokens.observe(event.num_tokens)
        if event.forecast is not None:
            self._by_tenant.set_model_error(event.forecast.speed.cost.error)
        if not event.num_running:
            self._set_idle_shares()

    def _route(self, event: Routed) -> None:
        self._routed.labels(**self._labels, reason=event.reason).inc()
        self._expected_hits.inc(event.num_cached_tokens)
        self._router_wait.observe(event.waited_s)
        self._by_engine.route(event)

    def _set_idle(self, num_blocks_used: int) -> None:
        self._running.set(0)
        self._waiting.set(0)
        self._blocks_used.set(num_blocks_used)
        self._kv_usage.set(num_blocks_used / self._num_blocks)
        self._by_tenant.clear_service_gap()
        self._set_idle_shares()

    def _set_idle_shares(self) -> None:
        # These describe a step, so without a running step they must be 0.
        self._occupancy.set(0)
        self._fill.set(0)

    # ------------------------------------------------------------------- names

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._plain(Gauge, name, text)

    def _counter(self, name: str, text: str) -> Counter:
        return self._plain(Counter, name, text)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return self._plain(Histogram, name, text, buckets=tuple(buckets))

    def _plain(self, kind: Any, name: str, text: str, **options: Any) -> Any:
        """Return a metric that has only the common labels."""
        metric = kind(name, text, list(self._labels), registry=self.registry, **options)
        return metric.labels(**self._labels)

    def _make_gauges(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running set.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests in the waiting queue.")
        self._kv_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1."
        )
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "KV cache configuration, as labels.",
            [*self._labels, "block_size", "num_gpu_blocks"],
            registry=self.registry,
        )
        self._occupancy = self._gauge(
            "headway_slot_occupancy", "Sequences in the last step over max_num_seqs."
        )
        self._fill = self._gauge(
            "headway_token_budget_fill", "Tokens in the last step over the token budget."
        )
        self._expected_ttft = self._gauge(
            "headway_expected_ttft_seconds",
            "Predicted TTFT of a typical request that would arrive now, behind all that wait.",
        )
        self._blocks_used = self._gauge("headway_kv_blocks_used", "KV cache blocks in use.")
        self._blocks_total = self._gauge("headway_kv_blocks_total", "Total KV cache blocks.")

    def _make_counters(self) -> None:
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._num_preemptions = self._counter("vllm:num_preemptions", "Requests preempted.")
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of finished prefills."
        )
        self._generation_tokens = self._counter("vllm:generation_tokens", "Output tokens.")
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests, by finish reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._steps = self._counter("headway_steps", "Steps run.")
        self._occupancy_sum = self._counter(
            "headway_slot_occupancy_sum", "Sum of headway_slot_occupancy over steps."
        )
        self._fill_sum = self._counter(
            "headway_token_budget_fill_sum", "Sum of headway_token_budget_fill over steps."
        )
        self._discarded_tokens = self._counter(
            "headway_preempted_tokens_discarded", "Computed tokens lost to preemption."
        )
        self._restarts = Counter(
            "headway_engine_restarts",
            "Engine restarts, by reason.",
            [*self._labels, "reason"],
            registry=self.registry,
        )
        self._resubmitted = self._counter(
            "headway_requests_resubmitted", "Requests resent to a new engine process."
        )
        self._arrived = self._counter(
            "headway_prompts_arrived", "Prompts accepted into the waiting queue."
        )
        self._aborted = self._counter(
            "headway_requests_aborted", "Requests aborted by their client."
        )
        self._refused = Counter(
            "headway_requests_refused",
            "Requests refused, by reason.",
            [*self._labels, "reason"],
            registry=self.registry,
        )

        self._routed = Counter(
            "headway_requests_routed",
            "Requests sent to the engine that the router chose, by reason.",
            [*self._labels, "reason"],
            registry=self.registry,
        )
        self._expected_hits = self._counter(
            "headway_expected_prefix_hits",
            "Prompt tokens that the router expected in the prefix cache of their engine.",
        )

    def _make_histograms(self) -> None:
        self._router_wait = self._histogram(
            "headway_router_wait_seconds", "Time in the router, in seconds.", TTFT_BUCKETS
        )
        self._step_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens per step.", STEP_TOKEN_BUCKETS
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time from arrival to the first token, in seconds.",
            TTFT_BUCKETS,
        )
        self._token_gap = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Time between two output tokens, in seconds.",
            TOKEN_GAP_BUCKETS,
        )
        self._time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token of a request, in seconds.",
            TOKEN_GAP_BUCKETS,
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Time from arrival to the end, in seconds.",
            LATENCY_BUCKETS,
        )
        self._queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "Time from arrival to admission, in seconds.",
            LATENCY_BUCKETS,
        )
        self._prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds",
            "Time from admission to the first token, in seconds.",
            LATENCY_BUCKETS,
        )
        self._decode_time = self._histogram(
            "vllm:request_decode_time_seconds",
            "Time from the first token to the last, in seconds.",
            LATENCY_BUCKETS,
        )
        self._request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", LENGTH_BUCKETS
        )
        self._request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Output tokens per request.", LENGTH_BUCKETS
        )
        self._params_n = self._histogram(
            "vllm:request_params_n", "Samples (n) per request.", SAMPLE_BUCKETS
        )
        self._params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens per request.", LENGTH_BUCKETS
        )


def _observe(histogram: Histogram, value: float | None) -> None:
    if value is not None:
        histogram.observe(value)
