"""One router for several frontends, without a network: who decides, and that none is forgotten."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from headway.clock import VirtualClock
from headway.core.owners import BlockOwners
from headway.core.request import Request
from headway.core.slo.forecast import DemandSample, Forecast, TenantForecast
from headway.core.terms import Targets
from headway.errors import WireError
from headway.fleet.network.wire import Closed
from headway.fleet.router import frontends, shared
from headway.fleet.router.frontends import FleetRouter, JoinedFrontend
from headway.fleet.router.messages import Arrive, EngineFound, EngineStepped, Restore, RouterRequest
from headway.fleet.router.shared import ROUTER, SharedRouter
from headway.fleet.router.wire import (
    Decided,
    Join,
    Told,
    decode_join,
    decode_router_frame,
    decode_told,
    encode,
)
from headway.routing import EngineLimits, FrontendLoad, PredictedTtft
from tests.routing.support import LIMITS, prompt, request, step


class Allowed:
    """Lets every engine have every request, unless a test says otherwise."""

    restricts = True

    def __init__(self) -> None:
        self.may = True
        self.banned: dict[str, str] = {}

    def may_assign(self, request: Request, engine: str) -> bool:
        return self.banned.get(request.id) != engine

    def may_send(self, request: Request, engine: str) -> bool:
        return self.may and self.may_assign(request, engine)


class Frontend:
    """A SharedRouter, and the engine in which each of its requests is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.allowed = Allowed()
        self.router = SharedRouter(PredictedTtft(), self.allowed)
        self.sent: Counter[str] = Counter()
        self.where: dict[str, str] = {}
        self.joined: JoinedFrontend | None = None

    def tick(self, now: float) -> list[str]:
        sendings = self.router.tick(now)
        for one in sendings:
            self.sent[one.request.id] += 1
            self.where[one.request.id] = one.engine
        return [one.request.id for one in sendings]


class Rig:
    """Frontends and a router process, with messages that arrive at once."""

    def __init__(self, num_frontends: int = 2, num_engines: int = 2) -> None:
        self.now = 0.0
        self.fleet: FleetRouter | None = None
        self.frontends = [Frontend(f"f{number}") for number in range(num_frontends)]
        for frontend in self.frontends:
            for number in range(num_engines):
                frontend.router.engine_joined(f"e{number}", LIMITS)

    def start_router(self) -> FleetRouter:
        self.fleet = FleetRouter("ttft", VirtualClock())
        for frontend in self.frontends:
            frontend.joined = self.fleet.join(frontend.name)
            frontend.router.share(self.now)
        self.pass_on()
        return self.fleet

    def kill_router(self) -> None:
        self.fleet = None
        for frontend in self.frontends:
            frontend.joined = None
            frontend.router.unshare(self.now)

    def pass_on(self) -> list[str]:
        """Exchange messages, as over the wire, until none is left; return what was sent."""
        sent: list[str] = []
        for _ in range(4):
            for frontend in self.frontends:
                sent += frontend.tick(self.now)
                if self.fleet is not None and frontend.joined is not None:
                    items, frontend.router.outbox = frontend.router.outbox, []
                    for item in decode_told(encode(Told(1, items))).items:
                        self.fleet.handle(frontend.joined, item, self.now)
            if self.fleet is not None:
                self.fleet.tick(self.now)
                self.fleet.check()
            for frontend in self.frontends:
                if frontend.joined is not None:
                    decided = decode_router_frame(encode(Decided(1, frontend.joined.outbox)))
                    assert isinstance(decided, Decided)
                    frontend.joined.outbox = []
                    frontend.router.take(decided.items)
                frontend.router.check()
        return sent

    def step(self, name: str) -> None:
        """Have all frontends hear of a step of an engine; it computes all prefills."""
        num_running = sum(list(one.where.values()).count(name) for one in self.frontends)
        for frontend in self.frontends:
            if name in {one.name for one in frontend.router.engines}:
                stepped = step(512, num_running=num_running)
                frontend.router.observe(name, stepped, self.now)
                for request_id in [one for one, at in frontend.where.items() if at == name]:
                    frontend.router.admitted(request_id, 0)
                    frontend.router.first_token(request_id)


