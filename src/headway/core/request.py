"""One request inside the engine: tokens known, tokens computed, state.

Prefill and decode are not states. A request has tokens known and tokens computed, and each step
computes some of the difference. `Request.set_state` is the only writer of the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from headway.core.kv.prefix import BlockHash, no_hashes
from headway.core.params import SamplingParams
from headway.core.terms import NO_TERMS, Terms


class RequestState(StrEnum):
    """State of a request; TRANSITIONS has the legal changes."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class FailureCause(StrEnum):
    """What made a request fail."""

    ENGINE = "engine"
    GRAMMAR = "grammar"
    """The grammar of the request itself: its client is told."""


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.PREEMPTED, RequestState.FINISHED}),
    RequestState.PREEMPTED: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sample of one prompt; a prompt with n > 1 later forks into n requests.

    `params` are resolved: max_tokens is a number and the stop ids include end-of-sequence ids.
    """

    id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    arrived_at: float
    priority: int = 0
    terms: Terms = NO_TERMS
    index: int = 0
    """Number of the sample within its prompt; part of the key of its random numbers."""
    arrival_order: int = 0
    """Position by arrival, set once by the scheduler and kept through preemption."""
    start_by: float = inf
    """Planned start, before the latest that meets the SLO; inf without one."""
    num_prompt_tokens: int = 0
    num_computed: int = 0
    num_scored: int = 1
    """Prompt tokens whose log-probabilities were emitted, if wanted; the first token has none."""
    num_preemptions: int = 0
    is_aged: bool = False
    """Whether the request has waited `max_wait_s` and goes first."""
    block_hashes: list[BlockHash] = field(default_factory=no_hashes)
    state: RequestState = RequestState.WAITING
    state_since: float = 0.0
    """When the request entered its state; for a resent request, when its wait began."""
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not self.token_ids or self.params.max_tokens is None:
            raise ValueError(f"request {self.id} needs a prompt and resolved params")
        if self.index == 0 and "#" in self.id:
            raise ValueError(f"request id {self.id}: # is reserved for the ids of forked samples")
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.token_ids)
        self.state_since = self.state_since or self.arrived_at

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """The ids of all samples of the prompt, forked or not."""
        if self.params.n == 1:  # nearly every prompt
            return (self.id,)
        return tuple(sample_id(self.id, index) for index in range(self.params.n))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_num_tokens(self) -> int:
        """Prompt tokens and max_tokens."""
        return self.num_prompt_tokens + (self.params.max_tokens or 0)

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities are wanted and were not emitted yet."""
        if self.params.prompt_logprobs is None:
            return 0
        return self.num_prompt_tokens - self.num_scored

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens that may come from the prefix cache.

        A step must compute the last token, to sample from it, and every token before an unscored
        one.
        """
        num_before = len(self.token_ids) - 1
        return min(num_before, self.num_scored - 1) if self.num_unscored else num_before

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def set_state(self, state: RequestState, now: float) -> None:
        """Set the state and the time of the change; raise on an illegal change."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(
                f"request {self.id}: {self.state} -> {state} is not a legal transition"
            )
        self.state = state
        self.state_since = now

    def append(self, token_id: int) -> FinishReason | None:
        """Add an output token; return the finish reason if it ends the request."""
        params = self.params
        self.token_ids.append(token_id)
        num_output = len(self.token_ids) - self.num_prompt_tokens
        if token_id in params.stop_token_ids and num_output >= params.min_tokens:
            return FinishReason.STOP
        if num_output >= (params.max_tokens or 0):
            return FinishReason.LENGTH
        return None

    def extend(self, token_ids: tuple[int, ...]) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Add output tokens until one ends the request; return the reason and the added tokens."""
        for num_added, token_id in enumerate(token_ids, 1):
            reason = self.append(token_id)
            if reason is not None:
                return reason, token_ids[:num_added]
        return None, token_ids

    def fork(self, index: int, now: float) -> Request:
        """Return another sample of the prompt, waiting with the same arrival order."""
        return Request(
            id=sample_id(self.id, index),
            token_ids=self.token_ids[: self.num_prompt_tokens],
            params=replace(self.params, n=1, prompt_logprobs=None),
            seed=self.seed,
            arrived_at=self.arrived_at,
            priority=self.priority,
            terms=self.terms,
            index=index,
            arrival_order=self.arrival_order,
            start_by=self.start_by,
            is_aged=self.is_aged,
            state_since=now,
        )

    def check(self) -> None:
        if not 0 <= self.num_computed <= self.num_tokens:
            raise AssertionError(
                f"{self.id}: num_computed {self.num_computed} of {self.num_tokens} tokens"
            )
        if not 0 < self.num_prompt_tokens <= self.num_tokens:
            raise AssertionError(
                f"{self.id}: num_prompt_tokens {self.num_prompt_tokens} of {self.num_tokens} tokens"
            )
        if not 1 <= self.num_scored <= self.num_prompt_tokens:
            raise AssertionError(
                f"{self.id}: num_scored {self.num_scored} of {self.num_prompt_tokens} tokens"
            )
        if self.num_unscored and self.num_computed >= self.num_scored:
            raise AssertionError(f"{self.id}: a token is computed and its successor not scored")
        if self.num_tokens > self.max_num_tokens:
            raise AssertionError(
                f"{self.id}: {self.num_output_tokens} output tokens exceed max_tokens"
            )
        if self.is_finished != (self.finish_reason is not None):
            raise AssertionError(
                f"{self.id}: state {self.state} with finish reason {self.finish_reason}"
            )


def sample_id(request_id: str, index: int) -> str:
    """Return the id of one sample of a prompt; the first has the id of the prompt."""
    return request_id if index == 0 else f"{request_id}#{index}"
