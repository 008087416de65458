"""Static and dynamic batching on the same executor, to be measured against.

A batch starts together, is padded to its longest prompt, and ends together: every row is
computed until the longest output is done. The padding and the rows of finished requests go
through the model like any other; their tokens are thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.bench.records import RequestRecord, RunRecord, StepRecord
from headway.clock import Clock
from headway.core.executor import Executor
from headway.core.params import SamplingParams
from headway.core.plan import NewRequest, Sample, ScheduledRequest, StepPlan, StepResult
from headway.errors import ConfigError
from headway.workload import WorkItem

PADDING_TOKEN_ID = 0


@dataclass(slots=True, eq=False)
class _Row:
    """One request of a batch and what it has made so far."""

    id: str
    item: WorkItem
    record: RequestRecord
    block_ids: tuple[int, ...]
    num_padding: int
    output: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.output) >= self.item.num_output_tokens


class StaticBatcher:
    """Runs a workload in batches of `batch_size`.

    With `window_s`, a batch also starts when its first request has waited that long (dynamic
    batching); without, only when it is full or nothing more will come (static batching).
    """

    def __init__(
        self, executor: Executor, clock: Clock, batch_size: int, window_s: float | None = None
    ) -> None:
        self._executor = executor
        self._clock = clock
        self._batch_size = batch_size
        self._window_s = window_s
        self._step_id = 0
        self._released_ids: tuple[str, ...] = ()
        self._run = RunRecord(batch_size)

    def run(self, items: Sequence[WorkItem]) -> RunRecord:
        """Run everything; arrival times count from the start of the call."""
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
        """Wait until a batch may start, and take it from the front."""
        candidates = waiting[: self._batch_size]
        ready_at = candidates[-1].arrived_at
        if self._window_s is not None:
            ready_at = min(ready_at, candidates[0].arrived_at + self._window_s)
        while (now := self._clock.now()) < ready_at:
            time.sleep(ready_at - now)
        return [record for record in candidates if record.arrived_at <= now]

    def _run_batch(self, items: list[WorkItem], records: list[RequestRecord]) -> None:
        rows = self._allocate(items, records)
        num_padding = sum(row.num_padding for row in rows)
        self._step(rows, tuple(self._prefill(row) for row in rows), num_padding)
        while not all(row.is_finished for row in rows):
            num_finished = sum(row.is_finished for row in rows)
            self._step(rows, tuple(self._decode(row) for row in rows), num_finished)
        now = self._clock.now()
        for row in rows:  # a static batch hands back its results together
            row.record.finished_at = now
            row.record.token_ids = row.output[: row.item.num_output_tokens]
        self._released_ids = tuple(row.id for row in rows)

    def _allocate(self, items: list[WorkItem], records: list[RequestRecord]) -> list[_Row]:
        """Room for the longest prompt and the longest output, for every row alike."""
        capacity = self._executor.capacity()
        longest_prompt = max(len(item.prompt_token_ids) for item in items)
        longest_output = max(item.num_output_tokens for item in items)
        per_row = -(-(longest_prompt + longest_output) // capacity.block_size)
        if per_row * len(items) > capacity.num_blocks:
            raise ConfigError(
                f"a static batch of {len(items)} needs {per_row * len(items)} KV blocks; the cache "
                f"has {capacity.num_blocks}: raise --kv-cache-memory-bytes"
            )
        return [
            _Row(
                f"static-{record.index}",
                item,
                record,
                tuple(range(place * per_row, (place + 1) * per_row)),
                longest_prompt - len(item.prompt_token_ids),
            )
            for place, (item, record) in enumerate(zip(items, records, strict=True))
        ]

    def _prefill(self, row: _Row) -> ScheduledRequest:
        prompt = row.item.prompt_token_ids
        params = SamplingParams(temperature=0.0, max_tokens=row.item.num_output_tokens)
        return ScheduledRequest(
            request_id=row.id,
            start=0,
            token_ids=(PADDING_TOKEN_ID,) * row.num_padding + prompt,
            block_ids=row.block_ids,
            has_sample=True,
            new=NewRequest(params, 0, 0, prompt, len(prompt)),
            num_padding=row.num_padding,
        )

    def _decode(self, row: _Row) -> ScheduledRequest:
        start = row.num_padding + len(row.item.prompt_token_ids) + len(row.output) - 1
        last = (row.output[-1],)
        return ScheduledRequest(row.id, start, last, (), True, num_padding=row.num_padding)

    def _step(
        self, rows: list[_Row], scheduled: tuple[ScheduledRequest, ...], num_padding: int
    ) -> None:
        self._step_id += 1
        num_live = sum(not row.is_finished for row in rows)
        num_tokens = sum(len(item.token_ids) for item in scheduled)
        plan = StepPlan(self._step_id, scheduled, (), self._released_ids, num_tokens, num_padding)
        self._released_ids = ()
        result = self._executor.collect(self._executor.submit(plan))
        now = self._clock.now()
        self._take_in(rows, result, now)
        self._run.steps.append(StepRecord(result.elapsed_s, num_tokens, num_padding, num_live))

    def _take_in(self, rows: list[_Row], result: StepResult, now: float) -> None:
        for row, outcome in zip(rows, result.outcomes, strict=True):
            if not isinstance(outcome, Sample):
                raise RuntimeError(f"row {row.id} sampled nothing: {outcome}")
            row.output.extend(outcome.token_ids)
            if row.record.first_token_at is None:
                row.record.first_token_at = now