def test_a_step_is_told_without_demand_and_owners() -> None:
    rig = Rig(num_frontends=1, num_engines=1)
    rig.start_router()
    router, small = rig.frontends[0].router, step(8)
    assert small.forecast is not None
    demand = DemandSample([1], [1], {1: 0.5})
    asked = Forecast(small.forecast.speed, tenants={"a": TenantForecast(1.0)})
    for owners, forecast in (
        (None, small.forecast),
        (BlockOwners(1, {"a": 1}, 0, 0), small.forecast),
        (None, Forecast(small.forecast.speed, demand)),
        (BlockOwners(1, {"a": 1}, 0, 0), asked),
    ):
        router.observe("e0", replace(small, owners=owners, forecast=forecast), 0.0)
    told = [item.stepped for item in router.outbox if isinstance(item, EngineStepped)]
    assert told == 4 * [small]


def test_frontends_share_what_they_know_of_caches_and_loads() -> None:
    rig = Rig()
    rig.start_router()
    first, second = rig.frontends
    first.router.arrive(request(prompt(*range(30)), name="a"), 0.0)
    assert rig.pass_on() == ["a"]
    home = first.where["a"]
    rig.step(home)
    # The other frontend has never seen this prefix.
    second.router.arrive(request(prompt(*range(29), 99), name="b"), 0.1)
    rig.pass_on()
    assert second.where["b"] == home
    # And it does not know what the first has sent.
    first.router.arrive(request(2000, name="c"), 0.1)
    second.router.arrive(request(2000, name="d"), 0.1)
    rig.pass_on()
    assert {first.where["c"], second.where["d"]} == {"e0", "e1"}


def test_a_flood_at_one_frontend_waits_for_a_tenant_of_another() -> None:
    """One queue for both: the tenant that has had nothing is next, whoever asks for it."""
    rig = Rig(num_engines=1)
    fleet = rig.start_router()
    first, second = rig.frontends
    for number in range(30):
        first.router.arrive(request(400, "flood", name=f"f{number}"), 0.0)
    rig.pass_on()
    num_first = len(first.where)
    assert 0 < num_first < 4
    second.router.arrive(request(400, "calm", name="calm"), 0.0)
    rig.pass_on()
    assert "calm" in second.where or fleet.router.num_waiting == 30 - num_first + 1
    rig.now = 0.1
    rig.step("e0")
    rig.pass_on()
    assert second.where.keys() == {"calm"}
    assert len(first.where) <= num_first + 1


def test_a_fleet_is_scaled_by_work_that_a_router_process_decides_about() -> None:
    rig, alone = Rig(num_frontends=1, num_engines=1), Rig(num_frontends=1, num_engines=1)
    rig.start_router()
    for number in range(20):
        for one in (rig, alone):
            targets = Targets(ttft_s=2.0 if number == 19 else 4.0)
            asked = request(400, name=f"r{number}", targets=targets)
            one.frontends[0].router.arrive(asked, 0.0)
    assert rig.frontends[0].router.demand(0.0) == alone.frontends[0].router.demand(0.0)
    rig.pass_on()
    alone.pass_on()
    found = rig.frontends[0].router.demand(0.0)
    expected = alone.frontends[0].router.demand(0.0)
    assert found.work_rate == expected.work_rate > 0.1
    assert found.backlog_s == pytest.approx(expected.backlog_s)


