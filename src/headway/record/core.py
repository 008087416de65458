"""An engine core whose calls are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from headway.clock import Clock
from headway.core.engine import EngineCore
from headway.core.events import Event, Finished, Forked, Sink, TokensEmitted
from headway.core.executor import BlockRecorder, Capacity, Executor, HashedBlock, Ticket
from headway.core.plan import Sample, StepPlan, StepResult
from headway.core.request import FinishReason, Request
from headway.core.scheduler import Scheduler
from headway.record.encoder import AddCall, BeginCall, EndCall, Fork, RestoreCall
from headway.record.entries import AbortEntry, AddEntry, DamagedEntry, ScoredRange
from headway.record.recording import Recording


class _LastTime:
    """A clock that keeps the time it gave last: that of the call under way."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.last = 0.0

    def now(self) -> float:
        self.last = self._clock.now()
        return self.last


class _RecordedExecutor:
    """Records each plan before it runs, and keeps the last plan and result."""

    def __init__(self, executor: Executor, time: _LastTime, recording: Recording) -> None:
        self._executor = executor
        self._time = time
        self._recording = recording
        self.plan: StepPlan | None = None
        self.result: StepResult | None = None

    def capacity(self) -> Capacity:
        return self._executor.capacity()

    def submit(self, plan: StepPlan) -> Ticket:
        self.plan = plan
        self._recording.put(BeginCall(self._time.last, plan))
        # The thread that writes works while the executor computes, not between two steps.
        self._recording.flush()
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        self.result = self._executor.collect(ticket)
        return self.result

    def close(self) -> None:
        self._executor.close()


class _RecordedBlocks:
    """Records which blocks of an earlier process there are, and which are damaged."""

    def __init__(self, blocks: BlockRecorder, recording: Recording) -> None:
        self._blocks = blocks
        self._recording = recording
        self.record = blocks.record

    def restore(self) -> list[HashedBlock]:
        restored = self._blocks.restore()
        self._recording.put(RestoreCall(restored))
        return restored

    def find_intact(self, blocks: Sequence[HashedBlock]) -> list[HashedBlock]:
        intact = self._blocks.find_intact(blocks)
        if len(intact) < len(blocks):
            intact_ids = {one.block_id for one in intact}
            damaged = [one.block_id for one in blocks if one.block_id not in intact_ids]
            self._recording.put(DamagedEntry(damaged))
        return intact


class RecordedCore(EngineCore):
    """An EngineCore that records its calls; their effects are those of an EngineCore."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        sink: Sink,
        blocks: BlockRecorder | None,
        recording: Recording,
    ) -> None:
        self._recording = recording
        self._time = _LastTime(clock)
        self._steps = _RecordedExecutor(executor, self._time, recording)
        self._emitted: Sequence[Event] = ()
        self._next_sink = sink
        recorded_blocks = None if blocks is None else _RecordedBlocks(blocks, recording)
        super().__init__(scheduler, self._steps, self._time, self._emit, recorded_blocks)

    def _emit(self, events: Sequence[Event]) -> None:
        self._emitted = events
        self._next_sink(events)

    def add(self, request: Request, is_resent: bool = False, waited_s: float | None = None) -> None:
        max_cached_tokens = request.max_cached_tokens
        super().add(request, is_resent, waited_s)
        params = request.params
        entry = AddEntry(
            now=self._time.last,
            id=request.id,
            num_tokens=request.num_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=params.max_tokens or 0,
            arrived_at=request.arrived_at,
            is_refused=request.id not in self.scheduler.requests,
            terms=request.terms,
            priority=request.priority,
            n=params.n,
            index=request.index,
            num_scored=request.num_scored,
            has_prompt_logprobs=params.prompt_logprobs is not None,
            is_embedding=params.is_embedding,
            is_resent=is_resent,
            waited_s=waited_s,
        )
        salt = request.terms.prefix_salt
        self._recording.put(AddCall(entry, request.token_ids, salt, max_cached_tokens))

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        was_live = super().abort(request_id, reason)
        if was_live:
            self._recording.put(AbortEntry(self._time.last, request_id, reason))
        return was_live

    def begin_step(self) -> StepPlan | None:
        plan = super().begin_step()
        if plan is None:
            self._recording.put(BeginCall(self._time.last, None))
            self._recording.flush()
        return plan

    def end_step(self) -> None:
        super().end_step()
        plan, result = self._steps.plan, self._steps.result
        if plan is None or result is None or not self._recording.is_open:
            return
        finished: dict[str, bool] = {}
        forks: list[Fork] = []
        for event in [one for one in self._emitted if type(one) is not TokensEmitted]:
            if isinstance(event, Finished):
                finished[event.request_id] = event.reason is FinishReason.STOP
            elif isinstance(event, Forked):
                token_ids = self.scheduler.requests[event.request_id].token_ids
                forks.append(Fork(event.request_id, event.parent_id, token_ids))
        scores = result.prompt_scores.items()
        # Only token ids: log-probabilities take much memory while calls wait to be written.
        outcomes = [one.token_ids if isinstance(one, Sample) else one for one in result.outcomes]
        self._recording.put(
            EndCall(
                self._time.last,
                plan,
                outcomes,
                result.elapsed_s,
                result.copy_s,
                [ScoredRange(id, one.start, len(one.logprobs)) for id, one in scores],
                list(result.embeddings),
                forks,
                finished,
            )
        )
        if not self.has_work:  # the next step may be far
            self._recording.flush()

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._recording.close()
