"""Records of the requests of a run: arrival, first token, end."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.slo.targets import met
from headway.core.terms import Terms
from headway.sim.steps import STOP_TOKEN


@dataclass(slots=True)
class Record:
    """One request from its arrival to its end."""

    id: str
    arrived_at: float
    num_prompt: int
    num_output: int
    max_tokens: int
    terms: Terms
    priority: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None
    is_refused: bool = False
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_at is None or self.finished_at is None or self.num_output < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_at is None else self.finished_at - self.arrived_at

    @property
    def is_good(self) -> bool:
        """Whether the request finished within every target."""
        is_met = met(self.terms.targets, self.ttft_s, self.tpot_s, self.e2e_s)
        return self.finished_at is not None and is_met

    def make_request(self) -> Request:
        return Request(
            id=self.id,
            token_ids=[1] * self.num_prompt,
            params=SamplingParams(max_tokens=self.max_tokens, stop_token_ids=(STOP_TOKEN,)),
            seed=0,
            arrived_at=self.arrived_at,
            priority=self.priority,
            terms=self.terms,
        )
