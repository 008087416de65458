"""What the stream sends: the state now, and the history in columns.

Names of tenants are values, never keys, so that no name has a meaning in the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.dashboard.collector import MAX_SHOWN, Collector
from headway.dashboard.history import HistoryInterval, ServerState, TenantLoad
from headway.dashboard.waits import INTERVAL_S, open_waits

_NOTHING = TenantLoad()


class FrameMaker:
    """Makes the payloads of a stream; remembers the last one for rates."""

    def __init__(self, collector: Collector, status: Callable[[], str]) -> None:
        self._collector = collector
        self._status = status
        self._last = (collector.clock.now(), collector.num_output_tokens)

    def now(self) -> dict[str, Any]:
        """Return the state of the server."""
        collector = self._collector
        now, state, step = collector.clock.now(), collector.state(), collector.last_step
        (last_at, last_tokens), self._last = self._last, (now, collector.num_output_tokens)
        rate = (collector.num_output_tokens - last_tokens) / max(now - last_at, 1e-3)
        loads = [*state.loads.values(), state.others]
        is_busy = any(load.num_running for load in loads)
        return {
            "type": "now",
            "at": collector.time_of_day(),
            "status": self._status(),
            "num_running": sum(load.num_running for load in loads),
            "num_waiting": sum(load.num_waiting for load in loads),
            "tokens_per_s": rate,
            "step_s": step.elapsed_s if step is not None and is_busy else None,
            "num_blocks": state.num_blocks,
            "num_blocks_used": state.owners.num_used,
            "tenants": [
                [name, load.num_running, load.num_waiting, state.owners.by_tenant.get(name, 0)]
                for name, load in state.loads.items()
            ],
            "others": [state.others.num_running, state.others.num_waiting],
        }

    def history(self) -> dict[str, Any]:
        """Return the last ten minutes, one value per interval, oldest first."""
        collector = self._collector
        now = collector.clock.now()
        collector.advance(now)
        intervals = list(collector.history.intervals)
        intervals[-1].state = collector.state()
        # The newest interval is not over; in its first second, rates would be noise.
        spans = [INTERVAL_S] * (len(intervals) - 1) + [max(1.0, now % INTERVAL_S)]
        start = intervals[0].number * INTERVAL_S - now + collector.time_of_day()
        starts = [part.waiting_since for _, part in collector.requests.live_parts]
        return {
            "type": "history",
            "start": start,
            "interval_s": INTERVAL_S,
            "last_s": spans[-1],
            "num_empty": sum(one.state is None for one in intervals),
            "causes": _pairs(collector.waits.columns()),
            "open_waits": _rounded(open_waits((one for one in starts if one is not None), now)),
            "wait_s": _rounded([one.wait_s for one in intervals]),
            **_step_columns(intervals, spans),
            **_request_columns(intervals),
            "loads": _load_columns(intervals),
            "blocks": _block_columns([one.state for one in intervals]),
            "last_preemptions": list(collector.preemptions)[::-1],
            "last_restarts": list(collector.restarts)[::-1],
        }


def _step_columns(intervals: Sequence[HistoryInterval], spans: Sequence[float]) -> dict[str, Any]:
    pairs = list(zip(intervals, spans, strict=True))
    return {
        "num_steps": [one.num_steps for one in intervals],
        "step_ms": [_mean_ms(one.step_s, one.num_steps) for one in intervals],
        "max_step_ms": [_mean_ms(one.max_step_s, one.num_steps and 1) for one in intervals],
        "predicted_ms": [_mean_ms(one.predicted_s, one.num_predicted) for one in intervals],
        "model_error": [
            None if one.model_error is None else round(one.model_error, 4) for one in intervals
        ],
        "step_tokens_per_s": _rounded([one.num_step_tokens / span for one, span in pairs]),
        "tokens_per_s": _rounded([one.num_output_tokens / span for one, span in pairs]),
    }


def _request_columns(intervals: Sequence[HistoryInterval]) -> dict[str, Any]:
    return {
        "num_arrived": [one.num_arrived for one in intervals],
        "num_finished": [one.num_finished for one in intervals],
        "num_first_tokens": [one.num_first_tokens for one in intervals],
        "ttft_ms": [_mean_ms(one.ttft_s, one.num_first_tokens) for one in intervals],
        "num_met": [one.num_met for one in intervals],
        "num_missed": [one.num_missed for one in intervals],
        "num_restarts": [one.num_restarts for one in intervals],
        "refusals": _count_columns([one.refusals for one in intervals]),
        "preemptions": _count_columns([one.preemptions for one in intervals]),
    }


def _load_columns(intervals: Sequence[HistoryInterval]) -> dict[str, Any]:
    """Return running and waiting by tenant; the tenants with the most over all have columns."""
    states = [one.state for one in intervals]
    sizes: dict[str, int] = {}
    for state in states:
        for name, load in () if state is None else state.loads.items():
            sizes[name] = sizes.get(name, 0) + load.size
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:MAX_SHOWN]
    running = [[_load(state, name).num_running for state in states] for name in names]
    waiting = [[_load(state, name).num_waiting for state in states] for name in names]
    rest = [_rest(state, names) for state in states]
    return {
        "tenants": names,
        "running": running,
        "waiting": waiting,
        "other_running": [load.num_running for load in rest],
        "other_waiting": [load.num_waiting for load in rest],
    }


def _load(state: ServerState | None, name: str) -> TenantLoad:
    return _NOTHING if state is None else state.loads.get(name, _NOTHING)


def _rest(state: ServerState | None, names: Sequence[str]) -> TenantLoad:
    """Return the load of the tenants without a column."""
    if state is None:
        return _NOTHING
    loads = [state.others, *(load for name, load in state.loads.items() if name not in names)]
    return TenantLoad(sum(one.num_running for one in loads), sum(one.num_waiting for one in loads))


def _block_columns(states: Sequence[ServerState | None]) -> dict[str, Any]:
    sizes: dict[str, int] = {}
    for state in states:
        for name, count in () if state is None else state.owners.by_tenant.items():
            sizes[name] = sizes.get(name, 0) + count
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:MAX_SHOWN]
    return {
        "tenants": names,
        "owned": [
            [0 if one is None else one.owners.by_tenant.get(name, 0) for one in states]
            for name in names
        ],
        "kept": [0 if one is None else one.owners.num_kept for one in states],
        "cached": [0 if one is None else one.owners.num_cached for one in states],
        "used": [0 if one is None else one.owners.num_used for one in states],
        "total": max((one.num_blocks for one in states if one is not None), default=0),
    }


def _count_columns(counts: Sequence[dict[str, int]]) -> list[list[Any]]:
    names = sorted({name for one in counts for name in one})
    return [[name, [one.get(name, 0) for one in counts]] for name in names]


def _pairs(columns: dict[str, list[float]]) -> list[list[Any]]:
    return [[name, _rounded(values)] for name, values in sorted(columns.items())]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def _mean_ms(total_s: float, count: int) -> float | None:
    return round(1000 * total_s / count, 3) if count else None
