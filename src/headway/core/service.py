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

PROMPT_COST = 1.0
CACHED_COST = 0.1
OUTPUT_COST = 2.0
BLOCK_S_COST = 0.05
"""Of a block held for a second. A request of 20 blocks pays a token a second."""
MAX_IDLE_ACCOUNTS = 16_384
"""Accounts kept of tenants that have nothing here; beyond, the longest idle are forgotten."""


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
        account.weight = request.terms.weight
        return account

    def close_if_idle(self, request: Request) -> None:
        """A request of the tenant has left the line or its seat."""
        account = self.of(request)
        if account.num_seats or account.num_in_line:
            return
        self._idle[account.tenant] = None
        self._idle.move_to_end(account.tenant)
        while len(self._idle) > MAX_IDLE_ACCOUNTS:
            tenant, _ = self._idle.popitem(last=False)
            account = self._accounts[tenant]
            if not account.num_seats and not account.num_in_line:
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

    def check(self, running: Iterable[Request]) -> None:
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
