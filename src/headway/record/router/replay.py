"""Replays a recording in a fresh router and finds the first decision that differs.

Requests have stand-in tokens: those of a block follow from its recorded hash, so that prompts share
the prefixes that they shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from headway.config import ROUTINGS
from headway.core.events import Stepped
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.slo.forecast import EngineSpeed, Forecast
from headway.core.slo.steptime import StepCost
from headway.errors import RecordingError
from headway.record.entries import HASH_BYTES
from headway.record.router.entries import (
    NO_ENGINE,
    AdmittedEntry,
    ArrivedEntry,
    DrainingEntry,
    EndedEntry,
    FirstTokenEntry,
    ForgottenEntry,
    IdleEntry,
    JoinedEntry,
    LostEntry,
    MovedRequest,
    ReassignedEntry,
    RecordedSending,
    RouterEntry,
    RouterHeader,
    SteppedEntry,
    TickEntry,
)
from headway.record.stand_ins import StandIns
from headway.routing import RULES, EngineLimits, NoEngineInTime, Router, Sending


@dataclass(frozen=True, slots=True)
class DecisionDifference:
    """A call of the replay has another outcome than in the recording."""

    num_equal: int
    """Decisions before it."""
    now: float
    recorded: tuple[str, ...]
    replayed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallFailure:
    """A call fails in the replay."""

    num_equal: int
    now: float
    error: str


RouterDifference = DecisionDifference | CallFailure


class _RecordedAnswers:
    """Answers the questions of a call as they were answered."""

    restricts = True

    def __init__(self) -> None:
        self._num_asked = 0
        self._denied: frozenset[int] = frozenset()

    def start_call(self, denied: Iterable[int]) -> None:
        self._num_asked, self._denied = 0, frozenset(denied)

    def may_assign(self, request: Request, engine: str) -> bool:
        self._num_asked += 1
        return self._num_asked - 1 not in self._denied

    def may_send(self, request: Request, engine: str) -> bool:
        return self.may_assign(request, engine)


class ReplayedRouter:
    """A fresh router that repeats the calls of a recording."""

    def __init__(self, header: RouterHeader) -> None:
        if header.rule not in ROUTINGS:
            raise RecordingError(f"this release has no --routing {header.rule}")
        self._answers = _RecordedAnswers()
        self.router = Router(RULES[header.rule](), self._answers)
        self._stand_ins = StandIns(first_token=1)
        self._engines: dict[int, str] = {}
        """Names by number."""
        self._engine_numbers = count()
        self._requests: dict[int, Request] = {}
        """Live requests by number."""
        self._numbers = count()
        self.num_decisions = 0
        """Requests assigned, refused, moved or sent so far."""
        self.now = 0.0
        """Time of the last call that had one."""

    def apply(self, entry: RouterEntry) -> DecisionDifference | None:
        """Repeat a call; return how its outcome differs, if it does."""
        self.now = getattr(entry, "now", self.now)
        self._answers.start_call(getattr(entry, "denied", ()))
        match entry:
            case TickEntry():
                return self._tick(entry)
            case SteppedEntry():
                self.router.observe(self._name(entry.engine), _stepped_of(entry), entry.now)
            case ArrivedEntry():
                return self._arrive(entry)
            case EndedEntry():
                self._end(entry)
            case JoinedEntry():
                self._join(entry)
            case LostEntry():
                return self._lose(entry)
            case DrainingEntry():
                return self._drain(entry)
            case ReassignedEntry():
                return self._reassign(entry)
            case _:
                self._tell(entry)
        return None

    def _tell(self, entry: RouterEntry) -> None:
        """Repeat a call that has no outcome."""
        router = self.router
        match entry:
            case AdmittedEntry():
                router.admitted(self._id(entry.request), entry.num_cached_tokens)
            case FirstTokenEntry():
                router.first_token(self._id(entry.request))
            case IdleEntry():
                router.idle(self._name(entry.engine), entry.num_blocks_used)
            case ForgottenEntry():
                router.forget(self._id(entry.request))
                del self._requests[entry.request]
            case _:
                raise RecordingError(f"{type(entry).__name__} is not a call of a router")

    def _name(self, engine: int) -> str:
        if engine not in self._engines:
            raise RecordingError(f"engine number {engine} has not joined")
        return self._engines[engine]

    def _request(self, number: int) -> Request:
        if number not in self._requests:
            raise RecordingError(f"request number {number} is not live")
        return self._requests[number]

    def _id(self, request: int) -> str:
        return self._request(request).id

    def _join(self, entry: JoinedEntry) -> None:
        self._stand_ins.block_size = self._stand_ins.block_size or entry.block_size
        for number, hashes in entry.hashes:
            request = self._request(number)
            request.token_ids[:] = self._tokens(hashes, request.num_tokens)
        self._engines[next(self._engine_numbers)] = entry.name
        limits = EngineLimits(
            entry.num_blocks,
            entry.block_size,
            entry.max_num_seqs,
            entry.token_budget,
            entry.has_prefix_cache,
        )
        cost = None if entry.cost is None else StepCost(*entry.cost)
        self.router.engine_joined(entry.name, limits, cost)

    def _lose(self, entry: LostEntry) -> DecisionDifference | None:
        name = self._name(entry.engine)
        sent = {
            number
            for number, one in self._requests.items()
            if self.router.is_sent(one.id) and self.router.engine_of(one.id) == name
        }
        waiting = self._waiting_for(name)
        self.router.engine_lost(name, entry.now)
        del self._engines[entry.engine]
        difference = self._compare_moved(entry.moved, waiting)
        for number in sent:
            del self._requests[number]
        return difference

    def _drain(self, entry: DrainingEntry) -> DecisionDifference | None:
        name = self._name(entry.engine)
        waiting = self._waiting_for(name)
        self.router.engine_draining(name, entry.now)
        return self._compare_moved(entry.moved, waiting)

    def _reassign(self, entry: ReassignedEntry) -> DecisionDifference | None:
        request_id = self._id(entry.request)
        self.router.reassign(request_id, entry.now)
        return self._compare_moved([MovedRequest(entry.request, entry.engine)], [request_id])

    def _waiting_for(self, engine: str) -> list[str]:
        for one in self.router.engines:
            if one.name == engine:
                return [request.id for request in one.queue.requests]
        return []

    def _compare_moved(
        self, recorded: Sequence[MovedRequest], replayed: Sequence[str]
    ) -> DecisionDifference | None:
        """Compare the engines of requests that lost theirs before they were sent."""
        before = [
            _assignment(self._id(number), None if engine == NO_ENGINE else self._name(engine))
            for number, engine in recorded
        ]
        now = [_assignment(one, self.router.engine_of(one)) for one in replayed]
        return self._compare(before, now)

    def _arrive(self, entry: ArrivedEntry) -> DecisionDifference | None:
        tokens = self._tokens(entry.hashes, entry.num_tokens)
        request = _request_of(entry, tokens)
        number = next(self._numbers)
        if entry.is_sent:
            self._requests[number] = request
            self.router.restore(request, self._name(entry.engine), entry.now)
            return None
        outcome = self.router.arrive(request, entry.now, entry.is_resent)
        if not isinstance(outcome, NoEngineInTime):
            self._requests[number] = request
        engine = None if entry.engine == NO_ENGINE else self._name(entry.engine)
        recorded = _assignment(entry.id, engine if entry.late_s is None else entry.late_s)
        is_refused = isinstance(outcome, NoEngineInTime)
        found = outcome.retry_after_s if is_refused else outcome
        return self._compare([recorded], [_assignment(entry.id, found)])

    def _end(self, entry: EndedEntry) -> None:
        request = self._request(entry.request)
        num_tokens = request.num_tokens
        # The output goes on in the block in which the prompt ends.
        start = num_tokens // self._block_size * self._block_size
        num_left = num_tokens - start + entry.num_output_tokens
        made = self._tokens(entry.hashes, num_left)
        request.token_ids[start:] = made[: num_tokens - start]
        self.router.finished(request.id, made[num_tokens - start :])
        del self._requests[entry.request]

    def _tokens(self, hashes: bytes, num_tokens: int) -> list[int]:
        """Return stand-in tokens of full blocks, and of what follows them."""
        num_hashed = len(hashes) // HASH_BYTES * self._stand_ins.block_size
        if num_hashed > num_tokens:
            raise RecordingError(f"{num_tokens} tokens of a request have {num_hashed} in blocks")
        return self._stand_ins.sequence(hashes, num_tokens)

    @property
    def _block_size(self) -> int:
        return self._stand_ins.block_size or 1

    def _tick(self, entry: TickEntry) -> DecisionDifference | None:
        sendings = self.router.tick(entry.now)
        if not (sendings or entry.sendings):
            return None
        recorded = [self._sending_line(one) for one in entry.sendings]
        return self._compare(recorded, [_line_of(one) for one in sendings])

    def _sending_line(self, one: RecordedSending) -> str:
        name = self._name(one.engine)
        return _line(self._id(one.request), name, one.reason, one.num_cached, one.predicted_ttft_s)

    def _compare(self, recorded: list[str], replayed: list[str]) -> DecisionDifference | None:
        if recorded == replayed:
            self.num_decisions += len(recorded)
            return None
        return DecisionDifference(self.num_decisions, self.now, tuple(recorded), tuple(replayed))


def find_router_difference(
    entries: Iterator[RouterEntry], replay: ReplayedRouter
) -> RouterDifference | None:
    """Replay a recording up to the first difference."""
    for entry in entries:
        try:
            difference = replay.apply(entry)
        except RecordingError:
            raise
        except Exception as error:  # a fault of the router, or another release recorded the call
            return CallFailure(replay.num_decisions, replay.now, f"{type(error).__name__}: {error}")
        if difference is not None:
            return difference
    return None


def _request_of(entry: ArrivedEntry, token_ids: list[int]) -> Request:
    params = SamplingParams(
        n=entry.n,
        max_tokens=entry.max_tokens,
        prompt_logprobs=0 if entry.has_prompt_logprobs else None,
    )
    return Request(
        id=entry.id,
        token_ids=token_ids,
        params=params,
        seed=0,
        arrived_at=entry.arrived_at,
        priority=entry.priority,
        terms=entry.terms,
        num_prompt_tokens=entry.num_prompt_tokens,
    )


def _stepped_of(entry: SteppedEntry) -> Stepped:
    cost = entry.cost
    # Of the speed, the router's decisions read the cost alone.
    forecast = None if cost is None else Forecast(EngineSpeed(StepCost(*cost), 0.0, 0.0))
    return Stepped(
        step_id=0,
        at=entry.now,
        elapsed_s=entry.elapsed_s,
        num_tokens=entry.num_tokens,
        token_budget=entry.token_budget,
        num_scheduled=entry.num_scheduled,
        max_num_seqs=0,
        num_running=entry.num_known,
        num_waiting=0,
        num_blocks_used=entry.num_blocks_used,
        num_blocks=0,
        forecast=forecast,
    )


def _assignment(request_id: str, outcome: str | float | None) -> str:
    """Return a line for an assignment to an engine, to none, or a refusal by its Retry-After."""
    if outcome is None:
        return f"{request_id} waits for any engine"
    if isinstance(outcome, str):
        return f"{request_id} waits for {outcome}"
    return f"{request_id} is refused, Retry-After {outcome!r} s"


def _line_of(sending: Sending) -> str:
    return _line(
        sending.request.id,
        sending.engine,
        str(sending.reason),
        sending.num_cached,
        sending.predicted_ttft_s,
    )


def _line(
    request_id: str, engine: str, reason: str, num_cached: int, predicted_ttft_s: float
) -> str:
    """Return a line for a request that is sent; a float is written with all its digits."""
    expected = f"{num_cached} cached, {predicted_ttft_s!r} s to the first token"
    return f"{request_id} to {engine} ({reason}; {expected})"
