"""Records of a benchmark run, and figures from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.bench.steal import Steal


@dataclass(slots=True)
class RequestRecord:
    """Times of one request of a workload."""

    index: int
    arrived_at: float
    first_token_at: float | None = None
    finished_at: float | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Duration of one step, and what it computed."""

    elapsed_s: float
    num_tokens: int
    num_padding: int
    """Tokens of num_tokens that were padding or rows of finished requests."""
    num_live_rows: int
    """Requests that still needed the result of the step."""


@dataclass(slots=True)
class RunRecord:
    """One run of a workload."""

    max_num_seqs: int
    requests: list[RequestRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    num_preemptions: int = 0
    elapsed_s: float = 0.0
    steal: Steal | None = None

    @property
    def num_output_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.elapsed_s

    @property
    def slot_occupancy(self) -> float:
        """Share of the row time spent on live requests."""
        seq_s = self.max_num_seqs * sum(step.elapsed_s for step in self.steps)
        return sum(step.num_live_rows * step.elapsed_s for step in self.steps) / seq_s

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that were padding or of finished requests."""
        return sum(step.num_padding for step in self.steps) / sum(
            step.num_tokens for step in self.steps
        )

    @property
    def executor_share(self) -> float:
        """Share of the wall time spent in the executor."""
        return sum(step.elapsed_s for step in self.steps) / self.elapsed_s

    def ttft_s(self) -> list[float]:
        return [
            request.first_token_at - request.arrived_at
            for request in self.requests
            if request.first_token_at is not None
        ]

    def e2e_s(self) -> list[float]:
        return [
            request.finished_at - request.arrived_at
            for request in self.requests
            if request.finished_at is not None
        ]
