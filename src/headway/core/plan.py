"""What the scheduler asks of the executor for one step, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headway.core.params import SamplingParams
from headway.core.request import Request


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the executor must know of a request it has no state for.

    A request resumed after preemption is sent as new, with its output so far in `token_ids`.
    """

    params: SamplingParams
    seed: int
    index: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @staticmethod
    def of(request: Request) -> NewRequest:
        token_ids = tuple(request.token_ids)
        params, seed, index = request.params, request.seed, request.index
        return NewRequest(params, seed, index, token_ids, request.num_prompt_tokens)


class ScheduledRequest(NamedTuple):
    """One request's share of a step: compute `token_ids` from position `start` on.

    `block_ids` are appended to the request's block table (for a new request: the whole table).
    If `has_sample`, the logits of the last token choose the next one.
    """

    request_id: str
    start: int
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    has_sample: bool
    new: NewRequest | None = None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block's contents: a forked sample gets its own copy of the block it will write."""

    source: int
    target: int


class BlockSave(NamedTuple):
    """Copy a block's contents to a slot of the offload store."""

    block_id: int
    slot_id: int


class BlockLoad(NamedTuple):
    """Copy a slot's contents to a block, not necessarily the one it was saved from."""

    slot_id: int
    block_id: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, complete in itself: executor state plus this plan is all that is needed.

    Order of effects: forget `released_ids`; apply `copies` (all sources are read before any
    target is written), `saves`, `loads`; then run `scheduled`. A block may be saved and be
    loaded or written into by the same plan, and a slot may be saved into and loaded from.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    released_ids: tuple[str, ...] = ()
    """Requests finished or preempted since the last plan: their executor state can go."""
    num_tokens: int = 0
    saves: tuple[BlockSave, ...] = ()
    loads: tuple[BlockLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the most likely ones, best first."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """The tokens a request gained in a step (more than one only with speculation)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """This request's part of the step failed; the others' did not."""

    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan: one outcome per scheduled request, in the plan's order.

    None stands for a request that had nothing to sample.
    """

    step_id: int
    outcomes: tuple[Sample | Failure | None, ...]
    elapsed_s: float
    copy_s: float = 0.0
    """Of elapsed_s, the time of the plan's saves and loads."""
