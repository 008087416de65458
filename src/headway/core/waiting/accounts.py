"""Service given to each tenant, in weighted tokens, and its running requests.

Service is charged as it is given: the tokens of a prompt at admission (those not computed when the
request leaves are refunded), output tokens as they are sampled, and KV blocks by the second. Tokens
computed again after a preemption are not charged again.

A tenant has one account for its ordinary requests and one for its spot requests. Service on unused
capacity is on a scale of its own: a tenant's share neither pays for it nor gains by it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from headway.core.request import Request
from headway.core.terms import Terms

PROMPT_COST = 1.0
SCORED_COST = 1.0
"""Of a prompt token whose log-probability is wanted, beside its own cost."""
CACHED_COST = 0.1
OUTPUT_COST = 2.0
BLOCK_S_COST = 0.05
"""Per KV block and second: a request of 20 blocks pays one token a second."""
MAX_IDLE_ACCOUNTS = 16_384
"""Accounts of idle tenants that are kept; beyond, the longest idle is dropped."""
GAP_PERIOD_S = 1.0
"""How often the service gap is computed: 1 ms for 10,000 waiting tenants."""


@dataclass(frozen=True, slots=True)
class Lead:
    """How far a tenant is ahead of its share."""

    excess: float
    """Service beyond what an SLO request may take ahead of its tenant's turn, over the weight;
    below zero there is some of that left."""
    weight: float
    others_weight: float
    """Of the tenant that is to catch up."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Leads of tenants with SLO requests, while other tenants wait for their turn."""

    leads: dict[str, Lead]

    def owed(self, tenant: str, num_ahead: float) -> float:
        """Service that others get before the next request of a tenant, in weighted tokens.

        `num_ahead` is what the tenant's open requests will be charged before it.
        """
        lead = self.leads.get(tenant)
        if lead is None:
            return 0.0
        return max(0.0, lead.excess + num_ahead / lead.weight) * lead.others_weight


NO_SHARES = Shares({})


@dataclass(slots=True, eq=False)
class TenantAccount:
    """Service counter of one tenant, for its ordinary or its spot requests.

    `counter` is service divided by weight, lifted when the tenant returns from idleness. It never
    falls, so heaps over it may be corrected lazily.
    """

    tenant: str
    is_spot: bool = False
    weight: float = 1.0
    counter: float = 0.0
    served: float = 0.0
    """Service in weighted tokens since the account was opened, not divided and not lifted."""
    credit: float = 0.0
    """Service refunded; the next charges use it up."""
    num_waiting: int = 0
    num_live: int = 0
    """Requests, waiting or running."""
    priorities: Counter[int] = field(default_factory=Counter[int])
    """Running samples by priority; aged requests do not count."""

    def charge(self, amount: float) -> None:
        self.served += amount
        if self.credit:
            used = min(self.credit, amount)
            self.credit -= used
            amount -= used
        self.counter += amount / self.weight

    def refund(self, amount: float) -> None:
        self.served -= amount
        self.credit += amount


