"""The steps that ended last, of all engines, in a buffer of constant size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct

from headway.core.events import Stepped
from headway.observe.trace.export import TraceStep

MAX_STEPS = 32_768
"""Two to twenty minutes of a busy engine; 2.4 MiB."""
MAX_ENGINES = 1024
"""Most names of engines; the steps of further ones share one."""
OTHER = "other"
_ROW = Struct("<Hq3d5q")


class RecentSteps:
    """A ring of steps; recording one takes constant time and no memory."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._rows = bytearray(_ROW.size * max_steps)
        self._num_recorded = 0
        self._engines: dict[str, int] = {}
        self._names: list[str] = []

    def __len__(self) -> int:
        return min(self._num_recorded, self._max_steps)

    def record(self, engine: str, steps: Sequence[Stepped]) -> None:
        """Record steps of an engine; the oldest in the ring make room."""
        number = self._number_of(engine)
        for step in steps:
            place = self._num_recorded % self._max_steps
            _ROW.pack_into(
                self._rows,
                place * _ROW.size,
                number,
                step.step_id,
                step.at,
                step.elapsed_s,
                step.predicted_s,
                step.num_scheduled,
                step.num_tokens,
                step.num_running,
                step.num_waiting,
                step.num_blocks_used,
            )
            self._num_recorded += 1

    def since(
        self, at: float, wall_offset_s: float
    ) -> tuple[Iterator[tuple[str, TraceStep]], bool]:
        """Return steps that ended at `at` or later, and whether those are all there were.

        The steps are those of now, the oldest first, however slowly the caller takes them.
        """
        first = self._num_recorded - len(self)
        # A copy: the ring goes on while the caller reads.
        rows, names = bytes(self._rows), tuple(self._names)
        numbers = range(first, self._num_recorded)

        def read() -> Iterator[tuple[str, TraceStep]]:
            for number in numbers:
                engine, step_id, end, *rest = _row_at(rows, number % self._max_steps)
                if end >= at:
                    yield names[engine], TraceStep(step_id, end + wall_offset_s, *rest)

        is_complete = not first or _row_at(rows, first % self._max_steps)[2] < at
        return read(), is_complete

    def _number_of(self, engine: str) -> int:
        number = self._engines.get(engine)
        if number is None:
            name = engine if len(self._names) < MAX_ENGINES else OTHER
            if name not in self._engines:
                self._engines[name] = len(self._names)
                self._names.append(name)
            number = self._engines[name]
        return number


def _row_at(rows: bytes, place: int) -> tuple[int, ...]:
    return _ROW.unpack_from(rows, place * _ROW.size)