def test_without_the_router_frontends_decide_and_the_next_one_hears_what_is_live() -> None:
    rig = Rig()
    fleet = rig.start_router()
    first, second = rig.frontends
    names = [f"r{number}" for number in range(12)]
    for name in names:
        (first if int(name[1:]) % 2 else second).router.arrive(request(400, "t", name=name), 0.0)
    rig.pass_on()
    num_waiting = fleet.router.num_waiting
    assert num_waiting and first.router.num_asked + second.router.num_asked == num_waiting
    assert {first.router.engine_of(n) for n in names[1::2]} >= {ROUTER}
    rig.kill_router()
    assert first.router.num_asked == 0 and not first.router.outbox
    sent_before = len(first.where) + len(second.where)
    for number in range(8):
        rig.now = 0.1 * (number + 1)
        rig.step("e0")
        rig.step("e1")
        rig.pass_on()
    assert len(first.where) + len(second.where) > sent_before
    later = rig.start_router()
    live = {one.request.id for one in later.router._requests.values()}
    assert live == {f"1:{n}" for n in names[1::2]} | {f"2:{n}" for n in names[::2]}
    for frontend in rig.frontends:
        assert max(frontend.sent.values()) == 1, "a request is sent once, whoever decides"
        for name, engine in frontend.where.items():
            assert frontend.joined is not None
            assert later.router.engine_of(f"{frontend.joined.number}:{name}") == engine
    # Its tenant has been charged for what it has in the fleet.
    assert later.router.shares.counter(request(1, "t")) > 0.0


def test_a_decision_that_cannot_be_followed_is_made_here() -> None:
    rig = Rig(num_frontends=1)
    fleet = rig.start_router()
    (frontend,) = rig.frontends
    frontend.router.arrive(request(100, name="a"), 0.0)
    items, frontend.router.outbox = frontend.router.outbox, []
    assert frontend.joined is not None
    for item in items:
        fleet.handle(frontend.joined, item, 0.0)
    fleet.tick(0.0)
    (send,) = [one for one in frontend.joined.outbox if hasattr(one, "waited_s")]
    frontend.joined.outbox = []
    frontend.router.engine_lost(send.engine, 0.1)  # pyright: ignore
    frontend.router.take([send])
    rig.pass_on()
    assert frontend.where == {"a": ({"e0", "e1"} - {send.engine}).pop()}  # pyright: ignore
    key = f"{frontend.joined.number}:a"
    assert fleet.router.engine_of(key) == frontend.where["a"] and fleet.router.is_sent(key)


def test_an_engine_that_one_frontend_cannot_reach_holds_up_nobody() -> None:
    rig = Rig()
    fleet = rig.start_router()
    first, second = rig.frontends
    for number in range(20):
        first.router.arrive(request(400, "t", name=f"a{number}"), 0.0)
        second.router.arrive(request(400, "u", name=f"b{number}"), 0.0)
    rig.pass_on()
    lost = [name for name, engine in first.where.items() if engine == "e0"]
    first.router.engine_lost("e0", 0.1)
    for name in lost:
        del first.where[name]
    rig.pass_on()
    assert {one.name for one in fleet.router.engines} == {"e0", "e1"}
    for number in range(60):
        rig.now = 0.1 * (number + 2)
        rig.step("e0")
        rig.step("e1")
        for frontend in rig.frontends:
            for name in list(frontend.where):
                frontend.router.finished(name, [7])
                del frontend.where[name]
        rig.pass_on()
        for name in [n for n, at in first.where.items() if at == "e0"]:
            raise AssertionError(f"{name} was sent to an engine that is out of reach")
    assert fleet.router.num_waiting == 0
    assert sum(second.sent.values()) == 20 and sum(first.sent.values()) == 20
    second.router.engine_lost("e0", 9.0)
    rig.pass_on()
    assert {one.name for one in fleet.router.engines} == {"e1"}


def test_one_frontend_tells_the_steps_of_an_engine() -> None:
    rig = Rig(num_frontends=3, num_engines=6)
    fleet = rig.start_router()
    told = [frontend.router._reported for frontend in rig.frontends]
    assert sorted(name for one in told for name in one) == [f"e{n}" for n in range(6)]
    assert [len(one) for one in told] == [2, 2, 2]
    gone = rig.frontends.pop(0)
    assert gone.joined is not None
    fleet.leave(gone.joined, 0.0)
    rig.pass_on()
    told = [frontend.router._reported for frontend in rig.frontends]
    assert sorted(name for one in told for name in one) == [f"e{n}" for n in range(6)]


