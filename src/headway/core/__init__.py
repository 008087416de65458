"""The engine core: scheduling and KV bookkeeping in the standard library alone.

Owns the algorithm: which requests run in a step, with how many tokens, in which blocks. Reads no
clock, draws no random number, touches no tensor, imports nothing of Headway but config, clock and
errors. In reading order:

    request.py     one request: tokens known, tokens computed, state
    params.py      its sampling parameters
    terms.py       its tenant, tier, weight and SLO targets
    plan.py        what one step computes, and its result
    draft.py       a plan under construction
    budget.py      tokens of a step, divided between decode and prefill
    executor.py    the port to whatever computes a plan
    causes.py      what a request can wait for
    events.py      what happened, for metrics, streams and the ledger
    scheduler.py   schedule(now) -> StepPlan; update(plan, result, now)
    engine.py      EngineCore: add, abort, begin_step, end_step
    invariants.py  what must hold between any two actions

Sub-packages, lowest first: kv, waiting, slo, running. Each may import those before it.
"""

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
