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


class PlanDraft:
    """Requests scheduled so far, and prefills to schedule after the decodes."""

    __slots__ = ("num_tokens", "prefilling", "scheduled")

    def __init__(self) -> None:
        self.scheduled: list[ScheduledRequest] = []
        self.prefilling: list[Request] = []
        self.num_tokens = 0

    def add(self, request: Request, table: BlockTable, limit: int) -> None:
        """Schedule the next tokens of a request, within `limit` tokens for the whole plan.

        The caller has checked that the table has room. Blocks that were not sent to the executor
        are sent with the tokens.
        """
        block_ids, new = (), None
        if table.num_sent != len(table.block_ids):
            new = NewRequest.of(request) if table.num_sent == 0 else None
            block_ids = table.take_unsent()
        start = request.num_computed
        token_ids = tuple(request.token_ids[start : start + limit - self.num_tokens])
        has_sample = start + len(token_ids) == len(request.token_ids)
        self.scheduled.append(
            ScheduledRequest(request.id, start, token_ids, block_ids, has_sample, new)
        )
        self.num_tokens += len(token_ids)

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
        return StepPlan(step_id, scheduled, copies, released_ids, self.num_tokens, saves, loads)
