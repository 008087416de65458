"""Frontends that share a router process, on a virtual clock: their messages take time.

The classes of the frontends and of the router process are the real ones; nothing is encoded, and
no connection is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.fleet.router.frontends import FleetRouter, JoinedFrontend
from headway.fleet.router.messages import FromFrontend, ToFrontend
from headway.fleet.router.shared import SharedRouter
from headway.routing import RULES, Rule
from headway.routing.router import AllEngines
from headway.sim.fleet import VirtualFleet


class SharedFrontends:
    """Frontends of a simulated fleet, and the router process that decides for them."""

    def __init__(self, rule: str, routers: Sequence[SharedRouter]) -> None:
        """Take the routers of the frontends; `connect` starts the router process."""
        self.routers = routers
        self._rule = rule
        self._fleet: VirtualFleet | None = None
        self._joined: list[JoinedFrontend] = []
        self._router: FleetRouter | None = None
        """The router process; None while there is none."""

    @staticmethod
    def make(num_frontends: int, rule: str) -> SharedFrontends:
        """Return frontends that decide by a rule of this name."""
        return SharedFrontends(rule, [make_shared(RULES[rule]()) for _ in range(num_frontends)])

    def connect(self, fleet: VirtualFleet) -> None:
        """Have a router process decide for a fleet."""
        self._fleet = fleet
        fleet.on_tick = self._pass_on
        self.start_router()

    def start_router(self) -> None:
        """Start a router process; the frontends tell it what is live."""
        fleet = self._get_fleet()
        self._router = FleetRouter(self._rule, fleet.clock)
        self._joined = [self._router.join(str(number)) for number in range(len(self.routers))]
        for frontend in self.routers:
            frontend.share(fleet.clock.now())
        self._pass_on()

    def kill_router(self) -> None:
        """End the router process; the frontends decide by themselves."""
        fleet = self._get_fleet()
        self._router = None
        for frontend in self.routers:
            frontend.unshare(fleet.clock.now())
        fleet.tick()

    def _get_fleet(self) -> VirtualFleet:
        if self._fleet is None:
            raise RuntimeError("the frontends have no fleet yet")
        return self._fleet

    def _pass_on(self) -> None:
        """Have what frontends tell arrive after the time of a message; count refusals."""
        fleet, router = self._get_fleet(), self._router
        for number, frontend in enumerate(self.routers):
            while frontend.refusals:
                fleet.refuse(fleet.records[frontend.refusals.popleft().request_id], "deadline")
            if frontend.outbox and router is not None:
                items, frontend.outbox = frontend.outbox, []
                fleet.deliver(self._hear, router, number, items)

    def _hear(self, router: FleetRouter, number: int, items: list[FromFrontend]) -> None:
        if router is not self._router:
            return  # killed meanwhile
        fleet, now = self._get_fleet(), self._get_fleet().clock.now()
        for item in items:
            router.handle(self._joined[number], item, now)
        router.tick(now)
        for frontend, joined in zip(self.routers, self._joined, strict=True):
            if joined.outbox:
                decided, joined.outbox = joined.outbox, []
                fleet.deliver(self._decide, router, frontend, decided)

    def _decide(
        self, router: FleetRouter, frontend: SharedRouter, decided: list[ToFrontend]
    ) -> None:
        if router is self._router:
            frontend.take(decided)
            self._get_fleet().tick()


def make_shared(rule: Rule) -> SharedRouter:
    """Return the router of a frontend, for a fleet that sets which engines it may choose."""
    return SharedRouter(rule, AllEngines())
