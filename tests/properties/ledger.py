"""The books kept beside an engine: what every request may still say, and must say exactly once.

`Ledger` reads events as a client would. `WatchedExecutor` reads plans as an executor would. Both
raise AssertionError at the first entry that does not add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isclose

from headway.core.causes import CauseTime, WaitCause
from headway.core.events import (
    Admitted,
    Arrived,
    EngineLost,
    Event,
    Finished,
    Forked,
    Idled,
    Preempted,
    Refused,
    Stepped,
    TokensEmitted,
)
from headway.core.executor import Capacity, Ticket
from headway.core.plan import Failure, Sample, StepPlan, StepResult
from headway.core.request import FinishReason, Request, sample_id
from headway.executors.fake import FakeExecutor, next_token


def require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


@dataclass(slots=True)
class Entry:
    """What the ledger knows of one live sample."""

    prompt: tuple[int, ...]
    request: Request
    index: int
    since: float
    """When it last began to wait."""
    place: str = "waiting"
    output: list[int] = field(default_factory=list[int])
    may_fork: int = 0
    was_preempted: bool = False


class Ledger:
    """A sink. Every token is compared with the oracle the moment it is emitted."""

    def __init__(self, policy: str, find: Callable[[str], Request]) -> None:
        self.live: dict[str, Entry] = {}
        self.counts: Counter[str] = Counter()
        self._policy = policy
        self._find = find
        self.wait_s: Counter[WaitCause] = Counter()
        self._offered: dict[str, Entry] = {}

    def offer(self, request: Request) -> None:
        """Announce a request before it is added: exactly one answer must follow."""
        require(not self._offered, "two requests offered at once")
        prompt, num_others = tuple(request.token_ids), request.params.n - 1
        self._offered[request.id] = Entry(
            prompt, request, 0, request.arrived_at, may_fork=num_others
        )

    def answered(self) -> None:
        require(not self._offered, "a request was neither accepted nor refused")

    def __call__(self, events: Sequence[Event]) -> None:
        self._read(events)
        self._nobody_left_in_vain([event for event in events if isinstance(event, Preempted)])

    def _read(self, events: Sequence[Event]) -> None:
        for event in events:
            self.counts[type(event).__name__] += 1
            if isinstance(event, Arrived):
                self.live[event.request_id] = self._offered.pop(event.request_id)
            elif isinstance(event, Refused):
                self._offered.pop(event.request_id)
            elif not isinstance(event, Stepped | Idled | EngineLost):
                entry = self.live.get(event.request_id)
                if isinstance(event, Forked):
                    self._forked(event, entry)
                else:
                    require(entry is not None, f"{event} for a request that is not live")
                    self._on(event, entry)  # type: ignore[arg-type]

    def _forked(self, event: Forked, entry: Entry | None) -> None:
        require(entry is None, f"{event.request_id} forked twice")
        parent = self.live[event.parent_id]
        index = int(event.request_id.rpartition("#")[2])
        require(parent.place == "running" and parent.may_fork > 0, f"{event} out of turn")
        require(event.request_id == sample_id(event.parent_id, index), "a child misnamed")
        parent.may_fork -= 1
        child = self._find(event.request_id)
        self.live[event.request_id] = Entry(parent.prompt, child, index, event.at, place="forked")

    def _on(self, event: Event, entry: Entry) -> None:
        if isinstance(event, Admitted):
            require(entry.place in ("waiting", "forked"), f"{event} while {entry.place}")
            require(event.is_resumed == entry.was_preempted, f"{event}: resumed or not")
            require(event.num_cached_tokens < event.num_tokens, f"{event}: nothing to compute")
            require(event.waited_s == event.at - entry.since, f"{event}: waits from {entry.since}")
            self._add_up(event, event.causes, event.waited_s)
            entry.place = "running"
        elif isinstance(event, Preempted):
            require(entry.place in ("running", "forked"), f"{event} while {entry.place}")
            self._check_preemption_by_priority(event, entry)
            self.counts[f"preempted_{event.method}"] += 1
            entry.place, entry.was_preempted, entry.since = "waiting", True, event.at
        elif isinstance(event, TokensEmitted):
            self._emitted(event, entry)
        elif isinstance(event, Finished):
            self._finished(event, entry)
            del self.live[event.request_id]

    def _add_up(self, event: Event, causes: Sequence[CauseTime], waited_s: float) -> None:
        """Each cause is named once, and together they are the wait."""
        require(len({one.cause for one in causes}) == len(causes), f"{event}: a cause twice")
        require(all(one.seconds > 0 for one in causes), f"{event}: a cause without time")
        total_s = sum(one.seconds for one in causes)
        require(isclose(total_s, waited_s, rel_tol=1e-9, abs_tol=1e-7), f"{event}: {total_s} s")
        self.wait_s.update(dict(causes))

    def _check_preemption_by_priority(self, event: Preempted, victim: Entry) -> None:
        claimant = self.live[event.by]
        if event.cause is WaitCause.KV_QUOTA:
            own = victim.request.terms.tenant == claimant.request.terms.tenant
            require(own, f"{event}: for the share of another")
        if claimant.place == "waiting":
            had_aged = victim.request.is_aged and not self._is_spot(victim.request)
            require(not had_aged, f"{event}: had aged")
            require(self._outranks(claimant, victim), f"{event}: of equal rank")
        elif self._policy != "fair":
            require(self._claim(victim) >= self._claim(claimant), f"{event}: by a lower priority")
        else:
            is_lower = self._is_spot(victim.request) >= self._is_spot(claimant.request)
            require(is_lower, f"{event}: spot took from others")

    def _is_spot(self, request: Request) -> bool:
        return self._policy == "fair" and request.terms.is_spot

    def _outranks(self, claimant: Entry, victim: Entry) -> bool:
        """Natural claims only: a wait, however long, is no reason to throw anybody out."""
        strong, weak = claimant.request, victim.request
        if self._policy == "fair":
            is_own = strong.terms.tenant == weak.terms.tenant
            is_alike = strong.terms.is_spot == weak.terms.is_spot
            is_more_urgent = is_own and is_alike and strong.priority < weak.priority
            return strong.terms.is_spot < weak.terms.is_spot or is_more_urgent
        return self._policy == "priority" and strong.priority < weak.priority

    def _nobody_left_in_vain(self, preemptions: Sequence[Preempted]) -> None:
        """A request that preempted another runs; one that finds none to preempt preempts itself."""
        for event in preemptions:
            claimant = self.live.get(event.by)
            if claimant is not None and event.by != event.request_id:
                require(claimant.place != "waiting", f"{event}: in vain")

    def _claim(self, entry: Entry) -> tuple[float, float, int, int]:
        request = entry.request
        if request.is_aged or self._policy == "fcfs":
            return -inf, 0.0, request.arrival_order, entry.index
        rank = request.priority if self._policy == "priority" else 0
        start_by = request.start_by if self._policy == "deadline" else 0.0
        return rank, start_by, request.arrival_order, entry.index

    def _emitted(self, event: TokensEmitted, entry: Entry) -> None:
        require(entry.place in ("running", "forked"), f"{event} while {entry.place}")
        require(entry.may_fork == 0, f"{event} before its siblings were born")
        entry.place = "running"
        for token_id in event.token_ids:
            context = (*entry.prompt, *entry.output)
            oracle = next_token(context, entry.request.seed, entry.index)
            require(token_id == oracle, f"{event.request_id}: token {len(entry.output)} is wrong")
            entry.output.append(token_id)

    def _finished(self, event: Finished, entry: Entry) -> None:
        self.counts[f"finished_{event.reason}"] += 1
        params, output = entry.request.params, entry.output
        require(event.num_output_tokens == len(output), f"{event}: {len(output)} tokens emitted")
        last_stops = bool(output) and output[-1] in params.stop_token_ids
        if event.reason is FinishReason.STOP:
            require(last_stops and len(output) >= params.min_tokens, f"{event}: no stop token")
        elif event.reason is FinishReason.LENGTH:
            require(len(output) == params.max_tokens, f"{event}: {len(output)} tokens")
        else:
            require(len(output) < (params.max_tokens or 0), f"{event}: had already ended")
        left_from = event.at - entry.since if entry.place == "waiting" else 0.0
        if entry.place != "forked":
            self._add_up(event, event.causes, left_from)
        require(event.kv_block_s >= 0.0, f"{event}: held less than nothing")
        for at, token_id in enumerate(output[:-1], start=1):
            ends = token_id in params.stop_token_ids and at >= params.min_tokens
            require(not ends, f"{event}: should have stopped after {at} tokens")

    @property
    def num_accepted(self) -> int:
        return self.counts["Arrived"] + self.counts["Forked"]


class WatchedExecutor:
    """FakeExecutor, seeing to it that a plan makes sense to one who knows only plans."""

    def __init__(self, capacity: Capacity) -> None:
        self._inner = FakeExecutor(capacity)
        self._capacity = capacity
        self._tables: dict[str, list[int]] = {}
        self.num_saves = self.num_loads = 0
        self._fail: set[str] = set()
        self._last_step_id = 0
        self._last_plan: StepPlan | None = None

    @property
    def known_ids(self) -> set[str]:
        return set(self._tables)

    def fail_next(self, request_id: str) -> None:
        """Let this request's part of the next plan it is in fail."""
        self._fail.add(request_id)

    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> Ticket:
        require(plan.step_id > self._last_step_id, "a step id came twice")
        self._last_step_id, self._last_plan = plan.step_id, plan
        require(len(set(plan.released_ids)) == len(plan.released_ids), "released twice")
        for request_id in plan.released_ids:
            self._tables.pop(request_id, None)
        targets = [copy.target for copy in plan.copies]
        require(len(set(targets)) == len(targets), "two copies into one block")
        self._check_moves(plan)
        for item in plan.scheduled:
            require((item.new is not None) != (item.request_id in self._tables), "new or known?")
            self._tables.setdefault(item.request_id, []).extend(item.block_ids)
            require(bool(item.token_ids), f"{item.request_id} is scheduled for nothing")
        self._check_writes(plan)
        return self._inner.submit(plan)

    def _check_moves(self, plan: StepPlan) -> None:
        """No slot is loaded from twice, and no block is loaded into twice."""
        self.num_saves += len(plan.saves)
        self.num_loads += len(plan.loads)
        slot_ids = {load.slot_id for load in plan.loads}
        block_ids = {load.block_id for load in plan.loads}
        require(len(slot_ids) == len(block_ids) == len(plan.loads), "loads get in each other's way")

    def _check_writes(self, plan: StepPlan) -> None:
        """A block that is written has one owner among the requests that are still held."""
        owners = Counter(block for table in self._tables.values() for block in table)
        size = self._capacity.block_size
        for item in plan.scheduled:
            end = item.start + len(item.token_ids)
            for block in self._tables[item.request_id][item.start // size : -(-end // size)]:
                require(owners[block] == 1, f"block {block} is shared and written")

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._inner.collect(ticket)
        plan = self._last_plan
        if plan is None or not self._fail:
            return result
        outcomes: list[Sample | Failure | None] = []
        for item, outcome in zip(plan.scheduled, result.outcomes, strict=True):
            outcomes.append(Failure("injected") if item.request_id in self._fail else outcome)
            self._fail.discard(item.request_id)
        return StepResult(result.step_id, tuple(outcomes), result.elapsed_s)

    def close(self) -> None:
        self._inner.close()
