"""Open SLO requests: live requests with targets, what is left of each, and the demand of all.

A waiting request has an entry in the demand tables. The work of running requests is collected anew
when the tables are read after a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from headway.core.request import FinishReason, Request, RequestState
from headway.core.slo.demand import (
    BY_SHARE,
    DemandEntry,
    DemandTable,
    OutputLengths,
    RunningWork,
    entry_of,
)
from headway.core.slo.forecast import Demand
from headway.core.slo.steptime import StepCost
from headway.core.slo.targets import RemainingWork, remaining_work, tightness_of
from headway.core.waiting.accounts import OUTPUT_COST, PROMPT_COST

COST_TOLERANCE = 0.01
"""Relative change of a cost coefficient that is ignored in the demand tables: a new cost means
computing all of their entries again."""
ENDED = (FinishReason.STOP, FinishReason.LENGTH)


class OpenRequests:
    """Live requests with targets, and their work by due time, in total and by tenant."""

    def __init__(self, cost: StepCost) -> None:
        self.requests: dict[str, Request] = {}
        """By id, waiting or running."""
        self.lengths = OutputLengths()
        self.first_token_at: dict[str, float] = {}
        self.tables: dict[str, DemandTable] = {}
        """By tenant."""
        self._table = DemandTable()
        """Of all tenants."""
        self._cost = self._table_cost = cost
        self._num_cached: dict[str, int] = {}
        """Tokens of requests that were cached when they arrived."""
        self._entries: dict[str, DemandEntry] = {}
        """Table entries of the requests that wait."""
        self._running_ids: set[str] = set()
        """Requests that were running at the last refresh."""
        self._changed_tenants: set[str] = set()
        """Tenants with requests that were running then, or that left the tables since then."""
        self._is_stale = True
        """Whether requests may have started, ended or progressed since then."""

    def work(self, request: Request, num_cached: int | None = None) -> RemainingWork:
        """Return what is left of a request, with its expected output length."""
        if num_cached is None:
            num_cached = self._num_cached.get(request.id, 0)
        first_token_at = self.first_token_at.get(request.id)
        return remaining_work(request, self.num_left(request), first_token_at, num_cached)

    def num_left(self, request: Request) -> int:
        """Return the expected number of further output tokens."""
        terms, max_tokens = request.terms, request.params.max_tokens or 1
        num_output = request.num_output_tokens
        return self.lengths.expected_left(terms.tenant, terms.tier, num_output, max_tokens)

    def demand(self, now: float) -> Demand:
        """Return the work of all requests; `refresh` first."""
        return self._demand_in(self._table, now)

    def tenant_demand(self, tenant: str, now: float) -> Demand | None:
        """Return the work of one tenant's requests, None if it has none; `refresh` first."""
        table = self.tables.get(tenant)
        return None if table is None else self._demand_in(table, now)

    def _demand_in(self, table: DemandTable, now: float) -> Demand:
        cost = self._table_cost
        return Demand(table.due(cost), table.starts(cost), table.tighter.rates(now))

    def set_cost(self, cost: StepCost) -> None:
        """Set the cost of work, as of the last step."""
        self._cost = cost
        if not cost.is_close(self._table_cost, COST_TOLERANCE):
            self._table_cost = cost

    # ------------------------------------------------------ requests come and go

    def add(
        self, request: Request, work: RemainingWork, num_cached: int, is_by_share: bool, now: float
    ) -> None:
        """Add a request that was admitted with this work."""
        self.requests[request.id] = request
        self._num_cached[request.id] = num_cached
        self._enter(request, work, now)
        cost, tightness = self._cost, tightness_of(work.targets)
        if min(work.next_due_at, work.last_due_at) < inf and cost.is_known:
            work_s = cost.work_s(work.prefill) + cost.work_s(work.decodes)
            self._table.tighter.add(BY_SHARE if is_by_share else tightness, work_s, now)
            self.tables[request.terms.tenant].tighter.add(tightness, work_s, now)

    def add_forked(self, parent: Request, children: Iterable[Request]) -> None:
        """Add further samples of a prompt, with the prompt's targets."""
        if parent.id in self.requests:
            for child in children:
                self.requests[child.id] = child
                self._running_ids.add(child.id)
            self._is_stale = True

    def leave(self, request: Request) -> None:
        """Remove a request that has ended, and learn its length."""
        if self.requests.pop(request.id, None) is None:
            return
        self._num_cached.pop(request.id, None)
        self._exit(request)
        self.first_token_at.pop(request.id, None)
        self._is_stale = True
        if request.finish_reason in ENDED and request.params.max_tokens:
            terms, max_tokens = request.terms, request.params.max_tokens or 1
            num_tokens = request.num_output_tokens
            self.lengths.observe(terms.tenant, terms.tier, num_tokens, max_tokens)

    def follow(self, request: Request, now: float) -> None:
        """Update a request after a step that it was in."""
        if request.state is RequestState.FINISHED:
            self.leave(request)
        elif request.num_output_tokens and request.id not in self.first_token_at:
            # A request continued after a crash has earlier tokens; they count as on time.
            had_s = (request.num_output_tokens - 1) * (request.terms.targets.tpot_s or 0.0)
            self.first_token_at[request.id] = now - had_s

    # -------------------------------------------------------------------- tables

    def mark_stale(self) -> None:
        """Have the next refresh collect the work of running requests."""
        self._is_stale = True

    def refresh(self, running: Iterable[Request], now: float) -> None:
        """Update the tables with requests that started, were preempted or progressed."""
        if not self._is_stale:
            return
        self._is_stale = False
        everyone = RunningWork()
        by_tenant: dict[str, RunningWork] = {}
        before, self._running_ids = self._running_ids, set()
        if self.requests:
            for request in running:
                if request.id in self.requests:
                    self._exit(request)
                    self._running_ids.add(request.id)
                    own = by_tenant.get(request.terms.tenant)
                    if own is None:
                        own = by_tenant[request.terms.tenant] = RunningWork()
                    self._collect(request, everyone, own)
            for request_id in before - self._running_ids:
                if request_id in self.requests and request_id not in self._entries:
                    preempted = self.requests[request_id]
                    self._enter(preempted, self.work(preempted), now)
        self._table.set_running(everyone)
        for tenant in self._changed_tenants | by_tenant.keys():
            work, table = by_tenant.get(tenant), self.tables.get(tenant)
            if table is None:
                table = self.tables[tenant] = DemandTable()
            table.set_running(work or RunningWork())
            if work is None and not table.num_waiting:
                del self.tables[tenant]
        self._changed_tenants = set(by_tenant)

    def _enter(self, request: Request, work: RemainingWork, now: float) -> None:
        """Add the work of a waiting request to the tables."""
        entry = entry_of(work.demands, request.start_by, work.prefill, now, _num_tokens(work))
        self._entries[request.id] = entry
        self._table.add(entry)
        self.tables.setdefault(request.terms.tenant, DemandTable()).add(entry)

    def _exit(self, request: Request) -> None:
        """Remove the work of a request that no longer waits from the tables."""
        entry = self._entries.pop(request.id, None)
        if entry is not None:
            self._table.remove(entry)
            self.tables[request.terms.tenant].remove(entry)
            self._changed_tenants.add(request.terms.tenant)

    def _collect(self, request: Request, everyone: RunningWork, own: RunningWork) -> None:
        work_s, work = self._cost.work_s, self.work(request)
        for due_at, shape in work.demands:
            point = (due_at, work_s(shape))
            everyone.due.append(point)
            own.due.append(point)
        if work.num_prefill_left:
            point = (request.start_by, work_s(work.prefill))
            everyone.starts.append(point)
            own.starts.append(point)
        own.num_tokens += _num_tokens(work)

    def check(self) -> None:
        """Check that the tables hold the waiting requests, in total and by tenant."""
        self._table.check(list(self._entries.values()))
        if not self._entries.keys() <= self.requests.keys():
            raise AssertionError("demand of requests that have ended")
        if sum(table.num_waiting for table in self.tables.values()) != len(self._entries):
            raise AssertionError("the demand of tenants does not add up")
        tenants = {one.terms.tenant for one in self.requests.values()}
        if not self.tables.keys() <= tenants | self._changed_tenants:
            raise AssertionError("tables of tenants without requests")


def _num_tokens(work: RemainingWork) -> float:
    """Return the weighted tokens that the tenant will be charged."""
    num_output = work.num_samples * work.num_output_left
    return PROMPT_COST * work.num_prefill_left + OUTPUT_COST * num_output
