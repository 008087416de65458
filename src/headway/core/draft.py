"""A step plan under construction."""

from __future__ import annotations

from headway.core.kv.cache import BlockTable
from headway.core.plan import (
    BlockCopy,
    BlockLoad,
    BlockSave,
    NewRequest,
    ScheduledRequest,
    StepPlan,
)
from headway.core.request import Request

MAX_SCORED_ROWS = 256
"""Prompt tokens that one step scores at most: bounds the size of its result."""


class PlanDraft:
    """Requests scheduled so far, and prefills to schedule after the decodes."""

    __slots__ = ("num_scored_rows", "num_tokens", "prefilling", "scheduled")

    def __init__(self) -> None:
        self.scheduled: list[ScheduledRequest] = []
        self.prefilling: list[Request] = []
        self.num_tokens = 0
        """Tokens of the budget in use: a token whose successor is scored takes two, because its
        row of the head costs up to as much as the rest of the model."""
        self.num_scored_rows = 0

    @property
    def has_prefill(self) -> bool:
        """Whether a request has more than one token in the plan."""
        return self.num_tokens > len(self.scheduled)

    def add(self, request: Request, table: BlockTable, limit: int) -> None:
        """Schedule the next tokens of a request, within `limit` tokens for the whole plan.

        The caller has checked that the table has room. Blocks that were not sent to the executor
        are sent with the tokens. Nothing is scheduled if the plan scores no further tokens.
        """
        room = limit - self.num_tokens
        if request.num_unscored:
            room = self._fit_scored(request, room)
            if room == 0:
                return
        block_ids, new = (), None
        if table.num_sent != len(table.block_ids):
            new = NewRequest.of(request) if table.num_sent == 0 else None
            block_ids = table.take_unsent()
        start = request.num_computed
        token_ids = tuple(request.token_ids[start : start + room])
        is_complete = start + len(token_ids) == len(request.token_ids)
        has_sample = is_complete and request.params.max_tokens != 0
        self.scheduled.append(
            ScheduledRequest(request.id, start, token_ids, block_ids, has_sample, new)
        )
        self.num_tokens += len(token_ids)

    def _fit_scored(self, request: Request, room: int) -> int:
        """Return how many tokens of a prompt fit into `room`; count those that are scored."""
        # Tokens computed again after a preemption have their scores.
        num_plain = request.num_scored - 1 - request.num_computed
        if room <= num_plain:
            return room
        num_fit = max(1, (room - num_plain) // 2)
        num_rows = min(request.num_unscored, num_fit, MAX_SCORED_ROWS - self.num_scored_rows)
        self.num_scored_rows += num_rows
        self.num_tokens += num_rows
        # The last token of the prompt has no successor to score.
        is_last = num_rows == request.num_unscored and num_plain + 2 * num_rows < room
        return num_plain + num_rows + is_last

    def build_plan(
        self,
        step_id: int,
        copies: tuple[BlockCopy, ...],
        moves: tuple[tuple[BlockSave, ...], tuple[BlockLoad, ...]],
        released_ids: tuple[str, ...],
    ) -> StepPlan:
        """Return the plan, with the block moves and releases that precede it."""
        saves, loads = moves
        scheduled = tuple(self.scheduled)
        num_tokens = self.num_tokens - self.num_scored_rows
        return StepPlan(
            step_id,
            scheduled,
            copies,
            released_ids,
            num_tokens,
            self.num_scored_rows,
            saves,
            loads,
        )
