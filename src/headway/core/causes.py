"""What a request can be waiting for, and for how long it did."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WaitCause(StrEnum):
    """The one thing that keeps a waiting request from its seat."""

    EXECUTOR_BUSY = "executor_busy"
    """It came while a step was running; the next pass will look at it."""
    TOKEN_BUDGET = "token_budget"
    PREFILL_CAP = "prefill_cap"
    RUNNING_LIMIT = "running_limit"
    KV_BLOCKS = "kv_blocks"
    TENANT_SHARE = "tenant_share"
    """Its tenant has had more than its share, or holds all the blocks it may."""
    TIER_ORDER = "tier_order"
    DEADLINE_ORDER = "deadline_order"
    """One that was promised an early start goes first: of its own like, or of a tenant whose turn
    it is not."""


class CauseTime(NamedTuple):
    """So many seconds of a wait had this cause."""

    cause: WaitCause
    seconds: float


class PreemptionMethod(StrEnum):
    """How blocks are taken from a running request."""

    TRIM = "trim"
    CHECKPOINT = "checkpoint"
    RECOMPUTE = "recompute"
