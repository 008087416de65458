"""A router whose calls are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.events import Stepped
from headway.core.request import Request
from headway.core.slo.steptime import StepCost
from headway.record.recording import Recording
from headway.record.router.encoder import (
    AdmitCall,
    ArriveCall,
    DrainCall,
    FinishCall,
    FirstTokenCall,
    ForgetCall,
    IdleCall,
    JoinCall,
    LoseCall,
    NewEngine,
    ReassignCall,
    RouterCall,
    StepCall,
    TickCall,
)
from headway.record.router.entries import ArrivedEntry
from headway.routing import AllowedEngines, EngineLimits, NoEngineInTime, Router, Rule, Sending

MAX_QUEUED_CALLS = 32_768
"""40 s of 8 engines with 50 steps per second each; 100 MB with prompts of 1,024 tokens."""
MAX_PENDING_CALLS = 64
MAX_PENDING_S = 0.1
"""Calls are passed to the thread that writes when so many wait, with the first one after so long,
and when no request is left."""


class _NotedAnswers:
    """Asks which engines may have a request; notes which questions of a call have a no.

    A shared router asks between calls too: such answers are not noted.
    """

    def __init__(self, allowed: AllowedEngines) -> None:
        self._allowed = allowed
        self._num_asked = 0
        self._denied: list[int] | None = None

    @property
    def restricts(self) -> bool:
        return self._allowed.restricts

    def may_assign(self, request: Request, engine: str) -> bool:
        return self._note(self._allowed.may_assign(request, engine))

    def may_send(self, request: Request, engine: str) -> bool:
        return self._note(self._allowed.may_send(request, engine))

    def _note(self, answer: bool) -> bool:
        if not answer and self._denied is not None:
            self._denied.append(self._num_asked)
        self._num_asked += 1
        return answer

    def start_call(self) -> None:
        """Count the questions from here on."""
        self._num_asked, self._denied = 0, []

    def end_call(self) -> list[int]:
        """Return the positions of the questions since `start_call` that were answered with no."""
        denied, self._denied = self._denied or [], None
        return denied


class RecordedRouter(Router):
    """A Router that records its calls once `record` was called; it decides as a Router does."""

    def __init__(self, rule: Rule, allowed: AllowedEngines) -> None:
        self._answers = _NotedAnswers(allowed)
        self._recording: Recording[RouterCall] | None = None
        self._block_size = 0
        """Tokens of a block of the first engine: those of the recorded hashes."""
        self._num_pending = 0
        self._flushed_at = self._now = 0.0
        super().__init__(rule, self._answers)

    def record(self, recording: Recording[RouterCall] | None) -> None:
        """Record all further calls; before the first of them."""
        self._recording = recording

    def _put(self, call: RouterCall, now: float | None = None) -> None:
        recording = self._recording
        if recording is None or not recording.is_open:
            return
        recording.put(call)
        self._now = self._now if now is None else now
        self._num_pending += 1
        is_due = self._now > self._flushed_at + MAX_PENDING_S or not self._requests
        if is_due or self._num_pending >= MAX_PENDING_CALLS:
            self._num_pending, self._flushed_at = 0, self._now
            recording.flush()

    # ------------------------------------------------------------------ engines

    def engine_joined(self, name: str, limits: EngineLimits, cost: StepCost | None = None) -> None:
        super().engine_joined(name, limits, cost)
        self._block_size = self._block_size or limits.block_size
        self._put(JoinCall(name, limits, cost))

    def engine_lost(self, name: str, now: float) -> list[str]:
        forgotten, waiting = list(self._engines[name].sent), self._waiting_for(name)
        self._answers.start_call()
        moved = super().engine_lost(name, now)
        denied = self._answers.end_call()
        self._put(LoseCall(now, name, forgotten, self._engines_of(waiting), denied), now)
        return moved

    def engine_draining(self, name: str, now: float) -> None:
        waiting = self._waiting_for(name)
        self._answers.start_call()
        super().engine_draining(name, now)
        denied = self._answers.end_call()
        self._put(DrainCall(now, name, self._engines_of(waiting), denied), now)

    def _waiting_for(self, engine: str) -> list[str]:
        return [request.id for request in self._engines[engine].queue.requests]

    def _engines_of(self, request_ids: list[str]) -> list[NewEngine]:
        return [NewEngine(one, self.engine_of(one)) for one in request_ids]

    def observe(self, name: str, stepped: Stepped, now: float) -> None:
        super().observe(name, stepped, now)
        self._put(StepCall(now, name, stepped), now)

    def idle(self, name: str, num_blocks_used: int) -> None:
        super().idle(name, num_blocks_used)
        self._put(IdleCall(name, num_blocks_used))

    # ----------------------------------------------------------------- requests

    def arrive(
        self, request: Request, now: float, is_resent: bool = False
    ) -> str | NoEngineInTime | None:
        self._answers.start_call()
        outcome = super().arrive(request, now, is_resent)
        entry = _entry_of(request, now)
        entry.is_resent, entry.denied = is_resent, self._answers.end_call()
        if isinstance(outcome, NoEngineInTime):
            entry.late_s = outcome.retry_after_s
            self._put_request(entry, request, None, now)
        else:
            self._put_request(entry, request, outcome, now)
        return outcome

    def restore(self, request: Request, engine_name: str, now: float) -> None:
        super().restore(request, engine_name, now)
        entry = _entry_of(request, now)
        entry.is_sent = True
        self._put_request(entry, request, engine_name, now)

    def _put_request(
        self, entry: ArrivedEntry, request: Request, engine: str | None, now: float
    ) -> None:
        one = self._requests.get(request.id)
        # The router has hashed the prompt to find engines with its prefix.
        hashes = [] if one is None or not self._block_size else one.hashes(self._block_size)
        salt = request.terms.prefix_salt
        self._put(ArriveCall(entry, request.token_ids, salt, hashes, engine), now)

    def reassign(self, request_id: str, now: float) -> None:
        self._answers.start_call()
        super().reassign(request_id, now)
        denied = self._answers.end_call()
        if request_id in self._requests:
            placement = NewEngine(request_id, self.engine_of(request_id))
            self._put(ReassignCall(now, placement, denied), now)

    def forget(self, request_id: str) -> None:
        is_sent = self.is_sent(request_id)
        super().forget(request_id)
        if is_sent:  # else it has ended by `finished`
            self._put(ForgetCall(request_id))

    def admitted(self, request_id: str, num_cached_tokens: int) -> None:
        super().admitted(request_id, num_cached_tokens)
        if request_id in self._requests:
            self._put(AdmitCall(request_id, num_cached_tokens))

    def first_token(self, request_id: str) -> None:
        super().first_token(request_id)
        if request_id in self._requests:
            self._put(FirstTokenCall(request_id))

    def finished(self, request_id: str, output_ids: Sequence[int] = ()) -> None:
        is_known = request_id in self._requests
        super().finished(request_id, output_ids)
        if is_known:
            self._put(FinishCall(self._now, request_id, output_ids))

    def tick(self, now: float) -> list[Sending]:
        self._answers.start_call()
        sendings = super().tick(now)
        self._put(TickCall(now, sendings, self._answers.end_call()), now)
        return sendings


def _entry_of(request: Request, now: float) -> ArrivedEntry:
    """Return the entry of a request that arrives, without its engine and hashes."""
    params = request.params
    return ArrivedEntry(
        now=now,
        id=request.id,
        num_tokens=request.num_tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=params.max_tokens or 0,
        arrived_at=request.arrived_at,
        terms=request.terms,
        priority=request.priority,
        n=params.n,
        has_prompt_logprobs=params.prompt_logprobs is not None,
    )