class Accounts:
    """The accounts of all tenants with requests here, and of some idle ones."""

    def __init__(self) -> None:
        self.num_running = 0
        """Running samples of all tenants, and samples yet to fork."""
        self.running: Counter[str] = Counter()
        """The same by tenant."""
        self._waiting: dict[str, TenantAccount] = {}
        """Accounts of the tenants that have waiting ordinary requests."""
        self.active_weight = 0.0
        """Sum of the weights of the tenants with ordinary requests."""
        self._num_active = 0
        """Tenants with ordinary requests."""
        self._gap = 0.0
        self._gap_at = -inf
        """When the service gap was last computed."""
        self._accounts: dict[bool, dict[str, TenantAccount]] = {False: {}, True: {}}
        """Ordinary accounts under False, those of spot requests under True."""
        self._idle: OrderedDict[TenantAccount, None] = OrderedDict()
        self._marks: dict[str, int] = {}
        """Of preempted requests: prompt tokens charged and computed."""

    def __len__(self) -> int:
        return sum(map(len, self._accounts.values()))

    def of(self, request: Request) -> TenantAccount:
        terms = request.terms
        return self._accounts[terms.is_spot][terms.tenant]

    def get(self, tenant: str, is_spot: bool = False) -> TenantAccount | None:
        return self._accounts[is_spot].get(tenant)

    def num_waiting(self, tenant: str) -> int:
        """Return how many requests of a tenant wait, ordinary and spot."""
        both = (self.get(tenant), self.get(tenant, is_spot=True))
        return sum(account.num_waiting for account in both if account is not None)

    def open(self, request: Request) -> TenantAccount:
        """Return the account for a request that arrives, which sets the weight of the account."""
        terms = request.terms
        accounts = self._accounts[terms.is_spot]
        account = accounts.get(terms.tenant)
        if account is None:
            account = accounts[terms.tenant] = TenantAccount(terms.tenant, terms.is_spot)
        if not terms.is_spot:
            self._num_active += not account.num_live
            self.active_weight += terms.weight - (account.weight if account.num_live else 0.0)
        account.weight = terms.weight
        account.num_live += 1
        return account

    def share(self, terms: Terms) -> float:
        """Return the fair share of a tenant with a request of these terms, 0 to 1."""
        if terms.is_spot:
            return 0.0
        account = self.get(terms.tenant)
        own = account.weight if account is not None and account.num_live else 0.0
        return terms.weight / max(terms.weight, self.active_weight - own + terms.weight)

    def close(self, request: Request) -> None:
        """Count a request of a tenant as ended; the account is idle after its last one."""
        account = self.of(request)
        account.num_live -= 1
        if account.num_live:
            return
        if not account.is_spot:
            self._num_active -= 1
            self.active_weight -= account.weight
            if not self._num_active:
                self.active_weight = 0.0  # without the rounding errors of the sum
        self._idle[account] = None
        self._idle.move_to_end(account)
        while len(self._idle) > MAX_IDLE_ACCOUNTS:
            account, _ = self._idle.popitem(last=False)
            if not account.num_live:
                del self._accounts[account.is_spot][account.tenant]

    # ----------------------------------------------------------------- waiting

    def begin_wait(self, request: Request) -> None:
        """Count a request as waiting."""
        account = self.of(request)
        account.num_waiting += 1
        if not account.is_spot:
            self._waiting[account.tenant] = account

    def end_wait(self, request: Request) -> None:
        """Count a request as no longer waiting."""
        account = self.of(request)
        account.num_waiting -= 1
        if not account.num_waiting and not account.is_spot:
            del self._waiting[account.tenant]

    def service_gap(self, now: float) -> float:
        """Return the largest difference between the service counters of waiting tenants.

        Spot requests do not count. Looks at every waiting tenant, so the value may be up to
        GAP_PERIOD_S old.
        """
        if len(self._waiting) < 2:
            return 0.0
        if now - self._gap_at >= GAP_PERIOD_S:
            counters = [account.counter for account in self._waiting.values()]
            self._gap, self._gap_at = max(counters) - min(counters), now
        return self._gap

    # ----------------------------------------------------------------- running

    def start(self, request: Request, num_samples: int) -> None:
        """Count samples of a request as running."""
        account = self.of(request)
        self.running[account.tenant] += num_samples
        if not request.is_aged:
            account.priorities[request.priority] += num_samples
        self.num_running += num_samples

    def stop(self, request: Request, num_samples: int) -> None:
        """Count samples of a request as no longer running."""
        account = self.of(request)
        self.running[account.tenant] -= num_samples
        if not request.is_aged:
            account.priorities[request.priority] -= num_samples
            if not account.priorities[request.priority]:
                del account.priorities[request.priority]
        if not self.running[account.tenant]:
            del self.running[account.tenant]
        self.num_running -= num_samples

    # ------------------------------------------------------------------ charges

    def charge_prompt(self, request: Request, num_cached: int) -> None:
        """Charge the part of the prompt not yet charged, at admission."""
        num_paid = self._marks.get(request.id, 0)
        end_cached = min(num_cached, request.num_prompt_tokens)
        num_cached = max(0, end_cached - num_paid)
        num_fresh = request.num_prompt_tokens - max(end_cached, num_paid)
        self.of(request).charge(CACHED_COST * num_cached + _prompt_cost(request) * num_fresh)

    def refund_prompt(self, request: Request) -> None:
        """Refund the part of the prompt charged and not computed, when the request stops."""
        num_done = max(request.num_computed, self._marks.get(request.id, 0))
        num_missing = request.num_prompt_tokens - num_done
        if num_missing > 0:
            self.of(request).refund(_prompt_cost(request) * num_missing)

    def mark_charged(self, request: Request, num_tokens: int) -> None:
        """Remember how much of the prompt is charged, for the next admission."""
        known = self._marks.get(request.id, 0)
        self._marks[request.id] = max(known, min(num_tokens, request.num_prompt_tokens))

    def forget_charged(self, request: Request) -> None:
        self._marks.pop(request.id, None)

    def charge_blocks(self, request: Request, block_s: float) -> None:
        """Charge blocks times seconds."""
        self.of(request).charge(BLOCK_S_COST * block_s)

    def charge_output(self, sampled: Sequence[str], is_spot: bool = False) -> None:
        """Charge one output token for each occurrence of a tenant in `sampled`."""
        if not sampled:
            return
        accounts, num_first = self._accounts[is_spot], sampled.count(sampled[0])
        is_one = num_first == len(sampled)
        counts = {sampled[0]: num_first} if is_one else Counter(sampled)
        for tenant, num_tokens in counts.items():
            account, amount = accounts[tenant], OUTPUT_COST * num_tokens
            if account.credit:
                account.charge(amount)
            else:  # the same without a call, for nearly every tenant in every step
                account.served += amount
                account.counter += amount / account.weight

    def charge_lost(self, tenant: str, amount: float) -> None:
        """Charge service that no tenant got because this one's targets shortened a step."""
        account = self.get(tenant)
        if account is not None:
            account.counter += amount / account.weight

    def check(self, running: Iterable[Request]) -> None:
        ordinary = self._accounts[False].values()
        weights = [one.weight for one in ordinary if one.num_live]
        if abs(sum(weights) - self.active_weight) > 1e-6 * (1.0 + sum(weights)):
            raise AssertionError(f"weights {weights} do not add up to {self.active_weight}")
        if len(weights) != self._num_active:
            raise AssertionError(f"{len(weights)} tenants are active, not {self._num_active}")
        waiting = {one.tenant for one in ordinary if one.num_waiting}
        if waiting != self._waiting.keys():
            raise AssertionError(f"tenants {waiting} wait, {self._waiting.keys()} are counted")
        samples: Counter[str] = Counter()
        priorities: dict[TenantAccount, Counter[int]] = {}
        for request in running:
            samples[request.terms.tenant] += request.params.n
            if not request.is_aged:
                counts = priorities.setdefault(self.of(request), Counter())
                counts[request.priority] += request.params.n
        if samples != self.running or samples.total() != self.num_running:
            raise AssertionError(f"{samples} run, {self.running} are counted")
        for account in (*ordinary, *self._accounts[True].values()):
            if account.priorities != priorities.get(account, Counter()):
                raise AssertionError(f"{account} miscounts its priorities")


def _prompt_cost(request: Request) -> float:
    return PROMPT_COST if request.params.prompt_logprobs is None else PROMPT_COST + SCORED_COST
