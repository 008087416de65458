"""Whatever happens to a fleet, every request is sent once or cancelled, and counts add up."""

from __future__ import annotations

from itertools import count

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.core.terms import Targets
from headway.routing import RULES, EngineLimits, NoEngineInTime, Router
from headway.routing.requests import MAX_PASSES
from tests.routing.support import COST, prompt, request, step

LIMITS = EngineLimits(num_blocks=40, block_size=16, max_num_seqs=3)


class RouterMachine(RuleBasedStateMachine):
    """Drives a router by random calls, and follows where each request must be."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.now = 0.0
        self.numbers = count()
        self.waiting: set[str] = set()
        self.sent: dict[str, str] = {}
        self.engines: set[str] = set()
        self.draining: set[str] = set()
        self.requests: dict[str, tuple[list[int], str, int]] = {}

    def tick(self) -> None:
        self.now += 0.01
        for sending in self.router.tick(self.now):
            name = sending.request.id
            assert name in self.waiting, "sent twice, or after its end"
            assert sending.engine in self.engines - self.draining
            self.waiting.remove(name)
            self.sent[name] = sending.engine

    @rule(
        parts=st.lists(st.integers(0, 3), min_size=1, max_size=8),
        tenant=st.sampled_from("ab"),
        n=st.sampled_from((1, 1, 2)),
        ttft_s=st.sampled_from((None, None, 0.2)),
    )
    def arrive(self, parts, tenant, n, ttft_s):
        name = f"m{next(self.numbers)}"
        one = request(prompt(*parts), tenant, name=name, n=n, targets=Targets(ttft_s=ttft_s))
        self.requests[name] = parts, tenant, n
        outcome = self.router.arrive(one, self.now)
        if not isinstance(outcome, NoEngineInTime):
            self.waiting.add(name)
        self.tick()

    @rule()
    def join(self):
        name = f"e{next(self.numbers)}"
        if len(self.engines) < 5:
            self.engines.add(name)
            self.router.engine_joined(name, LIMITS, COST)
            self.tick()

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def lose(self, data):
        engine = data.draw(st.sampled_from(sorted(self.engines)))
        self.engines.remove(engine)
        self.draining.discard(engine)
        moved = self.router.engine_lost(engine, self.now)
        assert set(moved) <= self.waiting
        for name in [name for name, at in self.sent.items() if at == engine]:
            parts, tenant, n = self.requests[name]
            del self.sent[name]
            again = request(prompt(*parts), tenant, name=name, n=n)
            self.router.arrive(again, self.now, is_resent=True)
            self.waiting.add(name)
        self.tick()

    @precondition(lambda self: self.engines - self.draining)
    @rule(data=st.data())
    def drain(self, data):
        engine = data.draw(st.sampled_from(sorted(self.engines - self.draining)))
        self.draining.add(engine)
        self.router.engine_draining(engine, self.now)
        self.tick()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), num_cached=st.integers(0, 64))
    def progress(self, data, num_cached):
        name = data.draw(st.sampled_from(sorted(self.sent)))
        self.router.admitted(name, num_cached)
        if num_cached % 2:
            self.router.first_token(name)
        self.tick()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted(self.sent)))
        self.router.first_token(name)
        self.router.finished(name, [7] * 20)
        del self.sent[name]
        self.tick()

    @precondition(lambda self: self.waiting or self.sent)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.waiting | self.sent.keys())))
        self.router.cancel(name)
        self.waiting.discard(name)
        self.sent.pop(name, None)
        self.tick()

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), num_tokens=st.integers(0, 512))
    def report(self, data, num_tokens):
        engine = data.draw(st.sampled_from(sorted(self.engines)))
        num_running = sum(at == engine for at in self.sent.values())
        self.router.observe(engine, step(num_tokens, num_running=num_running), self.now)
        self.tick()

    @invariant()
    def adds_up(self):
        self.router.check()
        assert self.router.num_waiting == len(self.waiting)
        for engine in self.router.engines:
            sent = [name for name, at in self.sent.items() if at == engine.name]
            assert sorted(engine.sent) == sorted(sent)
            # An engine that is empty takes any request; others only what fits beside the requests
            # that they could have admitted in time.
            passed = {name for name, one in engine.sent.items() if one.num_passes > MAX_PASSES}
            num_seqs = sum(self.requests[name][2] for name in sent if name not in passed)
            assert num_seqs <= LIMITS.max_num_seqs or len(sent) == 1

    def teardown(self):
        """With an engine that works, nothing waits for ever."""
        if not self.engines - self.draining:
            self.join_last()
        for _ in range(400):
            for name in sorted(self.sent):
                self.router.first_token(name)
                self.router.finished(name)
                del self.sent[name]
            self.tick()
        assert not self.waiting
        assert not self.sent

    def join_last(self):
        self.engines.add("last")
        self.router.engine_joined("last", LIMITS, COST)
        self.tick()


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_the_same_calls_give_the_same_decisions():
    def run(rule: str) -> list[tuple[str, str]]:
        made = Router(RULES[rule]())
        for number in range(5):
            made.engine_joined(f"e{number}", LIMITS, COST)
        sent: list[tuple[str, str]] = []
        for n in range(60):
            made.arrive(request(prompt(n % 7, n % 3, n % 11), f"t{n % 4}", name=f"d{n}"), n / 50)
            for sending in made.tick(n / 50):
                sent.append((sending.request.id, sending.engine))
                made.first_token(sending.request.id)
            if n % 3 == 0 and sent:
                made.finished(sent[n // 3][0], [7] * 9)
        return sent

    for name in RULES:
        assert run(name) == run(name)
