"""The API process's view of the engine: submit a prompt, iterate over what comes back.

Owns the streams of live requests. A consumer that stops iterating, for whatever reason, aborts
its request on the way out, so blocks come back within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from headway.clock import Clock
from headway.core.events import Finished, TokensEmitted
from headway.core.params import SamplingParams
from headway.core.request import FinishReason, sample_id
from headway.engine.inputs import draw_seed, resolve_params
from headway.engine.launcher import EngineProcess
from headway.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EventBatch,
    LoadProgress,
    Report,
)
from headway.engine.outputs import RequestMetrics, SampleDelta, sample_streams
from headway.errors import EngineDeadError, EngineError
from headway.text import Tokenizer

logger = logging.getLogger(__name__)


class RequestStream:
    """The deltas of one request on their way to its consumer."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.metrics = RequestMetrics(arrived_at=0.0)
        self.samples = {
            sample_id(request_id, sample.index): sample
            for sample in sample_streams(params, tokenizer, prompt_token_ids)
        }
        self._pending: list[SampleDelta] = []
        self._error: EngineError | None = None
        self._wake = asyncio.Event()

    @property
    def unfinished_ids(self) -> list[str]:
        return [name for name, sample in self.samples.items() if not sample.is_finished]

    @property
    def has_more(self) -> bool:
        """Samples may have ended while the consumer was busy: what they left must be taken too."""
        return bool(self._pending or self.unfinished_ids)

    @property
    def num_output_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples.values())

    def put(self, delta: SampleDelta) -> None:
        self._pending.append(delta)
        self._wake.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._wake.set()

    async def take(self) -> list[SampleDelta]:
        """Everything that arrived since the last call; waits for something."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        pending, self._pending = self._pending, []
        return pending


class AsyncEngine:
    """Many requests, one engine process."""

    def __init__(self, process: EngineProcess, tokenizer: Tokenizer, clock: Clock) -> None:
        self.tokenizer = tokenizer
        self._process = process
        self._clock = clock
        self._streams: dict[str, RequestStream] = {}
        self._owner_of: dict[str, RequestStream] = {}
        self._listeners: list[Callable[[EventBatch], None]] = []
        self._info: EngineInfo | None = None
        self._error: EngineError | None = None
        self._has_failed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineDeadError("the engine is not ready yet")
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._info is not None and self._error is None

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def pid(self) -> int:
        return self._process.pid

    def subscribe(self, listener: Callable[[EventBatch], None]) -> None:
        """Have every batch of events passed to `listener`, which must not block."""
        self._listeners.append(listener)

    async def start(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Wait until the engine has loaded its model."""
        while self._info is None:
            report = await self._process.receive()
            if isinstance(report, EngineReady):
                self._info = report.info
            elif isinstance(report, EngineFailed):
                raise EngineError(report.message)
            elif isinstance(report, LoadProgress) and progress is not None:
                progress(report.num_done, report.num_total)
        self._reader = asyncio.create_task(self._read_reports())

    async def wait_failed(self) -> EngineError:
        """Return once the engine has failed; it does not come back by itself."""
        await self._has_failed.wait()
        return self._error or EngineDeadError("the engine failed")

    def kill(self) -> None:
        """End the engine process without asking; `close` must still follow."""
        self._process.kill()

    async def close(self) -> None:
        """End every stream and the engine process."""
        self._fail_all(EngineDeadError("the server is shutting down"))
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        await self._process.stop()

    async def submit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        tenant: str = "",
    ) -> RequestStream:
        """Check a prompt and send it to the engine; the caller then iterates `deltas`."""
        if self._error is not None:
            raise self._error
        resolved = resolve_params(params, token_ids, self.info, self.tokenizer.eos_token_ids)
        stream = RequestStream(request_id, resolved, self.tokenizer, token_ids)
        stream.metrics.arrived_at = self._clock.now()
        self._streams[request_id] = stream
        self._owner_of.update(dict.fromkeys(stream.samples, stream))
        command = AddRequest(
            id=request_id,
            token_ids=list(token_ids),
            params=resolved,
            seed=draw_seed(params),
            arrived_at=stream.metrics.arrived_at,
            priority=priority,
            tenant=tenant,
        )
        try:
            await self._process.send(command)
        except BaseException:
            await self.abort(stream)
            raise
        return stream

    async def deltas(self, stream: RequestStream) -> AsyncGenerator[list[SampleDelta], None]:
        """What the request gains, as it gains it. Leaving early aborts the request."""
        try:
            while stream.has_more:
                yield await stream.take()
        finally:
            await self.abort(stream)

    async def abort(self, stream: RequestStream) -> None:
        """Forget a request; whatever of it is still alive in the engine ends there too."""
        if self._streams.pop(stream.request_id, None) is None:
            return
        for name in stream.samples:
            del self._owner_of[name]
        if stream.unfinished_ids and self._error is None:
            with contextlib.suppress(EngineDeadError):  # then there is nothing left to free
                await self._process.send(AbortRequests(stream.unfinished_ids))

    async def _read_reports(self) -> None:
        try:
            while True:
                report = await self._process.receive()
                if isinstance(report, EngineFailed):
                    raise EngineDeadError(report.message)
                await self._take_in(report)
        except EngineError as error:
            logger.error("%s", error)
            self._fail_all(error)
        except Exception:
            logger.exception("reports of the engine cannot be taken in")
            self._fail_all(EngineDeadError("reports of the engine cannot be taken in"))

    def _fail_all(self, error: EngineError) -> None:
        self._error = error
        self._has_failed.set()
        for stream in self._streams.values():
            stream.fail(error)

    async def _take_in(self, report: Report) -> None:
        if not isinstance(report, EventBatch):
            return
        at = report.stepped[-1].at if report.stepped else self._clock.now()
        for refusal in report.refused:
            self._finish(Finished(refusal.request_id, at, FinishReason.ERROR, 0, refusal.message))
        for admission in report.admitted:
            stream = self._streams.get(admission.request_id)
            if stream is not None and stream.metrics.admitted_at is None:
                stream.metrics.admitted_at = admission.at
                stream.metrics.num_cached_tokens = admission.num_cached_tokens
        stopped_ids = [event.request_id for event in report.tokens if self._emit(event, at)]
        for event in report.finished:
            self._finish(event)
        self._tell_listeners(report)
        if stopped_ids:
            await self._process.send(AbortRequests(stopped_ids, FinishReason.STOP))

    def _tell_listeners(self, report: EventBatch) -> None:
        for listener in self._listeners:
            try:
                listener(report)
            except Exception:
                # A fault in a metric must not cost anyone their answer.
                logger.exception("a listener failed")

    def _emit(self, event: TokensEmitted, at: float) -> bool:
        """Pass tokens on. True if a stop string ended the sample, which the engine, knowing no
        text, must be told."""
        stream = self._owner_of.get(event.request_id)
        if stream is None:
            return False
        sample = stream.samples[event.request_id]
        if sample.is_finished:
            return False
        if stream.metrics.first_token_at is None:
            stream.metrics.first_token_at = at
        stream.put(sample.push(event))
        return sample.is_finished

    def _finish(self, event: Finished) -> None:
        stream = self._owner_of.get(event.request_id)
        if stream is None:
            return
        sample = stream.samples[event.request_id]
        # A prompt forks at its first token: ended before that, none of its samples will come.
        is_unforked = sample.index == 0 and sample.num_tokens == 0
        for ended in stream.samples.values() if is_unforked else (sample,):
            if not ended.is_finished:
                stream.put(ended.finish(event))
        if not stream.unfinished_ids:
            stream.metrics.finished_at = event.at