def test_a_frontend_that_is_gone_leaves_nothing_behind() -> None:
    rig = Rig()
    fleet = rig.start_router()
    for frontend in rig.frontends:
        for number in range(9):
            name = f"{frontend.name}-{number}"
            frontend.router.arrive(request(300, frontend.name, name=name, n=3), 0.0)
    rig.pass_on()
    first = rig.frontends.pop(0)
    assert first.joined is not None
    fleet.leave(first.joined, 1.0)
    fleet.check()
    assert all(key.startswith("2:") for key in fleet.router._requests)
    rig.pass_on()


def test_a_target_that_no_engine_meets_is_refused_and_counted_nowhere() -> None:
    rig = Rig(num_frontends=1)
    fleet = rig.start_router()
    (frontend,) = rig.frontends
    for number in range(40):
        frontend.router.arrive(request(2000, name=f"r{number}"), 0.0)
    rig.pass_on()
    for name in ("e0", "e1"):
        rig.step(name)  # from now on the speed of the engines is known
    rig.pass_on()
    late = request(2000, name="late", targets=Targets(ttft_s=0.01))
    frontend.router.arrive(late, 0.0)
    rig.pass_on()
    (refusal,) = frontend.router.refusals
    assert refusal.request_id == "late" and refusal.retry_after_s > 0.0
    assert "late" not in frontend.sent and "1:late" not in fleet.router._requests


def test_what_is_too_much_for_the_router_waits_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MAX_ASKED_TOKENS", 5000)
    rig = Rig(num_frontends=1)
    fleet = rig.start_router()
    (frontend,) = rig.frontends
    for number in range(30):
        frontend.router.arrive(request(600, name=f"r{number}"), 0.0)
    assert frontend.router.num_asked == 8
    rig.pass_on()
    assert frontend.router.num_held and not frontend.router.num_waiting
    assert len(fleet.router._requests) == len(frontend.where) + frontend.router.num_asked
    monkeypatch.setattr(frontends, "MAX_ASKED", 1)
    assert frontend.joined is not None
    with pytest.raises(WireError, match="too many"):
        for number in range(9):
            item = Arrive(RouterRequest(f"x{number}", [1] * 5000, 5))
            fleet.handle(frontend.joined, item, 0.0)
    fleet.leave(frontend.joined, 0.0)
    assert not fleet.router._requests


def test_a_flood_leaves_room_in_the_router_for_others() -> None:
    """A tenant with far more than its frontend may ask for holds up nobody, with any priority."""
    rig = Rig(num_frontends=1, num_engines=1)
    fleet = rig.start_router()
    (frontend,) = rig.frontends
    for number in range(600):
        made = request(100, "flood", name=f"f{number}", priority=600 - number)
        frontend.router.arrive(made, 0.0)
    rig.pass_on()
    assert frontend.router.num_asked <= 256 < frontend.router.num_held
    frontend.router.arrive(request(100, "calm", name="calm"), 0.0)
    rig.pass_on()
    assert "1:calm" in fleet.router._requests
    for _ in range(12):
        rig.now += 0.1
        rig.step("e0")
        for name in list(frontend.where):
            frontend.router.finished(name, [7])
            del frontend.where[name]
        rig.pass_on()
    assert frontend.sent["calm"] == 1
    # What was held back comes by priority.
    assert "f599" in frontend.router._asked or "f599" in frontend.sent
    for number in range(600):
        frontend.router.finished(f"f{number}")
    assert not frontend.router.num_held and not frontend.router.num_asked
    rig.pass_on()
    assert not fleet.router._requests


