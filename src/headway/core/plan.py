"""The plan of one step, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core.params import SamplingParams
from headway.core.request import FailureCause, Request

make_tuple = tuple[object, ...].__new__
"""Makes a NamedTuple without its constructor. Used once per running request and step, where it
saves 7 % of the scheduler's time at 256 running requests."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """State of a request that is new to the executor.

    A request resumed after preemption is sent as new, with its output so far in `token_ids`.
    """

    params: SamplingParams
    seed: int
    index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_scored: int = 1
    """Prompt tokens whose log-probabilities were returned before; the first token has none."""

    @property
    def scored_positions(self) -> range:
        """Positions whose logits score the prompt token that follows; empty if not wanted."""
        if self.params.prompt_logprobs is None:
            return range(0)
        return range(self.num_scored - 1, self.num_prompt_tokens - 1)

    @staticmethod
    def of(request: Request) -> NewRequest:
        """Return what the executor must know of a request."""
        token_ids = tuple(request.token_ids)
        params, seed, index = request.params, request.seed, request.index
        num_prompt, num_scored = request.num_prompt_tokens, request.num_scored
        return NewRequest(params, seed, index, token_ids, num_prompt, num_scored)


class ScheduledRequest(NamedTuple):
    """One request in a step: compute `token_ids` from position `start` on.

    `block_ids` are appended to the block table of the request; for a new request they are the whole
    table. If `has_sample`, the next token is sampled from the logits of the last token.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    has_sample: bool
    new: NewRequest | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of a block, for a forked sample that will write into it."""

    source: int
    target: int


class BlockSave(NamedTuple):
    """Copy of a block to a slot of the offload store."""

    block_id: int
    slot_id: int


class BlockLoad(NamedTuple):
    """Copy of a slot to a block, not necessarily the block it was saved from."""

    slot_id: int
    block_id: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, complete in itself.

    Order of effects: drop the state of `released_ids`; apply `copies` (all sources are read before
    any target is written), then `saves`, then `loads`; then run `scheduled`. The same plan may save
    a block and then load or write into it, and may save into a slot and load from it.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    released_ids: tuple[str, ...] = ()
    """Requests finished or preempted since the last plan."""
    num_tokens: int = 0
    num_scored_rows: int = 0
    """Prompt tokens that the logits of this step score."""
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the sampled token and of the likeliest tokens, best first."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of the prompt tokens of one request from position `start` on."""

    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """The last hidden state of a prompt after the final norm, as fp32."""

    values: bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens that a request gained in a step; several only with speculation."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """One request failed in a step; the other requests did not."""

    message: str
    cause: FailureCause = FailureCause.ENGINE


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a plan: one outcome per scheduled request, in the order of the plan.

    The outcome of a request without a sample is None.
    """

    step_id: int
    outcomes: tuple[Sample | Failure | None, ...]
    elapsed_s: float
    copy_s: float = 0.0
    """The part of `elapsed_s` that saves and loads took."""
    prompt_scores: Mapping[str, PromptScores] = field(default_factory=dict[str, PromptScores])
    """By request id, of the requests that did not fail."""
    embeddings: Mapping[str, Embedding] = field(default_factory=dict[str, Embedding])
    """By request id, of the requests that want one and whose prompt is computed."""
