"""Runs the requests of all batches on capacity that nobody else uses.

A few requests wait in the engine at a time, so that batches never fill its queue. They are of the
spot tier: ordinary requests go before them, preempt them and share few steps with them. Each takes
the path of a request that came over HTTP, quotas and ledger included. The next request is that of
the tenant with the fewest under way for its weight, then of its batch whose turn is longest ago.

The state of a batch is its record and its result files. After a restart, the lines without a result
run again, under the same ids: an answer that was not written yet is replaced, in the ledger too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from headway.core.terms import NO_TARGETS
from headway.engine.process.messages import EventBatch
from headway.errors import InvalidRequestError, OverloadedError, QuarantinedError, TenantLimitError
from headway.server.api.generate.answer import answer_whole
from headway.server.api.generate.endpoint import GenerationEndpoint
from headway.server.batches.job import BatchJob, LineRun
from headway.server.batches.lines import ENVELOPE_BYTES, FileCheck, LineReader
from headway.server.batches.records import (
    OPEN_STATUSES,
    OUTPUT_PURPOSE,
    BatchRecord,
    FileRecord,
    LineError,
    RequestCounts,
)
from headway.server.batches.results import Result, ResultLog
from headway.server.batches.store import BatchStore
from headway.server.context import Caller, ServerContext
from headway.server.http.errors import ApiError, ErrorResponse, translate
from headway.server.schema.request import RequestLimits
from headway.server.schema.sampling import TARGET_FIELDS
from headway.tenancy import Directory, TenantRecord, Tier

logger = logging.getLogger(__name__)

MAX_WAITING = 8
"""Requests of batches that wait for admission at a time."""
NUM_BESIDE = 2
"""Requests of batches beside ordinary ones; twice as many for each second without any.

An ordinary request that arrives waits for the end of the step, which is longer with more of them.
"""
MAX_FAILURES = 3
"""How often a request is tried when its engine fails."""
TICK_S = 0.2
PREPARE_S = 0.1
"""How often new batches are looked for: there may be many that wait for their turn."""
RETRY_S = 5.0
"""Pause after an error of the disk or the database."""
SWEEP_S = 60.0
STOP_S = 5.0
"""How long the end of the feeder waits for results to be written."""
MAX_JOBS, MAX_TENANT_JOBS = 256, 4
"""Batches that run at a time, of all tenants and of one; the others wait for their turn."""
WAIT_S = 0.005
SAVED_S = 10.0
"""How long a result waits for its row in the ledger to be safe."""
_UNAVAILABLE_STATUS = 503


@dataclass(frozen=True, slots=True)
class Later:
    """Try the request again after a while; its tenant, or every tenant, waits."""

    after_s: float
    is_tenant: bool


@dataclass(frozen=True, slots=True)
class Again:
    """The engine failed; try the request again."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has an answer, which is an error."""

    answer: ErrorResponse


def outcome_of(error: Exception, num_failures: int) -> Later | Again | Failed:
    """Return what follows from an error of a request; `num_failures` counts this one."""
    match error:
        case TenantLimitError():
            return Later(error.retry_after_s, is_tenant=True)
        case OverloadedError():
            return Later(error.retry_after_s, is_tenant=False)
        case InvalidRequestError() | QuarantinedError():
            return Failed(translate(error))
        case ApiError() if error.answer.status == _UNAVAILABLE_STATUS:
            return Later(1.0, is_tenant=False)
        case ApiError() if error.answer.status < 500:
            return Failed(error.answer)
        case _:
            answer = translate(error)
            return Again() if num_failures < MAX_FAILURES else Failed(answer)


