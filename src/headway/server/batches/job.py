"""One batch that runs: its next lines, those under way, and its results."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass

from headway.errors import InvalidRequestError
from headway.server.api.generate.generation import Generation
from headway.server.batches.lines import Line, LineReader, parse_line
from headway.server.batches.records import BatchRecord, RequestCounts
from headway.server.batches.results import Result, ResultLog

logger = logging.getLogger(__name__)

READ_LINES, READ_BYTES = 32, 1024**2
"""Lines that are read ahead."""
WRITE_LINES = 1000


@dataclass(slots=True, eq=False)
class LineRun:
    """A line under way, or one that has to wait before it is tried again."""

    line: Line
    num_failures: int = 0
    """How often an engine failed to answer it."""
    not_before: float = 0.0
    generation: Generation | None = None
    """Its engine requests, once they are sent."""

    @property
    def is_waiting(self) -> bool:
        """Whether it has yet to be admitted to the running set."""
        return self.generation is None or self.generation.is_waiting


class BatchJob:
    """A batch whose lines have been checked."""

    def __init__(
        self, record: BatchRecord, reader: LineReader, results: ResultLog, num_total: int
    ) -> None:
        """`results` has been recovered: its requests are not run again."""
        self.id = record.id
        self.tenant = record.tenant
        self.gateway = record.gateway
        self.url = record.endpoint
        self.expires_at = record.expires_at
        self.num_total = num_total
        self.results = results
        self.under_way: dict[LineRun, asyncio.Task[None]] = {}
        self.ending: asyncio.Task[None] | None = None
        """Ends the batch; no line is started any more."""
        self.last_turn = 0
        """Number of the turn in which a line was started last."""
        self.problem = ""
        """Why its lines cannot be read; it ends then."""
        self._reader = reader
        self._ahead: deque[LineRun] = deque()
        self._again: list[LineRun] = []
        self._is_read = False

    @property
    def is_done(self) -> bool:
        """Whether every line has a result."""
        return len(self.results.done) >= self.num_total

    @property
    def counts(self) -> RequestCounts:
        results = self.results
        return RequestCounts(self.num_total, results.num_completed, results.num_failed)

    def has_next(self, now: float) -> bool:
        """Return whether a line can be started now."""
        return bool(self._ahead) or any(one.not_before <= now for one in self._again)

    @property
    def must_read(self) -> bool:
        return not self._ahead and not self._is_read

    def read_ahead(self) -> None:
        """Read the next lines that have no result; blocks."""
        try:
            self._read_ahead()
        except (OSError, InvalidRequestError) as error:
            logger.error("batch %s: its input file cannot be read: %s", self.id, error)
            self.problem, self._is_read = "the input file cannot be read any more", True

    def _read_ahead(self) -> None:
        while self.must_read:
            lines = self._reader.read(READ_LINES, READ_BYTES)
            self._is_read = not lines
            for number, text in lines:
                line = parse_line(text, number, self.url)
                if line.custom_id not in self.results.done:
                    self._ahead.append(LineRun(line))

    def take_next(self, now: float) -> LineRun:
        """Return the next line to start; there must be one."""
        ready = next((one for one in self._again if one.not_before <= now), None)
        if ready is None:
            return self._ahead.popleft()
        self._again.remove(ready)
        return ready

    def put_back(self, run: LineRun, not_before: float) -> None:
        """Have a line tried again later."""
        run.not_before, run.generation = not_before, None
        self._again.append(run)

    async def stop_lines(self) -> None:
        """Abort the lines under way; those whose results are being written keep them."""
        tasks = list(self.under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.under_way.clear()  # a task that had not begun leaves its entry
        await self.results.flush()

    def write_expired(self, reader: LineReader) -> None:
        """Write the error of every line without a result; blocks, and raises OSError."""
        while lines := reader.read(WRITE_LINES, READ_BYTES):
            found = [parse_line(text, number, self.url) for number, text in lines]
            left = [one for one in found if one.custom_id not in self.results.done]
            names = [f"batch_req_{one.digest(self.id)}" for one in left]
            self.results.append(
                [Result.expired(one, name) for one, name in zip(left, names, strict=True)]
            )
