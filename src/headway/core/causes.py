"""Wait causes and preemption methods, shared by kv, waiting, running and events.

The enums are apart from events.py because kv and waiting must not import slo, which events.py does.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class WaitCause(StrEnum):
    """The one thing that a waiting request waits for."""

    EXECUTOR_BUSY = "executor_busy"
    """The request arrived during a step; the next scheduling pass tries it."""
    TOKEN_BUDGET = "token_budget"
    PREFILL_CAP = "prefill_cap"
    RUNNING_LIMIT = "running_limit"
    KV_BLOCKS = "kv_blocks"
    KV_QUOTA = "kv_quota"
    """The tenant of the request is at its KV quota."""
    TENANT_SHARE = "tenant_share"
    """Another tenant has a lower service counter."""
    TIER_ORDER = "tier_order"
    """A request of a better tier or priority goes first."""
    DEADLINE_ORDER = "deadline_order"
    """A request with an SLO goes first."""


class CauseTime(NamedTuple):
    """Seconds of a wait that had one cause."""

    cause: WaitCause
    seconds: float


class PreemptionMethod(StrEnum):
    """How the blocks of a preempted request are freed."""

    TRIM = "trim"
    CHECKPOINT = "checkpoint"
    RECOMPUTE = "recompute"
