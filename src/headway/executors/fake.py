"""An executor without tensors, for tests and demos.

It stores token ids where a real executor stores keys and values, and derives each next token from
what it reads back through the block table. A block that is freed too early, shared wrongly or
copied wrongly changes the output, as in a real model.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

from headway.core.executor import Capacity, Ticket
from headway.core.plan import (
    Embedding,
    NewRequest,
    PromptScores,
    Sample,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

VOCAB_SIZE = 1000
HIDDEN_SIZE = 8


def next_token(token_ids: Sequence[int], seed: int, index: int) -> int:
    """Return the next token; depends on the whole context, the seed and the index."""
    return crc32(array("q", (seed, index, *token_ids)).tobytes()) % VOCAB_SIZE


def score_of(token_ids: Sequence[int], next_id: int, num_top: int = 0) -> TokenLogprobs:
    """Return a score of the next token of a prompt; depends on the whole context."""
    rank = 1 + next_token(token_ids, next_id, 0)
    top_ids = tuple(range(num_top))
    return TokenLogprobs(
        -rank / VOCAB_SIZE, rank, top_ids, tuple(-at / VOCAB_SIZE for at in top_ids)
    )


def embedding_of(token_ids: Sequence[int]) -> Embedding:
    """Return an embedding of `HIDDEN_SIZE` numbers; depends on the whole context."""
    values = [1.0 + next_token(token_ids, seed, 0) for seed in range(HIDDEN_SIZE)]
    return Embedding(array("f", values).tobytes())


class FakeExecutor:
    """Computes a plan at once; every step reports `step_s` seconds."""

    def __init__(self, capacity: Capacity, step_s: float = 0.001) -> None:
        self._capacity = capacity
        self._step_s = step_s
        self._blocks = [[-1] * capacity.block_size for _ in range(capacity.num_blocks)]
        self._slots = [[-1] * capacity.block_size for _ in range(capacity.num_slots)]
        self._tables: dict[str, list[int]] = {}
        self._requests: dict[str, NewRequest] = {}
        self._results: dict[int, StepResult] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> Ticket:
        for request_id in plan.released_ids:
            self._tables.pop(request_id, None)
            self._requests.pop(request_id, None)
        contents = [list(self._blocks[copy.source]) for copy in plan.copies]
        for copy, content in zip(plan.copies, contents, strict=True):
            self._blocks[copy.target] = content
        for save in plan.saves:
            self._slots[save.slot_id] = list(self._blocks[save.block_id])
        for load in plan.loads:
            self._blocks[load.block_id] = list(self._slots[load.slot_id])
        for item in plan.scheduled:
            self._write(item)
        outcomes = tuple(self._sample(item) for item in plan.scheduled)
        found = {item.request_id: self._score(item) for item in plan.scheduled}
        scores = {name: one for name, one in found.items() if one is not None}
        embedded = [item for item in plan.scheduled if self._is_embedded(item)]
        embeddings = {item.request_id: embedding_of(self._read(item)) for item in embedded}
        self._results[plan.step_id] = StepResult(
            plan.step_id,
            outcomes,
            self._step_s,
            prompt_scores=scores,
            embeddings=embeddings,
        )
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket.step_id)

    def close(self) -> None:
        self._tables.clear()

    def _write(self, item: ScheduledRequest) -> None:
        if item.new is not None:
            self._requests[item.request_id] = item.new
            self._tables[item.request_id] = []
        table = self._tables[item.request_id]
        table.extend(item.block_ids)
        size = self._capacity.block_size
        for position, token_id in enumerate(item.token_ids, start=item.start):
            self._blocks[table[position // size]][position % size] = token_id

    def _sample(self, item: ScheduledRequest) -> Sample | None:
        if not item.has_sample:
            return None
        new = self._requests[item.request_id]
        return Sample((next_token(self._read(item), new.seed, new.index),))

    def _score(self, item: ScheduledRequest) -> PromptScores | None:
        new, end = self._requests[item.request_id], item.start + len(item.token_ids)
        positions = new.scored_positions
        scored = range(max(item.start, positions.start), min(end, positions.stop))
        if not scored:
            return None
        context, num_top = self._read(item), new.params.prompt_logprobs or 0
        logprobs = tuple(
            score_of(context[: at + 1], new.token_ids[at + 1], num_top) for at in scored
        )
        return PromptScores(scored.start + 1, logprobs)

    def _is_embedded(self, item: ScheduledRequest) -> bool:
        new, end = self._requests[item.request_id], item.start + len(item.token_ids)
        return new.params.is_embedding and end == len(new.token_ids)

    def _read(self, item: ScheduledRequest) -> list[int]:
        """Return the tokens of a request as its blocks have them."""
        size, end = self._capacity.block_size, item.start + len(item.token_ids)
        contents: list[int] = []
        for block_id in self._tables[item.request_id][: -(-end // size)]:
            contents += self._blocks[block_id]
        return contents[:end]
