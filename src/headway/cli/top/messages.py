"""What the dashboard's stream sends, as far as `headway top` shows it; the rest is ignored."""

from __future__ import annotations

import msgspec

Columns = list[tuple[str, list[float]]]
"""A name, and one value per interval, the newest last."""


class NowFrame(msgspec.Struct, frozen=True, tag_field="type", tag="now"):
    """The state of the server."""

    at: float
    status: str
    num_running: int
    num_waiting: int
    tokens_per_s: float
    num_blocks: int
    num_blocks_used: int
    tenants: list[tuple[str, int, int, int]]
    """Name, running, waiting, KV blocks; the tenant with the most requests first."""
    others: tuple[int, int]
    """Running and waiting requests of all other tenants."""


class BlockColumns(msgspec.Struct, frozen=True):
    """KV blocks by owner, one value per interval."""

    owned: list[list[int]]
    kept: list[int]
    cached: list[int]
    used: list[int]


class PreemptionRow(msgspec.Struct, frozen=True):
    """A preemption: who had to stop, for whom, and what was needed."""

    at: float
    cause: str
    tenant: str | None
    by_tenant: str | None


class HistoryFrame(msgspec.Struct, frozen=True, tag_field="type", tag="history"):
    """The last ten minutes, one value per interval, the newest last."""

    interval_s: float
    last_s: float
    """Length of the newest interval, which is not over."""
    causes: Columns
    open_waits: list[float]
    num_steps: list[int]
    step_ms: list[float | None]
    max_step_ms: list[float | None]
    predicted_ms: list[float | None]
    model_error: list[float | None]
    num_finished: list[int]
    num_first_tokens: list[int]
    ttft_ms: list[float | None]
    num_met: list[int]
    num_missed: list[int]
    num_restarts: list[int]
    refusals: Columns
    preemptions: Columns
    blocks: BlockColumns
    last_preemptions: list[PreemptionRow]


class SlowRequest(msgspec.Struct, frozen=True):
    """A live request."""

    id: str
    tenant: str
    state: str
    age_s: float
    wait_s: float
    num_prompt_tokens: int
    num_output_tokens: int


class SlowRequests(msgspec.Struct, frozen=True):
    """The oldest live requests, the oldest first."""

    live: list[SlowRequest]
    num_live: int


StreamFrame = NowFrame | HistoryFrame
