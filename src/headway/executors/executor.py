"""Runs step plans on one model with its KV store.

The executor owns state that must outlive a step: of each running request the block table, the
sampling parameters and what sampling must know of earlier tokens (`tokens_so_far.py`). It decides
nothing: a plan and this state define a step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from headway.clock import Clock
from headway.core.executor import BlockRecorder, Capacity, Ticket
from headway.core.plan import (
    Embedding,
    Failure,
    NewRequest,
    PromptScores,
    Sample,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from headway.executors.grammar import Grammars, MaskThread
from headway.executors.sampling import HiddenRow, Row, SampleRow, ScoreRow
from headway.executors.step_model import RowOutcome, Span, StepModel
from headway.executors.tokens_so_far import TokensSoFar

Outcome = Sample | Failure | None
COPIES_TO_MEASURE = 8
PREPARE, MODEL = "preparation", "model"


@dataclass(slots=True)
class _ExecutorState:
    new: NewRequest
    block_ids: array[int]
    tokens: TokensSoFar


@dataclass(frozen=True, slots=True)
class _ScheduledRow:
    """A checked request: its index in the plan, and what to run."""

    index: int
    request_id: str
    span: Span
    tokens: TokensSoFar
    row: SampleRow | None
    """How to sample the logits of its last token; None without sampling."""
    prompt_rows: tuple[ScoreRow | HiddenRow, ...] = ()
    """For consecutive tokens of the prompt: what is wanted of them."""
    first: int = 0
    """Position of the first of these tokens."""


@dataclass(slots=True)
class _Outcomes:
    """What the requests of a step have come to."""

    samples: list[Outcome]
    prompt_scores: dict[str, PromptScores]
    embeddings: dict[str, Embedding]

    def add_prompt(self, one: _ScheduledRow, found: Sequence[RowOutcome]) -> None:
        """Add what was found of a prompt; a row that failed fails the request."""
        failure = next((row for row in found if isinstance(row, Failure)), None)
        if failure is not None:
            self.samples[one.index] = failure
        elif isinstance(found[0], Embedding):
            self.embeddings[one.request_id] = found[0]
        elif not isinstance(self.samples[one.index], Failure):
            logprobs = tuple(row for row in found if isinstance(row, TokenLogprobs))
            self.prompt_scores[one.request_id] = PromptScores(one.first + 1, logprobs)


class ModelExecutor:
    """An Executor with at most one step in flight, computed on submit."""

    def __init__(self, model: StepModel, max_model_len: int, clock: Clock) -> None:
        self._model = model
        self._grammars: Grammars | None = None
        self._mask_thread = MaskThread()
        self._clock = clock
        self._capacity = Capacity(
            model.num_blocks,
            model.block_size,
            max_model_len,
            model.num_slots,
            self._measure_copy() if model.num_slots else 0.0,
        )
        self._requests: dict[str, _ExecutorState] = {}
        self._seconds = {PREPARE: 0.0, MODEL: 0.0}
        self._pending: StepResult | None = None

    def use_grammars(self, grammars: Grammars) -> None:
        """Take requests with a grammar, which fail without this."""
        self._grammars = grammars

    def capacity(self) -> Capacity:
        return self._capacity

    @property
    def recorder(self) -> BlockRecorder | None:
        """Return the recorder of published blocks; None if none outlive the process."""
        return self._model.recorder

    def submit(self, plan: StepPlan) -> Ticket:
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step_id} has not been collected")
        started_at = self._clock.now()
        copy_s = self._move_blocks(plan)
        found = self._run(plan)
        elapsed_s = self._clock.now() - started_at
        self._pending = StepResult(
            plan.step_id,
            tuple(found.samples),
            elapsed_s,
            copy_s,
            found.prompt_scores,
            found.embeddings,
        )
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._pending
        if result is None or result.step_id != ticket.step_id:
            raise RuntimeError(f"step {ticket.step_id} is not in flight")
        self._pending = None
        return result

    def close(self) -> None:
        self._mask_thread.close()
        self._requests.clear()
        self._pending = None

    def profile(self) -> dict[str, float]:
        """Return seconds by part since the last call.

        The parts of the model, if it reports any, replace the total of the model.
        """
        seconds = dict(self._seconds)
        self._seconds = dict.fromkeys(seconds, 0.0)
        if parts := self._model.profile():
            seconds[MODEL] -= sum(parts.values())
            seconds["calling the model"] = seconds.pop(MODEL)
        return parts | seconds

    def _measure_copy(self) -> float:
        """Return the seconds to offload or load one block; both stores are empty yet."""
        count = min(COPIES_TO_MEASURE, self._model.num_slots, self._model.num_blocks)
        ids = range(count)
        taken: list[float] = []
        for _ in range(3):  # the first round also pays for page faults
            started_at = self._clock.now()
            self._model.save(ids, ids)
            self._model.load(ids, ids)
            taken.append((self._clock.now() - started_at) / (2 * count))
        return min(taken)

    def _move_blocks(self, plan: StepPlan) -> float:
        """Run copies, saves and loads in this order; return the seconds of saves and loads."""
        if plan.copies:
            sources = [copy.source for copy in plan.copies]
            self._model.copy(sources, [copy.target for copy in plan.copies])
        if not plan.saves and not plan.loads:
            return 0.0
        started_at = self._clock.now()
        if plan.saves:
            block_ids, slot_ids = zip(*plan.saves, strict=True)
            self._model.save(block_ids, slot_ids)
        if plan.loads:
            slot_ids, block_ids = zip(*plan.loads, strict=True)
            self._model.load(slot_ids, block_ids)
        return self._clock.now() - started_at

    def _run(self, plan: StepPlan) -> _Outcomes:
        for request_id in plan.released_ids:
            self._requests.pop(request_id, None)
        outcomes = _Outcomes([None] * len(plan.scheduled), {}, {})
        scheduled_rows: list[_ScheduledRow] = []
        started_at = self._clock.now()
        for index, scheduled in enumerate(plan.scheduled):
            try:
                scheduled_rows.append(self._prepare(index, scheduled))
            except Exception as error:  # an error of one request must not fail the others
                outcomes.samples[index] = Failure(f"request {scheduled.request_id}: {error}")
        self._seconds[PREPARE] += self._clock.now() - started_at
        if scheduled_rows:
            self._compute(scheduled_rows, outcomes)
        return outcomes

    def _compute(self, scheduled_rows: Sequence[_ScheduledRow], outcomes: _Outcomes) -> None:
        """Run the model, and record what became of each request."""
        sampled: list[_ScheduledRow] = []
        prompts: list[_ScheduledRow] = []
        rows: list[Row] = []
        places: list[int] = []
        prompt_places: list[int] = []
        end = 0
        for scheduled_row in scheduled_rows:
            span = scheduled_row.span
            if scheduled_row.prompt_rows:
                prompts.append(scheduled_row)
                first = end + scheduled_row.first - span.start
                prompt_places += range(first, first + len(scheduled_row.prompt_rows))
            end += len(span.token_ids)
            if scheduled_row.row is not None:
                sampled.append(scheduled_row)
                rows.append(scheduled_row.row)
                places.append(end - 1)
        for scheduled_row in prompts:
            rows += scheduled_row.prompt_rows
        places += prompt_places
        started_at = self._clock.now()
        spans = [scheduled_row.span for scheduled_row in scheduled_rows]
        masks = self._mask_thread.start([one.tokens.grammar for one in sampled])
        found = self._model.sample(spans, places, rows, masks)
        self._seconds[MODEL] += self._clock.now() - started_at
        for one, outcome in zip(sampled, found, strict=False):
            if isinstance(outcome, Sample | Failure):
                outcomes.samples[one.index] = one.tokens.failure or outcome
        at = len(sampled)
        for one in prompts:
            outcomes.add_prompt(one, found[at : at + len(one.prompt_rows)])
            at += len(one.prompt_rows)

    def _prepare(self, index: int, scheduled: ScheduledRequest) -> _ScheduledRow:
        """Check a request, then update its state to this plan."""
        state = self._state_of(scheduled)
        self._check(scheduled, len(state.block_ids) + len(scheduled.block_ids))
        state.block_ids.extend(scheduled.block_ids)
        self._requests[scheduled.request_id] = state
        span = Span(scheduled.token_ids, scheduled.start, state.block_ids)
        state.tokens.catch_up(span)
        row = state.tokens.row(span.end) if scheduled.has_sample else None
        request_id, params = scheduled.request_id, state.new.params
        if params.prompt_logprobs is None and not params.is_embedding:
            return _ScheduledRow(index, request_id, span, state.tokens, row)
        prompt_rows, first = _prompt_rows(state.new, span)
        return _ScheduledRow(index, request_id, span, state.tokens, row, prompt_rows, first)

    def _state_of(self, scheduled: ScheduledRequest) -> _ExecutorState:
        new = scheduled.new
        if new is None:
            if scheduled.request_id not in self._requests:
                raise ValueError("the request was never sent as new, or has been released")
            return self._requests[scheduled.request_id]
        tokens = TokensSoFar(new, self._model.spec.vocab_size, self._grammars)
        return _ExecutorState(new, array("i"), tokens)

    def _check(self, scheduled: ScheduledRequest, num_blocks: int) -> None:
        """Refuse a request that would index outside a tensor and fail the whole step."""
        token_ids, new_blocks = scheduled.token_ids, scheduled.block_ids
        if not token_ids or scheduled.start < 0:
            raise ValueError(f"{len(token_ids)} tokens from position {scheduled.start}")
        end = scheduled.start + len(token_ids)
        limit = min(num_blocks * self._capacity.block_size, self._capacity.max_model_len)
        if end > limit:
            raise ValueError(f"{end} tokens do not fit: its blocks and the model hold {limit}")
        if min(token_ids) < 0 or max(token_ids) >= self._model.spec.vocab_size:
            raise ValueError("a token id is outside the vocabulary")
        if new_blocks and not 0 <= min(new_blocks) <= max(new_blocks) < self._capacity.num_blocks:
            raise ValueError("a block id is outside the KV store")


def _prompt_rows(new: NewRequest, span: Span) -> tuple[tuple[ScoreRow | HiddenRow, ...], int]:
    """Return what is wanted of tokens of a prompt in a span, and the position of the first."""
    if new.params.is_embedding:
        is_last = span.end == len(new.token_ids)
        return ((HiddenRow(),) if is_last else ()), span.end - 1
    scored = new.scored_positions
    first, end = max(span.start, scored.start), min(span.end, scored.stop)
    next_ids = new.token_ids[first + 1 : end + 1]
    return tuple(ScoreRow(next_id, new.params.prompt_logprobs or 0) for next_id in next_ids), first
