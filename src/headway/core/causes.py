"""What a request can be waiting for, and for how long it did."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WaitCause(StrEnum):
    """What keeps a waiting request from being admitted."""

    EXECUTOR_BUSY = "executor_busy"
    """The request arrived during a step; the next pass will try it."""
    TOKEN_BUDGET = "token_budget"
    PREFILL_CAP = "prefill_cap"
    RUNNING_LIMIT = "running_limit"
    KV_BLOCKS = "kv_blocks"
    KV_QUOTA = "kv_quota"
    """Its tenant is at its KV quota."""
    TENANT_SHARE = "tenant_share"
    """Another tenant has had less service for its weight."""
    TIER_ORDER = "tier_order"
    """A request of a better tier or priority goes first."""
    DEADLINE_ORDER = "deadline_order"
    """A request with an SLO goes first."""


class CauseTime(NamedTuple):
    """So many seconds of a wait had this cause."""

    cause: WaitCause
    seconds: float


class PreemptionMethod(StrEnum):
    """How blocks are taken from a running request."""

    TRIM = "trim"
    CHECKPOINT = "checkpoint"
    RECOMPUTE = "recompute"