def test_what_waits_for_a_lost_router_is_decided_in_parts_and_by_turns() -> None:
    rig = Rig(num_frontends=1)
    rig.start_router()
    (frontend,) = rig.frontends
    router = frontend.router
    for number in range(300):
        router.arrive(request(100, "flood", name=f"f{number}"), 0.0)
    router.arrive(request(100, "calm", name="calm"), 0.0)
    rig.kill_router()
    assert 0 < router.num_waiting <= 128 and router.num_held
    assert "calm" in router._requests, "a flood that came before does not hold it up"
    # What comes now waits for its turn too.
    router.arrive(request(100, "calm", name="later"), 0.0)
    assert router.engine_of("later") == ROUTER
    for _ in range(4):
        frontend.tick(0.1)
        router.check()
    assert not router.num_held and "later" in router._requests


def test_requests_that_are_held_back_and_cancelled_leave_no_keys() -> None:
    held = shared.HeldRequests()
    held.push(shared._Asked(request(name="first", priority=-1), False))
    for number in range(5000):
        held.push(shared._Asked(request(3, name=f"r{number}"), False))
        held.remove(f"r{number}")
    assert len(held) == 1 and len(held._heaps[""]) < 1500
    one = held.pop_next()
    assert one is not None and one.request.id == "first" and held.pop_next() is None


def test_a_request_with_any_priority_and_prompt_can_be_told() -> None:
    """A tenant must not end the connection of its frontend by what it asks for."""
    rig = Rig(num_frontends=1)
    rig.start_router()
    (frontend,) = rig.frontends
    for number, priority in enumerate((2**63 - 1, -(2**63), 0)):
        frontend.router.arrive(request(4000, priority=priority, name=f"r{number}"), 0.0)
    rig.pass_on()
    assert len(frontend.sent) + frontend.router.num_asked == 3


GOOD = RouterRequest("r", [1], 5)
WRONG = [
    Arrive(RouterRequest("r", [], 5)),
    Arrive(RouterRequest("r#1", [1], 5)),
    Arrive(RouterRequest("../r", [1], 5)),
    Arrive(RouterRequest("r", [-1], 5)),
    Arrive(RouterRequest("r", [2**40], 5)),
    Arrive(RouterRequest("r", [1], 0)),
    Arrive(RouterRequest("r", [1], 5, num_samples=999)),
    Arrive(RouterRequest("r", [1], 5, age_s=float("nan"))),
    Arrive(RouterRequest("r", [1], 5, priority=2**40)),
    Arrive(GOOD, only=["x" * 300]),
    Restore(GOOD, "x" * 300),
    EngineFound("e", 0, 16, 8, True),
    EngineFound("e", 10, -1, 8, True),
    EngineFound("e" * 300, 10, 16, 8, True),
]


@pytest.mark.parametrize("item", WRONG, ids=lambda one: repr(one)[:60])
def test_what_is_wrong_is_no_message(item: Arrive) -> None:
    with pytest.raises(WireError):
        decode_told(encode(Told(1, [item])))


def test_frames_that_are_no_messages() -> None:
    for frame in (b"", b"\xc1", encode(Join(1, "f", "i"))[:-1], encode(Closed("x")), b"\x80" * 99):
        with pytest.raises(WireError):
            decode_join(frame)
        with pytest.raises(WireError):
            decode_told(frame)
    with pytest.raises(WireError):
        decode_join(encode(Join(1, "f" * 5000, "i")))
    assert decode_router_frame(encode(Closed("x"))) == Closed("x")


