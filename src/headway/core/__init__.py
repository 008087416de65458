"""The engine core: scheduling and KV cache management, in the standard library alone.

Owns the algorithm: which requests run in a step, with how many tokens, in which blocks. Must not
read a clock, draw random numbers or touch tensors, and imports only config, clock and errors of
Headway. In reading order:

    request.py     one request: tokens known, tokens computed, state
    params.py      its sampling parameters
    terms.py       its tenant, tier, weight, KV quota and SLO targets
    plan.py        what one step computes, and its result
    draft.py       a step plan under construction
    budget.py      token budget of a step, divided between decode and prefill
    executor.py    the port to the executor, which computes a plan
    causes.py      wait causes and preemption methods
    owners.py      KV blocks by owner
    events.py      events for metrics, streams and the ledger
    scheduler.py   schedule(now) -> StepPlan; update(plan, result, now)
    engine.py      EngineCore: add, abort, begin_step, end_step
    invariants.py  checks that tests run after every action

Sub-packages, lowest first: kv, waiting, slo, running. Each may import the ones before it. Names
of this package are loaded on first use: the API process needs events, not the scheduler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.core.causes import CauseTime, PreemptionMethod, WaitCause
    from headway.core.engine import EngineCore
    from headway.core.executor import Capacity, Executor, Ticket
    from headway.core.params import SamplingParams
    from headway.core.plan import ScheduledRequest, StepPlan, StepResult
    from headway.core.request import FinishReason, Request, RequestState
    from headway.core.running.admission import Admit, Refuse, Wait
    from headway.core.scheduler import Scheduler
    from headway.core.terms import Targets, Terms

__all__ = [
    "Admit",
    "Capacity",
    "CauseTime",
    "EngineCore",
    "Executor",
    "FinishReason",
    "PreemptionMethod",
    "Refuse",
    "Request",
    "RequestState",
    "SamplingParams",
    "ScheduledRequest",
    "Scheduler",
    "StepPlan",
    "StepResult",
    "Targets",
    "Terms",
    "Ticket",
    "Wait",
    "WaitCause",
]

_HOME_OF = {
    "Admit": "headway.core.running.admission",
    "Capacity": "headway.core.executor",
    "CauseTime": "headway.core.causes",
    "EngineCore": "headway.core.engine",
    "Executor": "headway.core.executor",
    "FinishReason": "headway.core.request",
    "PreemptionMethod": "headway.core.causes",
    "Refuse": "headway.core.running.admission",
    "Request": "headway.core.request",
    "RequestState": "headway.core.request",
    "SamplingParams": "headway.core.params",
    "ScheduledRequest": "headway.core.plan",
    "Scheduler": "headway.core.scheduler",
    "StepPlan": "headway.core.plan",
    "StepResult": "headway.core.plan",
    "Targets": "headway.core.terms",
    "Terms": "headway.core.terms",
    "Ticket": "headway.core.executor",
    "Wait": "headway.core.running.admission",
    "WaitCause": "headway.core.causes",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'headway.core' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
