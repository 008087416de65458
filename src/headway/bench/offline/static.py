"""Static and dynamic batching on the same executor, as a baseline.

A batch starts together, is padded to its longest prompt, and ends together: every row is computed
until the longest output is complete. The padding of a row is a prompt of its own, scheduled beside
the row, that samples nothing. The executor computes padding like any other prompt. Outputs of
finished rows are discarded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.bench.options import GREEDY, SamplingOptions
from headway.bench.records import RequestRecord, RunRecord, StepRecord
from headway.clock import Clock
from headway.core.executor import Executor
from headway.core.plan import NewRequest, Sample, ScheduledRequest, StepPlan, StepResult
from headway.errors import ConfigError
from headway.workload import WorkItem

PADDING_TOKEN_ID = 0


@dataclass(slots=True, eq=False)
class _BatchRow:
    """One request of a batch and its output so far."""

    id: str
    item: WorkItem
    record: RequestRecord
    block_ids: tuple[int, ...]
    padding: ScheduledRequest | None
    """Padding up to the longest prompt of the batch."""
    output: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.output) >= self.item.num_output_tokens


class StaticBatcher:
    """Runs a workload in batches of `batch_size`.

    With `window_s`, a batch also starts when its first request has waited that long (dynamic
    batching); without, only when the batch is full or no more requests will arrive (static
    batching).
    """

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        batch_size: int,
        window_s: float | None = None,
        sampling: SamplingOptions = GREEDY,
        seed: int = 0,
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._batch_size = batch_size
        self._window_s = window_s
        self._sampling = sampling
        self._seed = seed
        self._step_id = 0
        self._released_ids: tuple[str, ...] = ()
        self._run = RunRecord(batch_size)

    def run(self, items: Sequence[WorkItem]) -> RunRecord:
        """Run the workload; arrival times count from the start of the call."""
        self._run = RunRecord(self._batch_size)
        started_at = self._clock.now()
        waiting = [RequestRecord(index, started_at + item.at) for index, item in enumerate(items)]
        self._run.requests.extend(waiting)
        while waiting:
            batch = self._next_batch(waiting)
            waiting = waiting[len(batch) :]
            self._run_batch([items[record.index] for record in batch], batch)
        self._run.elapsed_s = self._clock.now() - started_at
        return self._run

    def _next_batch(self, waiting: list[RequestRecord]) -> list[RequestRecord]:
        """Wait until a batch may start, and remove it from the queue."""
        candidates = waiting[: self._batch_size]
        ready_at = candidates[-1].arrived_at
        if self._window_s is not None:
            ready_at = min(ready_at, candidates[0].arrived_at + self._window_s)
        while (now := self._clock.now()) < ready_at:
            time.sleep(ready_at - now)
        return [record for record in candidates if record.arrived_at <= now]

    def _run_batch(self, items: list[WorkItem], records: list[RequestRecord]) -> None:
        rows = self._allocate(items, records)
        padding = tuple(row.padding for row in rows if row.padding is not None)
        num_padding = sum(len(item.token_ids) for item in padding)
        self._step(rows, (*(self._prefill(row) for row in rows), *padding), num_padding)
        while not all(row.is_finished for row in rows):
            num_finished = sum(row.is_finished for row in rows)
            self._step(rows, tuple(self._decode(row) for row in rows), num_finished)
        now = self._clock.now()
        for row in rows:  # a static batch returns its results together
            row.record.finished_at = now
            row.record.token_ids = row.output[: row.item.num_output_tokens]
        self._released_ids = (
            *(row.id for row in rows),
            *(item.request_id for item in padding),
        )

    def _allocate(self, items: list[WorkItem], records: list[RequestRecord]) -> list[_BatchRow]:
        """Allocate blocks for the longest prompt and output, for every row."""
        capacity = self._executor.capacity()
        longest_prompt = max(len(item.prompt_token_ids) for item in items)
        longest_output = max(item.num_output_tokens for item in items)
        num_used = 0

        def take_blocks(num_tokens: int) -> tuple[int, ...]:
            nonlocal num_used
            first, num_used = num_used, num_used - (-num_tokens // capacity.block_size)
            return tuple(range(first, num_used))

        rows: list[_BatchRow] = []
        for item, record in zip(items, records, strict=True):
            row_id, num_tokens = f"static-{record.index}", len(item.prompt_token_ids)
            block_ids = take_blocks(num_tokens + longest_output)
            num_padding = longest_prompt - num_tokens
            padding = _padding(row_id, num_padding, take_blocks(num_padding))
            rows.append(_BatchRow(row_id, item, record, block_ids, padding))
        if num_used > capacity.num_blocks:
            raise ConfigError(
                f"a static batch of {len(items)} needs {num_used} KV blocks; the cache "
                f"has {capacity.num_blocks}: raise --kv-cache-memory-bytes"
            )
        return rows

    def _prefill(self, row: _BatchRow) -> ScheduledRequest:
        prompt = row.item.prompt_token_ids
        params = self._sampling.sampling_params(row.item.num_output_tokens)
        seed = self._seed + row.record.index
        return ScheduledRequest(
            request_id=row.id,
            start=0,
            token_ids=prompt,
            block_ids=row.block_ids,
            has_sample=True,
            new=NewRequest(params, seed, 0, prompt, len(prompt)),
        )

    def _decode(self, row: _BatchRow) -> ScheduledRequest:
        start = len(row.item.prompt_token_ids) + len(row.output) - 1
        return ScheduledRequest(row.id, start, (row.output[-1],), (), True)

    def _step(
        self, rows: list[_BatchRow], scheduled: tuple[ScheduledRequest, ...], num_padding: int
    ) -> None:
        self._step_id += 1
        num_live = sum(not row.is_finished for row in rows)
        num_tokens = sum(len(item.token_ids) for item in scheduled)
        plan = StepPlan(self._step_id, scheduled, (), self._released_ids, num_tokens)
        self._released_ids = ()
        result = self._executor.collect(self._executor.submit(plan))
        now = self._clock.now()
        self._consume(rows, result, now)
        self._run.steps.append(StepRecord(result.elapsed_s, num_tokens, num_padding, num_live))

    def _consume(self, rows: list[_BatchRow], result: StepResult, now: float) -> None:
        # Every plan lists the rows before their padding.
        for row, outcome in zip(rows, result.outcomes[: len(rows)], strict=True):
            if not isinstance(outcome, Sample):
                raise RuntimeError(f"row {row.id} sampled nothing: {outcome}")
            row.output.extend(outcome.token_ids)
            if row.record.first_token_at is None:
                row.record.first_token_at = now


def _padding(row_id: str, num_tokens: int, block_ids: tuple[int, ...]) -> ScheduledRequest | None:
    """Return a padding prompt that samples nothing; None if the row needs none."""
    if not num_tokens:
        return None
    token_ids = (PADDING_TOKEN_ID,) * num_tokens
    new = NewRequest(GREEDY.sampling_params(), 0, 0, token_ids, num_tokens)
    return ScheduledRequest(f"{row_id}-padding", 0, token_ids, block_ids, False, new)
