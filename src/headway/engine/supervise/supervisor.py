"""Keeps an engine process running: replaces a process that dies, hangs or sends bad reports.

The supervisor knows processes, not requests. It calls the owner of the requests when a process is
up, with each report, when a process is down, and when no other process will follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headway.clock import Clock
from headway.engine.process.messages import (
    Command,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EventBatch,
    LoadProgress,
    QuarantinedDigest,
)
from headway.engine.supervise.launcher import EngineProcess
from headway.engine.supervise.loss import EngineLoss
from headway.engine.supervise.restart_policy import HangDetector, RestartBudget, RestartLimits
from headway.errors import (
    EngineDeadError,
    EngineError,
    EngineFailedError,
    EngineHungError,
    ReportError,
)

logger = logging.getLogger(__name__)

TICK_S = 0.2
MAX_LOAD_STALL_S = 120.0
"""Time without load progress after which a loading process counts as hung."""

MAX_BACKOFF_S = 10.0
STANDBY_DELAY_S = 2.0
"""Time after which an engine process gets a standby, so that requests that continue go first."""

Launch = Callable[[EngineInfo | None], EngineProcess]
"""Starts a process, with the resolved settings of the process before it."""
Progress = Callable[[int, int], None]
RestartListener = Callable[[str, int], None]
"""Called with the kind of failure and the number of requests that continue."""


class EngineOwner(Protocol):
    """Owner of the requests that the engine process computes."""

    def has_work_in_engine(self) -> bool: ...

    async def on_engine_up(self) -> None: ...

    async def on_report(self, report: EventBatch) -> None: ...

    async def on_engine_down(self, loss: EngineLoss) -> int:
        """Take the live requests back; return their number."""
        ...

    def on_give_up(self, error: EngineError) -> None: ...


class Supervisor:
    """One engine process at a time; the first starts at once.

    With `launch_standby`, a second process is loaded and waits to take over.
    """

    def __init__(
        self,
        launch: Launch,
        clock: Clock,
        limits: RestartLimits,
        launch_standby: Launch | None = None,
    ) -> None:
        self.name = "local"
        self.is_connected = True
        self.info: EngineInfo | None = None
        self.is_up = False
        self.is_hung = False
        self.restart_listeners: list[RestartListener] = []
        self._launch = launch
        self._process = launch(None)
        self._launch_standby = launch_standby
        self._standby: EngineProcess | None = None
        self._clock = clock
        self._budget = RestartBudget(limits)
        self._hang_detector = HangDetector(clock.now())
        self._was_hung = False

    def has_room(self, _num_tokens: int) -> bool:
        """Return True: the queue of the API process bounds what its own engine gets."""
        return True

    def adopt(self, _request_id: str, _tenant: str) -> Awaitable[bool]:
        """Return False: the engine has no requests of other frontends."""
        return asyncio.sleep(0, False)

    def share_quarantine(self, _entries: Sequence[QuarantinedDigest]) -> Awaitable[bool]:
        """Do nothing: no other frontend uses the engine."""
        return asyncio.sleep(0, False)

    async def send(self, command: Command) -> None:
        """Send a command; a dead process is ignored here, because `receive` detects it."""
        try:
            await self._process.send(command)
        except EngineDeadError:
            logger.debug("a command was not sent: the engine process is dead")

    async def load(self, progress: Progress | None = None) -> None:
        """Wait until the process has loaded its model."""
        last_progress_at = self._clock.now()
        while True:
            report = await self._process.receive(TICK_S)
            now = self._clock.now()
            if isinstance(report, EngineReady):
                break
            if isinstance(report, EngineFailed):
                raise EngineFailedError(report.message)
            if isinstance(report, LoadProgress):
                last_progress_at = now
                if progress is not None:
                    progress(report.num_done, report.num_total)
            if now - last_progress_at > MAX_LOAD_STALL_S:
                raise EngineHungError(f"nothing was loaded for {MAX_LOAD_STALL_S:.0f} s")
        self.info = report.info
        self._hang_detector = HangDetector(
            self._clock.now(), self._budget.limits.hang_s, self._was_hung
        )
        self.is_up, self.is_hung = True, False

    async def run(self, owner: EngineOwner) -> None:
        """Serve the owner, replacing failed processes, until the restart budget is spent."""
        try:
            while True:
                await self._replace(await self._serve(owner), owner)
        except EngineError as error:
            logger.error("%s", error)
            owner.on_give_up(error)
        except Exception:
            logger.exception("the engine cannot be supervised")
            owner.on_give_up(EngineDeadError("the engine cannot be supervised"))

    def kill(self) -> None:
        """Kill the processes; `stop` must still follow."""
        self._process.kill()
        if self._standby is not None:
            self._standby.kill()

    async def stop(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.kill()  # it has nothing to finish
            await standby.stop()
        await self._process.stop()

    def _start_standby(self) -> None:
        """Start a process that can take over; without it, a failure takes longer to mend."""
        if self._launch_standby is None or self._standby is not None:
            return
        try:
            self._standby = self._launch_standby(self.info)
        except EngineError as error:
            logger.warning("there is no standby: %s", error)

    async def _serve(self, owner: EngineOwner) -> EngineError:
        """Pass reports to the owner until the process fails; return the failure.

        An exception here counts as a failure of the engine, so that streams continue in another.
        """
        try:
            await owner.on_engine_up()
            return await self._read_reports(owner)
        except EngineError as error:
            return error
        except Exception as error:
            logger.exception("a report of the engine cannot be handled")
            return ReportError(f"a report cannot be handled: {type(error).__name__}: {error}")

    async def _read_reports(self, owner: EngineOwner) -> EngineError:
        standby_at = self._clock.now() + STANDBY_DELAY_S
        while True:
            report = await self._process.receive(TICK_S)
            if self._clock.now() >= standby_at:
                self._start_standby()
            if report is None:
                has_work = owner.has_work_in_engine()
                self._hang_detector.advance(self._clock.now(), has_work, self._process.cpu_s())
                await self._check_standby()
            if isinstance(report, EngineFailed):
                return EngineFailedError(report.message)
            if isinstance(report, EventBatch):
                for step in report.stepped:
                    self._hang_detector.record_step(step.elapsed_s)
                await owner.on_report(report)
            self.is_hung = self._hang_detector.is_hung
            if self.is_hung:
                limit_s = self._hang_detector.limit_s
                return EngineHungError(f"the engine ended no step for {limit_s:.0f} s")

    async def _replace(self, error: EngineError, owner: EngineOwner) -> None:
        self.is_up = False
        began_at = self._clock.now()
        logger.error("%s; replacing the engine", error)
        step_ids = await self._reap(error)
        if isinstance(error, ReportError):
            step_ids = frozenset()  # the fault was in the API process, not in the step
        loss = EngineLoss(step_ids, isinstance(error, EngineFailedError))
        num_requests = await owner.on_engine_down(loss)
        num_failures = 0
        while True:
            self._spend(error)
            self._notify_restart(_failure_kind(error), 0 if num_failures else num_requests)
            try:
                await self._start_process()
            except EngineError as failure:
                # A process that cannot load may need memory that has yet to be freed.
                num_failures += 1
                error = failure
                logger.error("%s; trying again", error)
                await self._reap(error)
                await asyncio.sleep(min(2.0 ** (num_failures - 2), MAX_BACKOFF_S))
            else:
                took_s = self._clock.now() - began_at
                logger.info("the engine is back after %.1f s; %d requests", took_s, num_requests)
                return

    async def _start_process(self) -> None:
        """Start a process and wait until it is loaded; raise EngineError if that fails."""
        try:
            self._process = await self._take_standby() or self._launch(self.info)
            await self.load()
        except EngineError:
            raise
        except Exception as error:
            logger.exception("the engine cannot be started")
            name = type(error).__name__
            raise EngineError(f"the engine cannot be started: {name}: {error}") from error

    async def _check_standby(self) -> None:
        """Drop a standby that has ended; the next engine starts another."""
        standby = self._standby
        if standby is None or standby.is_alive:
            return
        self._standby = None
        message = "it was killed"
        with contextlib.suppress(EngineError):
            while report := await standby.receive(0):
                message = report.message if isinstance(report, EngineFailed) else message
        logger.warning("there is no standby: %s", message)
        await standby.stop()

    async def _take_standby(self) -> EngineProcess | None:
        """Return the standby process, about to become ready; None if there is none."""
        await self._check_standby()
        standby, self._standby = self._standby, None
        if standby is not None:
            standby.activate()
        return standby

    def _notify_restart(self, kind: str, num_requests: int) -> None:
        for listener in self.restart_listeners:
            try:
                listener(kind, num_requests)
            except Exception:
                # A fault in a listener must not end a request.
                logger.exception("a restart listener failed")

    async def _reap(self, error: EngineError) -> frozenset[str]:
        """Make sure the process is gone; return the ids of its unfinished step."""
        if isinstance(error, EngineHungError):
            await self._process.dump_stacks()
        self._process.kill()
        await self._process.wait()
        suspect_ids = self._process.unfinished_step()
        await self._process.stop()
        return suspect_ids

    def _spend(self, error: EngineError) -> None:
        self._was_hung = isinstance(error, EngineHungError)
        if not self._budget.spend(self._clock.now()):
            limits = self._budget.limits
            raise EngineDeadError(
                f"the engine failed more than {limits.max_restarts} times in {limits.window_s:.0f} "
                f"s (max_engine_restarts, engine_restart_window_s); the last failure: {error}"
            )


def _failure_kind(error: EngineError) -> str:
    if isinstance(error, EngineHungError):
        return "hung"
    return "died" if isinstance(error, EngineDeadError) else "failed"
