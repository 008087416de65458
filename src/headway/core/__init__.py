"""The engine core: scheduling and KV bookkeeping in the standard library alone."""

from headway.core.admission import Admit, Refuse, Wait
from headway.core.causes import CauseTime, PreemptionMethod, WaitCause
from headway.core.engine import EngineCore
from headway.core.executor import Capacity, Executor, Ticket
from headway.core.params import SamplingParams
from headway.core.plan import ScheduledRequest, StepPlan, StepResult
from headway.core.request import FinishReason, Request, RequestState
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
