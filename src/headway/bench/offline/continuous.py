"""Runs a workload through the engine core, with the records of the static modes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headway.bench.options import GREEDY, SamplingOptions
from headway.bench.records import RequestRecord, RunRecord, StepRecord
from headway.clock import Clock
from headway.core.engine import EngineCore
from headway.core.events import Event, Finished, Preempted, Refused, Sink, Stepped, TokensEmitted
from headway.core.request import FinishReason, Request
from headway.errors import ConfigError
from headway.workload import WorkItem


class ContinuousRun:
    """Adds each request at its arrival and steps until all are finished."""

    def __init__(
        self,
        make_core: Callable[[Sink], EngineCore],
        clock: Clock,
        sampling: SamplingOptions = GREEDY,
        seed: int = 0,
    ) -> None:
        self._core = make_core(self._consume)
        self._clock = clock
        self._sampling = sampling
        self._seed = seed
        self._record = RunRecord(self._core.scheduler.config.max_num_seqs)

    def run(self, items: Sequence[WorkItem]) -> RunRecord:
        """Run the workload; arrival times count from the start of the call."""
        started_at = self._clock.now()
        records = self._record.requests
        records.extend(RequestRecord(i, started_at + item.at) for i, item in enumerate(items))
        num_added = 0
        while num_added < len(items) or self._core.has_work:
            while num_added < len(items) and records[num_added].arrived_at <= self._clock.now():
                self._core.add(self._request(num_added, items[num_added]))
                num_added += 1
            if not self._core.step() and num_added < len(items):
                time.sleep(max(0.0, records[num_added].arrived_at - self._clock.now()))
        self._record.elapsed_s = self._clock.now() - started_at
        return self._record

    def _request(self, index: int, item: WorkItem) -> Request:
        return Request(
            id=str(index),
            token_ids=list(item.prompt_token_ids),
            params=self._sampling.sampling_params(item.num_output_tokens),
            seed=self._seed + index,
            arrived_at=self._record.requests[index].arrived_at,
        )

    def _consume(self, events: Sequence[Event]) -> None:
        now = self._clock.now()
        for event in events:
            if isinstance(event, TokensEmitted):
                record = self._record.requests[int(event.request_id)]
                record.token_ids.extend(event.token_ids)
                if record.first_token_at is None:
                    record.first_token_at = now
            elif isinstance(event, Finished):
                if event.reason is not FinishReason.LENGTH:
                    raise RuntimeError(f"request {event.request_id}: {event.reason}")
                self._record.requests[int(event.request_id)].finished_at = now
            elif isinstance(event, Refused):
                raise ConfigError(f"request {event.request_id} of the workload: {event.message}")
            elif isinstance(event, Preempted):
                self._record.num_preemptions += 1
            elif isinstance(event, Stepped):
                # A plan of the scheduler holds tokens of live requests only.
                self._record.steps.append(
                    StepRecord(event.elapsed_s, event.num_tokens, 0, event.num_scheduled)
                )
