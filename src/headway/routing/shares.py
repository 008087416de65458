"""Fair shares over the fleet: one account per tenant, however many engines serve it.

Service is charged in machine-seconds, because only time is comparable between machines of unequal
speed. The unit is the weighted token of headway.core.waiting, at a fixed number per second, so that
the leads of the fair queue have a meaning here too.

A tenant that returns from idleness is lifted to the least counter among the tenants that wait
anywhere in the fleet, not in one engine's queue: there, every other tenant may be far ahead.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from itertools import count

from headway.core.request import Request
from headway.core.slo.steptime import StepCost
from headway.core.waiting.accounts import Accounts, TenantAccount

SERVICE_PER_S = 1.0 / StepCost().per_prefill_token_s
"""Service of a machine-second: the prompt tokens that a machine of default speed computes."""


class FleetShares:
    """Accounts of all tenants over the whole fleet."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self._heaps: dict[bool, list[tuple[float, int, TenantAccount]]] = {False: [], True: []}
        """Waiting accounts by counter, ordinary and spot; corrected when they come to the top."""
        self._listed: set[TenantAccount] = set()
        self._least = {False: 0.0, True: 0.0}
        """The least counter when a tenant last waited."""
        self._numbers = count()

    def open(self, request: Request) -> None:
        """Open the account of a request that arrives."""
        self.accounts.open(request)

    def close(self, request: Request) -> None:
        """Count a request as ended."""
        self.accounts.close(request)

    def begin_wait(self, request: Request) -> None:
        """Count a request as waiting; a tenant back from idleness is lifted."""
        account = self.accounts.of(request)
        if not account.num_waiting:
            account.counter = max(account.counter, self.least_counter(account.is_spot))
        # Before the queue gets the request: the queue would lift the tenant by its own least.
        self.accounts.begin_wait(request)
        if account not in self._listed:
            self._listed.add(account)
            heappush(self._heaps[account.is_spot], (account.counter, next(self._numbers), account))

    def end_wait(self, request: Request) -> None:
        self.accounts.end_wait(request)

    def least_counter(self, is_spot: bool) -> float:
        """Return the least counter of the tenants that wait, or of those that waited last."""
        heap = self._heaps[is_spot]
        while heap:
            counter, number, account = heap[0]
            if not account.num_waiting:
                heappop(heap)
                self._listed.discard(account)
            elif account.counter > counter:
                heapreplace(heap, (account.counter, number, account))
            else:
                self._least[is_spot] = max(self._least[is_spot], counter)
                break
        return self._least[is_spot]

    def counter(self, request: Request) -> float:
        """Return the service counter of a request's tenant."""
        return self.accounts.of(request).counter

    def charge(self, request: Request, seconds: float) -> None:
        """Charge machine-seconds to a request's tenant; a negative number is a refund."""
        account = self.accounts.of(request)
        if seconds >= 0.0:
            account.charge(SERVICE_PER_S * seconds)
        else:
            account.refund(-SERVICE_PER_S * seconds)