class BatchFeeder:
    """Keeps requests of batches under way; `run` ends only when it is cancelled."""

    def __init__(
        self,
        context: ServerContext,
        store: BatchStore,
        limits: RequestLimits,
        directory: Directory,
        endpoints: Mapping[str, GenerationEndpoint[Any]],
        max_body_bytes: int,
    ) -> None:
        """`endpoints` are those that a batch may use, by path."""
        self._context = context
        self._store = store
        self._limits = limits
        self._directory = directory
        self._endpoints = endpoints
        self._max_line_bytes = max_body_bytes + ENVELOPE_BYTES
        self._jobs: dict[str, BatchJob] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._prepare_at = 0.0
        self._ordinary_at = -inf
        """When an ordinary request was under way last."""
        self._paused_until = 0.0
        self._tenants_paused_until: dict[str, float] = {}
        self._turn = 0
        self._num_started = 0
        self._checks = asyncio.Lock()
        """Files are checked in turn, a moment each."""
        context.engine.subscribe(self._on_events)
        context.metrics.batches.watch(OPEN_STATUSES, store.num_open, self._num_under_way)

    async def run(self) -> None:
        """Run batches until cancelled; a second call begins again from what is on disk."""
        sweep = asyncio.create_task(self._sweep())
        try:
            while True:
                self._store.changed.clear()
                if self._context.admission.is_closed:
                    await self._stop()
                else:
                    if self._now() >= self._prepare_at:
                        self._prepare_at = self._now() + PREPARE_S
                        self._prepare_new()
                    self._end_jobs()
                    if self._context.engine.num_ordinary:
                        self._ordinary_at = self._now()
                    await self._start_lines()
                with contextlib.suppress(TimeoutError):
                    # Not `wait_for`, which may lose a cancellation.
                    async with asyncio.timeout(TICK_S):
                        await self._store.changed.wait()
        finally:
            sweep.cancel()
            await asyncio.gather(sweep, self._stop(), return_exceptions=True)

    def counts_of(self, record: BatchRecord) -> BatchRecord:
        """Return the record of a batch with the counts of this moment."""
        job = self._jobs.get(record.id)
        if job is None or not record.is_open:
            return record
        return record.with_counts(job.counts)

    def check_body(self, url: str, record: TenantRecord) -> Callable[[bytes], None]:
        """Return a check of bodies for this endpoint and tenant, before any of them runs."""
        read, caller = self._endpoints[url].read, Caller(record)

        def check(body: bytes) -> None:
            payload = read(body, self._limits).payload
            for name in ("stream", *TARGET_FIELDS):
                if getattr(payload, name):
                    raise InvalidRequestError(
                        f"{name} is not possible in a batch; leave it out", name
                    )
            caller.check_permissions(payload)
            self._context.model_name(payload.model)

        return check

    # ------------------------------------------------------------ preparation

    def _prepare_new(self) -> None:
        active = self._jobs.keys() | self._preparing.keys()
        num_of = Counter(self._store.current(name).tenant for name in active)
        for record in self._store.open_batches():
            if record.id in active:
                continue
            is_full = num_of.total() >= MAX_JOBS or num_of[record.tenant] >= MAX_TENANT_JOBS
            if not is_full or record.status == "cancelling" or self._is_expired(record):
                num_of[record.tenant] += 1
                self._preparing[record.id] = asyncio.create_task(self._prepare(record))

    async def _prepare(self, record: BatchRecord) -> None:
        """Check a new batch, or find out how far one had come; then run its lines."""
        try:
            if record.status == "validating":
                await self._validate(record)
            record = self._store.current(record.id)
            if record.status == "validating":
                await asyncio.sleep(TICK_S)  # its tenant may not send requests now
            elif record.is_open:
                self._jobs[record.id] = await asyncio.to_thread(self._open_job, record)
        except Exception:
            logger.exception("batch %s cannot be prepared; it is tried again", record.id)
            await asyncio.sleep(RETRY_S)
        finally:
            self._preparing.pop(record.id, None)
            self._store.changed.set()

    async def _validate(self, record: BatchRecord) -> None:
        path = self._store.folder.path_of(record.input_file_id)
        tenant = self._spot_record(record.tenant, record.gateway)
        if tenant is None:
            if self._is_expired(record):
                await self._store.change_batch(record.id, self._expire_unchecked)
            return
        check_body = self.check_body(record.endpoint, tenant)
        check = FileCheck(path, record.endpoint, self._max_line_bytes, check_body)
        is_done = False
        while not is_done:
            async with self._checks:
                is_done = await asyncio.to_thread(check.check_some)
                await asyncio.sleep(0)
            if self._store.current(record.id).status != "validating":
                return  # it was cancelled

        def change(now: BatchRecord) -> BatchRecord:
            if now.status != "validating":
                return now
            at = self._store.time_of_day()
            if check.errors:
                return now.become("failed", at, errors=tuple(check.errors))
            return now.become("in_progress", at, counts=RequestCounts(check.num_lines))

        await self._store.change_batch(record.id, change)

    def _expire_unchecked(self, record: BatchRecord) -> BatchRecord:
        if record.status != "validating":
            return record
        return record.become("expired", self._store.time_of_day())

    def _open_job(self, record: BatchRecord) -> BatchJob:
        """Return a batch as it was left; blocks."""
        folder = self._store.folder
        paths = folder.path_of(record.output_id), folder.path_of(record.error_id)
        results = ResultLog(*paths, self._context.metrics.batches.count_done)
        results.recover()
        return BatchJob(record, self._reader(record), results, record.counts.total)

    def _reader(self, record: BatchRecord) -> LineReader:
        return LineReader(self._store.folder.path_of(record.input_file_id), self._max_line_bytes)

    # ------------------------------------------------------------------ lines

    async def _start_lines(self) -> None:
        """Start as many lines as may be under way."""
        for job in list(self._jobs.values()):
            if job.must_read and job.ending is None:
                await asyncio.to_thread(job.read_ahead)
        while self._has_room():
            job = self._next_job()
            if job is None:
                return
            self._start_line(job)
            if job.must_read:
                await asyncio.to_thread(job.read_ahead)

    def _has_room(self) -> bool:
        """Return whether one more line may be sent to the engine now."""
        engine = self._context.engine
        if not engine.is_ready or self._now() < self._paused_until:
            return False
        if engine.waiting.totals.total.num_requests:
            return False  # nothing is left over while ordinary requests wait
        return self._has_room_beside(self._now() - self._ordinary_at)

    def _has_room_beside(self, idle_s: float) -> bool:
        """Return whether one more line may run, by the time without ordinary requests."""
        engine = self._context.engine
        runs = [run for job in self._jobs.values() for run in job.under_way]
        if sum(run.is_waiting for run in runs) >= MAX_WAITING:
            return False
        limit = self._store.config.max_batch_reqs
        if limit is None:
            infos = [one.info for one in engine.engines if one.info is not None]
            limit = max(1, sum(info.max_num_seqs for info in infos))
        # The exponent is bounded, or a long idle time would be too large for a number.
        return len(runs) < min(limit, int(NUM_BESIDE * 2 ** min(idle_s, 30.0)))

    def _next_job(self) -> BatchJob | None:
        """Return the batch whose line is next; None if no line can be started now."""
        now = self._now()
        num_of = Counter(job.tenant for job in self._jobs.values() for _ in job.under_way)
        best: tuple[tuple[float, int], BatchJob] | None = None
        for job in self._jobs.values():
            is_paused = self._tenants_paused_until.get(job.tenant, 0.0) > now
            if is_paused or job.ending is not None or not job.has_next(now):
                continue
            record = self._spot_record(job.tenant, job.gateway)
            if record is None:
                continue
            key = (num_of[job.tenant] / record.terms.weight, job.last_turn)
            if best is None or key < best[0]:
                best = (key, job)
        return None if best is None else best[1]

    def _start_line(self, job: BatchJob) -> None:
        self._turn += 1
        job.last_turn = self._turn
        run = job.take_next(self._now())
        task = asyncio.create_task(self._run_line(job, run))
        job.under_way[run] = task

    async def _run_line(self, job: BatchJob, run: LineRun) -> None:
        name = run.line.digest(job.id)
        try:
            body = await self._answer(job, run, name)
            result = Result.answered(run.line, f"batch_req_{name}", body)
            await job.results.add(result)
        except Exception as error:
            await self._fail_line(job, run, error)
        finally:
            del job.under_way[run]
            self._store.changed.set()

    async def _answer(self, job: BatchJob, run: LineRun, name: str) -> bytes:
        """Return the answer to a line, once its row in the ledger is safe."""
        context, endpoint = self._context, self._endpoints[job.url]
        record = self._spot_record(job.tenant, job.gateway)
        if record is None:
            raise TenantLimitError("the tenant may not send requests now", 1)
        ledger, request_id = context.ledger, endpoint.request_id(name)
        # The engine may have yet to end an attempt under the same id.
        while ledger is not None and ledger.is_live(request_id):
            await asyncio.sleep(WAIT_S)
        # A later attempt has a higher revision, in this process or after a restart.
        self._num_started += 1
        revision = (self._store.num_starts << 40) + (self._num_started << 8)
        caller = Caller(record, f"batch_req_{name}", name)
        started, generation = await endpoint.begin(caller, context, self._limits, run.line.body)
        run.generation = generation
        body = await answer_whole(context, started, generation, revision)
        until = self._now() + SAVED_S
        while ledger is not None and not ledger.is_saved(request_id) and self._now() < until:
            await asyncio.sleep(WAIT_S)
        return body

    async def _fail_line(self, job: BatchJob, run: LineRun, error: Exception) -> None:
        outcome = outcome_of(error, run.num_failures + 1)
        now = self._now()
        if self._context.admission.is_closed:
            job.put_back(run, now)  # the next server runs it
            return
        match outcome:
            case Later(after_s, is_tenant):
                if is_tenant:
                    self._tenants_paused_until[job.tenant] = now + after_s
                else:
                    self._paused_until = now + after_s
                job.put_back(run, now + after_s)
            case Again():
                run.num_failures += 1
                job.put_back(run, now + 1.0)
            case Failed(answer):
                name = f"batch_req_{run.line.digest(job.id)}"
                await job.results.add(Result.refused(run.line, name, answer))

    def _spot_record(self, tenant: str, gateway: str | None) -> TenantRecord | None:
        """Return the tenant on the terms of its batches; None if it may not send requests."""
        record = self._directory.find(tenant, gateway)
        if record is None or record.tenant.is_disabled:
            return None
        roster, name = self._directory.roster, self._store.config.batch_tier
        tier = roster.tier_of(record.tenant)
        if not tier.is_spot:
            tier = roster.tier(name) or Tier(name)
        # The completion window is the only target.
        return record.with_tier(replace(tier, is_spot=True, targets=NO_TARGETS))

    # -------------------------------------------------------------------- end

    def _end_jobs(self) -> None:
        """Begin to end the batches that are done, cancelled, or out of time."""
        for job in self._jobs.values():
            if job.ending is not None:
                continue
            record, status = self._store.current(job.id), ""
            if record.status == "cancelling":
                status = "cancelled"
            elif job.is_done:
                status = "completed"
            elif job.problem:
                status = "failed"
            elif self._is_expired(record):
                status = "expired"
            if status:
                job.ending = asyncio.create_task(self._end(job, record, status))

    async def _end(self, job: BatchJob, record: BatchRecord, status: str) -> None:
        """End a batch: its results are on disk, then its files and its status are visible."""
        try:
            await job.stop_lines()
            if status == "expired":
                await asyncio.to_thread(job.write_expired, self._reader(record))
            if status != "cancelled":
                await self._store.change_batch(record.id, self._finalizing)
            await asyncio.to_thread(self._store.folder.sync)
            files = self._result_files(job, record)

            def change(now: BatchRecord) -> BatchRecord:
                final = "cancelled" if now.status == "cancelling" else status
                errors = [LineError(code="invalid_file", message=job.problem)]
                return now.become(
                    final,
                    self._store.time_of_day(),
                    counts=job.counts,
                    errors=tuple(errors if job.problem else ()),
                )

            await self._store.change_batch(record.id, change, files)
            del self._jobs[job.id]
            for unused in {record.output_id, record.error_id} - {one.id for one in files}:
                await asyncio.to_thread(self._store.folder.remove, unused)
        except Exception:
            logger.exception("batch %s cannot be ended; it is tried again", job.id)
            await asyncio.sleep(RETRY_S)
            job.ending = None
        finally:
            self._store.changed.set()

    def _finalizing(self, record: BatchRecord) -> BatchRecord:
        if record.status != "in_progress":
            return record
        return record.become("finalizing", self._store.time_of_day())

    def _result_files(self, job: BatchJob, record: BatchRecord) -> list[FileRecord]:
        now = int(self._store.time_of_day())
        names = ((record.output_id, "output"), (record.error_id, "error"))
        return [
            FileRecord(
                id=file_id,
                tenant=record.tenant,
                purpose=OUTPUT_PURPOSE,
                filename=f"{record.id}_{kind}.jsonl",
                num_bytes=num_bytes,
                created_at=now,
                expires_at=now + record.output_keep_s,
            )
            for (file_id, kind), num_bytes in zip(names, job.results.sizes, strict=True)
            if num_bytes
        ]

    async def _stop(self) -> None:
        """Abort all lines and checks; what is on disk says how to go on."""
        tasks = list(self._preparing.values())
        for task in tasks:
            task.cancel()
        jobs = list(self._jobs.values())
        endings = [job.ending for job in jobs if job.ending is not None]
        stops = [asyncio.create_task(job.stop_lines()) for job in jobs]
        if waited := [*tasks, *endings, *stops]:
            _, late = await asyncio.wait(waited, timeout=STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*waited, return_exceptions=True)
        self._jobs.clear()
        self._preparing.clear()

    async def _sweep(self) -> None:
        while True:
            try:
                await self._store.remove_expired()
            except Exception:
                logger.exception("expired files cannot be removed")
            await asyncio.sleep(SWEEP_S)

    def _num_under_way(self) -> int:
        return sum(len(job.under_way) for job in self._jobs.values())

    def _on_events(self, batch: EventBatch) -> None:
        if self._jobs and (batch.admitted or batch.finished):
            self._store.changed.set()

    def _is_expired(self, record: BatchRecord) -> bool:
        return record.expires_at <= self._store.time_of_day()

    def _now(self) -> float:
        return self._context.admission.clock.now()
