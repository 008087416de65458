"""What each tenant has been given: service in weighted tokens, seats, and its place in fairness.

Service is charged as it is given: the tokens of a prompt when it gets its seat (those it leaves
before they are computed are given back), output tokens as they are sampled, and the blocks held
over time. Tokens computed again after a preemption are not charged again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from headway.core.request import Request
from headway.core.terms import Terms

PROMPT_COST = 1.0
CACHED_COST = 0.1
OUTPUT_COST = 2.0
BLOCK_S_COST = 0.05
"""Of a block held for a second. A request of 20 blocks pays a token a second."""
MAX_IDLE_ACCOUNTS = 16_384
"""Accounts kept of tenants that have nothing here; beyond, the longest idle are forgotten."""


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
class Account:
    """One tenant. `counter` is its service divided by its weight, lifted when it comes back from
    idleness; it never falls, so that heaps over it may be corrected lazily."""

    tenant: str
    weight: float = 1.0
    counter: float = 0.0
    served: float = 0.0
    """Service in weighted tokens since the account was opened, not divided and not lifted."""
    credit: float = 0.0
    """Service charged and not given; the next charges use it up."""
    num_in_line: int = 0
    """Its requests that wait for their turn; those waiting for blocks of its own do not count."""
    num_seats: int = 0
    num_live: int = 0
    """Its requests here, waiting or running."""
    num_firm: int = 0
    """Those that are not spot."""
    grades: Counter[int] = field(default_factory=Counter[int])
    """How many seats of its requests have which priority; those that have aged do not count."""

    def charge(self, amount: float) -> None:
        self.served += amount
        if self.credit:
            used = min(self.credit, amount)
            self.credit -= used
            amount -= used
        self.counter += amount / self.weight

    def give_back(self, amount: float) -> None:
        self.served -= amount
        self.credit += amount


class Accounts:
    """The accounts of all tenants that have requests here, or had until lately."""

    def __init__(self) -> None:
        self.num_seats = 0
        """Seats taken, by running requests and by samples of theirs that have yet to fork."""
        self.seated: dict[str, Account] = {}
        self.active_weight = 0.0
        """Sum of the weights of the tenants that have requests here, spot left out."""
        self._accounts: dict[str, Account] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._marks: dict[str, int] = {}
        """Of requests that were preempted: how much of their prompt was charged and computed."""

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, request: Request) -> Account:
        return self._accounts[request.terms.tenant]

    def get(self, tenant: str) -> Account | None:
        return self._accounts.get(tenant)

    def open(self, request: Request) -> Account:
        """The account of a request that arrives; from now on its terms are the tenant's."""
        tenant = request.terms.tenant
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account(tenant)
        is_firm = not request.terms.is_spot
        if account.num_firm:
            self.active_weight += request.terms.weight - account.weight
        elif is_firm:
            self.active_weight += request.terms.weight
        account.weight = request.terms.weight
        account.num_live += 1
        account.num_firm += is_firm
        return account

    def share(self, terms: Terms) -> float:
        """The share of the machine that a tenant is entitled to, with a request of these terms."""
        if terms.is_spot:
            return 0.0
        account = self._accounts.get(terms.tenant)
        own = account.weight if account is not None and account.num_firm else 0.0
        return terms.weight / max(terms.weight, self.active_weight - own + terms.weight)

    def has_others(self, tenant: str) -> bool:
        """Whether another tenant has requests here that are not spot."""
        account = self._accounts.get(tenant)
        own = account.weight if account is not None and account.num_firm else 0.0
        return self.active_weight > own * 1.000001

    def close(self, request: Request) -> None:
        """A request of the tenant has ended."""
        account = self.of(request)
        account.num_live -= 1
        if not request.terms.is_spot:
            account.num_firm -= 1
            if not account.num_firm:
                self.active_weight = max(0.0, self.active_weight - account.weight)
        if account.num_live:
            return
        self._idle[account.tenant] = None
        self._idle.move_to_end(account.tenant)
        while len(self._idle) > MAX_IDLE_ACCOUNTS:
            tenant, _ = self._idle.popitem(last=False)
            account = self._accounts[tenant]
            if not account.num_live:
                del self._accounts[tenant]

    # ------------------------------------------------------------------- seats

    def seat(self, request: Request, num_seats: int) -> None:
        account = self.of(request)
        if not account.num_seats:
            self.seated[account.tenant] = account
        account.num_seats += num_seats
        if not request.is_aged:
            account.grades[request.priority] += num_seats
        self.num_seats += num_seats

    def unseat(self, request: Request, num_seats: int) -> None:
        account = self.of(request)
        account.num_seats -= num_seats
        if not request.is_aged:
            account.grades[request.priority] -= num_seats
            if not account.grades[request.priority]:
                del account.grades[request.priority]
        if not account.num_seats:
            del self.seated[account.tenant]
        self.num_seats -= num_seats

    # ------------------------------------------------------------------ charges

    def charge_prompt(self, request: Request, num_cached: int) -> None:
        """The part of the prompt that nobody has paid for, when the request gets its seat."""
        num_paid = self._marks.get(request.id, 0)
        end_cached = min(num_cached, request.num_prompt_tokens)
        num_cached = max(0, end_cached - num_paid)
        num_fresh = request.num_prompt_tokens - max(end_cached, num_paid)
        self.of(request).charge(CACHED_COST * num_cached + PROMPT_COST * num_fresh)

    def give_back_prompt(self, request: Request) -> None:
        """The part of the prompt that was charged and not computed, when it loses its seat."""
        num_done = max(request.num_computed, self._marks.get(request.id, 0))
        num_missing = request.num_prompt_tokens - num_done
        if num_missing > 0:
            self.of(request).give_back(PROMPT_COST * num_missing)

    def mark(self, request: Request, num_tokens: int) -> None:
        """So much of its prompt is paid for, should the request come to a seat again."""
        known = self._marks.get(request.id, 0)
        self._marks[request.id] = max(known, min(num_tokens, request.num_prompt_tokens))

    def forget(self, request: Request) -> None:
        self._marks.pop(request.id, None)

    def charge_blocks(self, request: Request, block_s: float) -> None:
        """Blocks times seconds that it held, since it was last asked."""
        self.of(request).charge(BLOCK_S_COST * block_s)

    def charge_output(self, sampled: Iterable[str]) -> None:
        """One token for each time a tenant is in `sampled`."""
        accounts = self._accounts
        for tenant, num_tokens in Counter(sampled).items():
            account, amount = accounts[tenant], OUTPUT_COST * num_tokens
            if account.credit:
                account.charge(amount)
            else:  # the same, spelled out: nearly every tenant meets it in every step
                account.served += amount
                account.counter += amount / account.weight

    def charge_lost(self, tenant: str, amount: float) -> None:
        """Service that nobody got, because this tenant's targets shortened a step."""
        account = self._accounts.get(tenant)
        if account is not None:
            account.counter += amount / account.weight

    def check(self, running: Iterable[Request]) -> None:
        weights = [one.weight for one in self._accounts.values() if one.num_firm]
        if abs(sum(weights) - self.active_weight) > 1e-6 * (1.0 + sum(weights)):
            raise AssertionError(f"weights {weights} do not add up to {self.active_weight}")
        seats: Counter[str] = Counter()
        grades: dict[str, Counter[int]] = {}
        for request in running:
            seats[request.terms.tenant] += request.params.n
            counted = 0 if request.is_aged else request.params.n
            grades.setdefault(request.terms.tenant, Counter())[request.priority] += counted
        if seats != {tenant: account.num_seats for tenant, account in self.seated.items()}:
            raise AssertionError(f"seats {seats} are not those of the accounts")
        if seats.total() != self.num_seats:
            raise AssertionError(f"{seats.total()} seats are taken, {self.num_seats} counted")
        for account in self.seated.values():
            if account.grades != grades[account.tenant]:
                raise AssertionError(f"{account} miscounts its priorities")