class Chaos:
    """Random events at the frontends of a rig."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.rig = Rig(num_frontends=self.draw.choice((1, 2, 4)), num_engines=3)
        self.live: dict[str, tuple[Frontend, Request]] = {}
        self.attempts: Counter[str] = Counter()

    def arrive(self) -> None:
        draw, frontend = self.draw, self.draw.choice(self.rig.frontends)
        num_tokens, tenant = draw.choice((3, 90, 700)), draw.choice("abc")
        name = f"r{len(self.attempts)}"
        made = request(num_tokens, tenant, name=name, n=draw.choice((1, 3)))
        if draw.random() < 0.2:
            frontend.allowed.banned[made.id] = draw.choice(("e0", "e1", "e2"))
        self.live[made.id] = frontend, made
        self.attempts[made.id] = 1
        frontend.router.arrive(made, self.rig.now)

    def step(self) -> None:
        self.rig.step(f"e{self.draw.randrange(3)}")

    def end(self) -> None:
        if self.live:
            self.finish(self.draw.choice(list(self.live)))

    def finish(self, name: str) -> None:
        owner, _ = self.live.pop(name)
        owner.router.finished(name, [7] * self.draw.randrange(5))
        owner.where.pop(name, None)

    def lose_engine(self) -> None:
        frontend = self.draw.choice(self.rig.frontends)
        names = sorted(one.name for one in frontend.router.engines)
        if not names:
            return
        gone = self.draw.choice(names)
        lost = [name for name, at in frontend.where.items() if at == gone]
        frontend.router.engine_lost(gone, self.rig.now)
        for name in lost:
            del frontend.where[name]
            self.attempts[name] += 1
            frontend.router.arrive(self.live[name][1], self.rig.now, is_resent=True)

    def join_engines(self) -> None:
        frontend = self.draw.choice(self.rig.frontends)
        for name in {"e0", "e1", "e2"} - {one.name for one in frontend.router.engines}:
            sizes = EngineLimits(self.draw.choice((1000, 500)), 16, 8)
            frontend.router.engine_joined(name, sizes)

    def change_router(self) -> None:
        if self.rig.fleet is None:
            self.rig.start_router()
        else:
            self.rig.kill_router()

    def settle(self) -> None:
        """Have all engines back, and all requests end."""
        for frontend in self.rig.frontends:
            for name in {"e0", "e1", "e2"} - {one.name for one in frontend.router.engines}:
                frontend.router.engine_joined(name, LIMITS)
            frontend.allowed.banned.clear()
        for _ in range(400):
            if not self.live:
                break
            self.rig.now += 0.1
            self.rig.pass_on()
            for number in range(3):
                self.rig.step(f"e{number}")
            for name in [one for frontend in self.rig.frontends for one in frontend.where]:
                self.finish(name)
        self.rig.pass_on()


@pytest.mark.parametrize("seed", range(4))
def test_no_request_is_lost_or_sent_twice_whatever_happens(seed: int) -> None:
    """Arrivals, ends, engines and routers that come and go, in any order."""
    chaos = Chaos(seed)
    rig = chaos.rig
    events = [chaos.arrive] * 5 + [chaos.step, chaos.step, chaos.end, chaos.join_engines]
    events += [chaos.lose_engine, chaos.change_router]
    for _ in range(100):
        rig.now += chaos.draw.random() * 0.1
        chaos.draw.choice(events)()
        rig.pass_on()
    chaos.settle()
    assert not chaos.live, "a request waits for ever"
    for frontend in rig.frontends:
        for name, number in frontend.sent.items():
            assert number <= chaos.attempts[name]
        assert not frontend.router._requests and not frontend.router.num_asked
    assert rig.fleet is None or not rig.fleet.router._requests


def test_each_frontend_is_shown_all_of_them_while_there_is_a_router() -> None:
    rig = Rig()
    fleet = rig.start_router()
    first, second = rig.frontends
    first.router.arrive(request(100, name="a"), 0.0)
    assert rig.pass_on() == ["a"]
    first.router.engine_lost("e1" if first.where["a"] == "e0" else "e0", 0.0)
    rig.pass_on()
    fleet.show_frontends()
    rig.pass_on()
    assert first.router.frontends == [
        FrontendLoad("f0", num_waiting=0, num_sent=1, num_engines=1, is_own=True),
        FrontendLoad("f1", num_waiting=0, num_sent=0, num_engines=2, is_own=False),
    ]
    assert [one.is_own for one in second.router.frontends] == [False, True]
    rig.kill_router()
    assert first.router.frontends == second.router.frontends == ()
