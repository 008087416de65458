"""What a simulated load was served: its requests, its steps and its engines."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class ServedRequest:
    """One request as its client sees it; times are seconds since the start of the load."""

    tenant: str | None
    scheduled_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_at: float | None = None
    finished_at: float | None = None
    num_cached_tokens: int = 0
    refusal_reason: str = ""
    """As in the event Refused; empty if it was not refused."""
    num_preemptions: int = 0

    @property
    def is_refused(self) -> bool:
        return bool(self.refusal_reason)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.scheduled_at

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_at is None else self.finished_at - self.scheduled_at

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_at is None or self.finished_at is None or self.num_output_tokens < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_output_tokens - 1)


@dataclass(slots=True)
class ServedLoad:
    """The requests of one simulated load, how far its steps were measured, and its engines."""

    requests: list[ServedRequest] = field(default_factory=list[ServedRequest])
    num_steps: int = 0
    num_extrapolated: int = 0
    """Steps larger than every step of the profile in some property."""
    num_kills: int = 0
    num_starts: int = 0
    """Engines that were started after the first ones."""
    most_engines: int = 0
    """Most engines at a time, those that start included."""
    engine_s: float = 0.0
    """Seconds of all engines together, from the order to start until they left."""
    span_s: float = 0.0
    """Seconds until the last request ended."""

    @property
    def cost_share(self) -> float:
        """Engine seconds relative to a fixed pool of as many engines as there were at most."""
        return self.engine_s / max(1e-9, self.most_engines * self.span_s)
