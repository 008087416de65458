"""The bounds on what may wait, and what a refusal says."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from headway.clock import VirtualClock
from headway.config import ServerConfig
from headway.core.events import Admitted
from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.engine.messages import EventBatch
from headway.engine.waiting import WaitingLine
from headway.errors import OverloadedError, TenantLimitError
from headway.server.gate import DrainRate, Gate


class StillEngine:
    """Has what it is given waiting, until told otherwise."""

    def __init__(self, policy: str) -> None:
        capacity = SimpleNamespace(max_model_len=1000)
        self.info = SimpleNamespace(capacity=capacity, scheduling_policy=policy)
        self.waiting = WaitingLine()
        self.num_added = 0
        self.refused: list[tuple[Any, Exception]] = []
        self.listener: Any = None
        self.num_seated = 0

    def subscribe(self, listener: Any) -> None:
        self.listener = listener

    def add(
        self,
        num_tokens: int = 10,
        tenant: str = "",
        at: float = 0.0,
        targets: Targets = NO_TARGETS,
    ) -> None:
        terms = Terms(tenant=tenant, targets=targets)
        command = SimpleNamespace(token_ids=[1] * num_tokens, terms=terms, arrived_at=at)
        self.num_added += 1
        stream: Any = SimpleNamespace(request_id=str(self.num_added), command=command)
        self.waiting.add(stream)
        if self.listener is not None:
            self.listener(EventBatch())

    def admit(self) -> None:
        self.waiting.pop(next(iter(self.waiting)).request_id)
        self.num_seated += 1
        self.listener(EventBatch(admitted=[Admitted("x", 0.0, 0.0, 0, 1, False)]))

    async def refuse(self, stream: Any, error: Exception) -> None:
        self.waiting.pop(stream.request_id)
        self.refused.append((stream, error))


def make(policy: str = "fair", **settings: Any) -> tuple[Gate, StillEngine, VirtualClock]:
    engine, clock = StillEngine(policy), VirtualClock()
    return Gate(ServerConfig(**settings), engine, clock), engine, clock  # pyright: ignore


def test_a_full_queue_is_refused() -> None:
    gate, engine, _ = make(max_num_queued_reqs=3)
    engine.add()
    with gate.let_in("", 10), gate.let_in("", 10):
        assert gate.num_queued == 3
        with (
            pytest.raises(OverloadedError, match="3 requests are waiting") as refusal,
            gate.let_in("", 10),
        ):
            pass
        assert refusal.value.retry_after_s >= 1
    assert gate.num_queued == 1


def refusal_of(gate: Gate, tenant: str, num_bytes: int = 10) -> str:
    try:
        with gate.let_in(tenant, num_bytes):
            return ""
    except OverloadedError as error:
        return str(error)


@pytest.mark.parametrize(("policy", "is_shared"), [("fair", False), ("fcfs", True)])
def test_the_flood_of_one_tenant_fills_the_queue_of_others_only_without_shares(
    policy: str, is_shared: bool
) -> None:
    gate, engine, _ = make(policy, max_num_queued_reqs=8, max_num_queued_tokens=100)
    for _ in range(8):
        engine.add(tenant="flood")
    assert "8 requests are waiting" in refusal_of(gate, "flood")
    assert bool(refusal_of(gate, "other")) is is_shared
    if is_shared:
        return
    # Of two tenants that wait, each may have half of it.
    for _ in range(3):
        engine.add(tenant="other")
    assert not refusal_of(gate, "other")
    engine.add(tenant="other")
    assert "12 requests are waiting" in refusal_of(gate, "other")
    engine.add(num_tokens=12, tenant="third")
    assert "132 prompt tokens" in refusal_of(gate, "third", 200)


def queue_up(gate: Gate, engine: StillEngine, tenant: str, gateway: str | None = None) -> bool:
    """One more request of a tenant joins the queue, unless it is refused."""
    try:
        with gate.let_in(tenant, 40, gateway=gateway):
            engine.add(tenant=tenant, num_tokens=10)
    except OverloadedError as error:
        assert error.retry_after_s >= 1
        return False
    return True


def test_the_queue_is_bounded_however_many_tenants_there_are() -> None:
    gate, engine, _ = make(max_num_queued_reqs=256)
    num_in = sum(queue_up(gate, engine, f"t{number}") for number in range(10_000))
    assert num_in == gate.num_queued == 512


def test_the_tokens_that_wait_are_bounded_but_for_one_prompt() -> None:
    gate, engine, _ = make(max_num_queued_tokens=10_000)
    for number in range(100):
        with contextlib.suppress(OverloadedError), gate.let_in(f"t{number}", None):
            engine.add(tenant=f"t{number}", num_tokens=900)
    assert 20_000 <= engine.waiting.sums.total.num_tokens < 20_900


def test_each_tenant_that_floods_leaves_room_for_the_next() -> None:
    gate, engine, _ = make(max_num_queued_reqs=64)
    numbers = []
    for number in range(5):
        count = 0
        while queue_up(gate, engine, f"t{number}"):
            count += 1
        numbers.append(count)
    assert numbers == [64, 32, 16, 8, 4]


def test_a_flood_of_names_from_a_gateway_leaves_room_for_those_with_a_key() -> None:
    gate, engine, _ = make(max_num_queued_reqs=64)
    num_guests = sum(queue_up(gate, engine, f"guest-{i}", "gateway") for i in range(1000))
    assert num_guests == 96, "three quarters of the hard bound"
    assert not queue_up(gate, engine, "gateway"), "the gateway is one of them"
    num_own = 0
    while queue_up(gate, engine, "quiet"):
        num_own += 1
    assert num_own == 16
    # Nor does a second gateway take all of it.
    sum(queue_up(gate, engine, f"other-{i}", "second") for i in range(1000))
    assert queue_up(gate, engine, "third")


def test_a_guest_that_floods_leaves_room_for_the_other_guests() -> None:
    gate, engine, _ = make(max_num_queued_reqs=64)
    while queue_up(gate, engine, "flood", "gateway"):
        pass
    assert gate.num_queued == 64
    assert all(queue_up(gate, engine, f"guest-{i}", "gateway") for i in range(32))


def test_gateways_of_guests_that_left_are_forgotten() -> None:
    gate, engine, _ = make(max_num_queued_reqs=8)
    for number in range(1000):
        assert queue_up(gate, engine, f"guest-{number}", "gateway")
        engine.admit()
        assert len(gate._gateways) <= 33


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_bodies_on_their_way_are_bounded_in_bytes(policy: str) -> None:
    gate, _, _ = make(
        policy, max_body_bytes=1000, max_num_queued_tokens=10**9, max_num_queued_reqs=10**6
    )
    with contextlib.ExitStack() as stack:
        num_held = 0
        with pytest.raises(OverloadedError, match="bytes of request bodies are waiting"):
            for _ in range(100):
                # One says how long it is, one does not, one is refused when it is read.
                length = (1000, None, 10**9)[num_held % 3]
                stack.enter_context(gate.let_in("flood", length))
                num_held += 1
        assert num_held == 32
        if policy == "fair":
            stack.enter_context(gate.let_in("other", 1000))
    assert not refusal_of(gate, "flood", 1000)


def test_random_floods_pass_no_bound_and_never_shut_out_a_quiet_key() -> None:
    random = Random(3)
    gate, engine, _ = make(max_num_queued_reqs=32)
    for _ in range(3_000):
        kind = random.random()
        if kind < 0.5:
            queue_up(gate, engine, f"guest-{random.randrange(500)}", "gateway")
        elif kind < 0.8:
            queue_up(gate, engine, f"key-{random.randrange(4)}")
        elif kind < 0.9 and engine.waiting:
            engine.admit()
        else:
            assert not refusal_of(gate, "quiet")
        assert gate.num_queued <= 64


def test_the_wait_behind_others_is_by_turns_where_tenants_have_shares() -> None:
    gate, engine, clock = make(max_queue_wait_s=3.0)
    with gate.let_in("flood", 10):
        pass
    for _ in range(40):
        engine.add(tenant="flood")
    for _ in range(20):  # two a second
        clock.advance_to(clock.now() + 0.5)
        engine.admit()
    assert "a seat is expected in 10 s" in refusal_of(gate, "flood")
    assert not refusal_of(gate, "other")
    for _ in range(3):
        engine.add(tenant="other")
    assert "a seat is expected in 4 s" in refusal_of(gate, "other")


def test_a_request_counts_from_its_bytes_before_it_has_tokens() -> None:
    gate, _, _ = make(max_num_queued_tokens=600)
    with gate.let_in("", 2000):  # about 500 tokens
        with pytest.raises(OverloadedError, match="prompt tokens"), gate.let_in("", 800):
            pass
        with gate.let_in("", 400):
            pass


def test_one_that_is_alone_is_never_too_much() -> None:
    gate, _, _ = make(max_num_queued_tokens=10)
    with gate.let_in("", 10_000):
        pass


def test_the_limit_of_one_key_is_not_that_of_another() -> None:
    gate, engine, _ = make(max_num_queued_reqs_per_key=2)
    engine.add(tenant="a")
    with gate.let_in("a", 1):
        with pytest.raises(TenantLimitError), gate.let_in("a", 1):
            pass
        with gate.let_in("b", 1):
            pass


def fill_and_drain(gate: Gate, engine: StillEngine, clock: VirtualClock) -> None:
    """Twenty wait, and one is seated every half second."""
    with gate.let_in("", 1):
        pass
    for _ in range(20):
        engine.add()
    for _ in range(12):
        clock.advance_to(clock.now() + 0.5)
        engine.admit()


def test_a_wait_that_would_be_too_long_is_refused_at_once() -> None:
    gate, engine, clock = make(max_queue_wait_s=5.0)
    fill_and_drain(gate, engine, clock)
    with gate.let_in("", 1):  # 8 wait, at 2 a second
        pass
    for _ in range(5):
        engine.add()
    with (
        pytest.raises(OverloadedError, match="a seat is expected in") as refusal,
        gate.let_in("", 1),
    ):
        pass
    assert refusal.value.retry_after_s in (6, 7, 8)


def test_the_rate_is_not_measured_while_nothing_backs_up() -> None:
    rate = DrainRate(0.0)
    for second in range(0, 1000, 10):
        rate.start(float(second))
        rate.observe(second + 0.05, 1, 0)
    assert rate.per_second is None


def test_the_rate_follows_what_it_sees() -> None:
    rate = DrainRate(0.0)
    for step in range(1, 400):
        rate.observe(step * 0.1, 1, 5)
    assert rate.per_second == pytest.approx(10, rel=0.05)
    for step in range(1, 200):
        rate.observe(40 + step * 1.0, 1, 5)
    assert rate.per_second == pytest.approx(1, rel=0.05)


async def test_who_has_waited_too_long_is_refused_after_all() -> None:
    gate, engine, clock = make(max_queue_age_s=30.0)
    engine.add(at=0.0)
    engine.add(at=20.0)
    clock.advance_to(clock.now() + 29.0)
    await gate.sweep()
    assert not engine.refused
    clock.advance_to(clock.now() + 2.0)
    await gate.sweep()
    ((stream, error),) = engine.refused
    assert stream.command.arrived_at == 0.0
    assert isinstance(error, OverloadedError) and error.retry_after_s >= 1


async def test_who_was_promised_a_later_time_is_not_refused_before_it() -> None:
    gate, engine, clock = make(max_queue_age_s=30.0)
    start_s = clock.now()
    engine.add(at=start_s, targets=Targets(deadline_s=100.0))
    engine.add(at=start_s, targets=Targets(tpot_s=1.0))
    engine.add(at=start_s, targets=Targets(ttft_s=40.0, deadline_s=100.0))
    for at, left in ((31.0, [0, 2]), (41.0, [0]), (99.0, [0]), (101.0, [])):
        clock.advance_to(start_s + at)
        await gate.sweep()
        assert [int(one.request_id) - 1 for one in engine.waiting] == left


def test_a_closed_gate_lets_nobody_in() -> None:
    gate, _, _ = make()
    gate.close()
    with pytest.raises(OverloadedError, match="shutting down"), gate.let_in("", 1):
        pass


def test_a_refusal_leaves_no_trace() -> None:
    gate, _, _ = make()
    with contextlib.suppress(ValueError), gate.let_in("", 1):
        raise ValueError
    assert gate.num_queued == 0


@pytest.mark.parametrize("is_stream", [True, False])
async def test_refusals_over_http(local, is_stream: bool) -> None:
    made = await local("abc", max_num_queued_reqs=2, max_queue_age_s=0.2)
    made.process.is_paused = True
    body = {"prompt": "x", "stream": is_stream}
    tasks = [asyncio.create_task(made.client.post("/v1/completions", json=body)) for _ in "ab"]
    while len(made.engine.waiting) < 2:
        await asyncio.sleep(0)
    refused = await made.client.post("/v1/completions", json=body)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_is_overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    await asyncio.sleep(0.3)
    await made.gate.sweep()
    for response in await asyncio.gather(*tasks):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
    assert made.engine.num_requests == 0
    assert b'reason="overloaded"} 3.0' in made.metrics.render()


async def test_a_key_with_too_much_waiting_gets_429(local) -> None:
    made = await local("abc", max_num_queued_reqs_per_key=1, api_key=("secret",))
    made.process.is_paused = True
    headers = {"Authorization": "Bearer secret"}
    request = {"json": {"prompt": "x"}, "headers": headers}
    task = asyncio.create_task(made.client.post("/v1/completions", **request))
    while not len(made.engine.waiting):
        await asyncio.sleep(0)
    refused = await made.client.post("/v1/completions", **request)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_several_prompts_take_as_many_places() -> None:
    gate, engine, _ = make(max_num_queued_reqs=10)
    engine.add()
    with gate.let_in("", 10) as place:
        gate.resize(place, 9, 100)
        assert gate.num_queued == 10
    with gate.let_in("", 10) as place, pytest.raises(OverloadedError):
        gate.resize(place, 10, 100)
    assert gate.num_queued == 1


def test_a_body_of_unknown_length_counts_as_the_longest() -> None:
    gate, engine, _ = make(max_num_queued_tokens=1500)
    engine.add(num_tokens=600)
    with pytest.raises(OverloadedError, match="prompt tokens"), gate.let_in("", None):
        pass


def test_a_rate_of_long_ago_refuses_nobody() -> None:
    gate, engine, clock = make(max_queue_wait_s=5.0)
    fill_and_drain(gate, engine, clock)
    for stream in list(engine.waiting):
        engine.waiting.pop(stream.request_id)
    engine.listener(EventBatch())
    clock.advance_to(clock.now() + 36_000.0)
    with gate.let_in("", 1):
        for _ in range(20):
            engine.add()
        with gate.let_in("", 1):
            pass


def test_bodies_on_their_way_are_not_taken_for_a_wait() -> None:
    gate, engine, clock = make(max_queue_wait_s=5.0, max_num_queued_tokens=10**9)
    fill_and_drain(gate, engine, clock)  # 8 wait, at 2 a second
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(gate.let_in("", 10))


def test_one_that_is_slow_to_send_its_body_does_not_change_the_rate() -> None:
    gate, engine, clock = make()
    fill_and_drain(gate, engine, clock)
    while engine.waiting:
        engine.admit()
    before = gate._rate.per_second
    with gate.let_in("slow", 10):
        clock.advance_to(clock.now() + 60.0)
        with gate.let_in("", 10):
            engine.add()
        engine.admit()
        clock.advance_to(clock.now() + 60.0)
        engine.add()
    engine.admit()
    assert gate._rate.per_second == before


async def test_a_body_is_let_go_of_when_the_engine_has_its_tokens(local) -> None:
    made = await local("abc")
    made.process.is_paused = True
    padding = b" " * 2**20
    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    never = asyncio.Event()

    def request(path: str, body: bytes) -> Any:
        pieces = [body, padding]

        async def receive() -> dict[str, Any]:
            if not pieces:
                await never.wait()
            # A copy of its own, as it would come from a socket.
            piece = bytes(bytearray(pieces.pop(0)))
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

        async def send(_message: Any) -> None:
            pass

        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        scope |= {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 1)}
        scope |= {"server": ("localhost", 80), "scheme": "http", "http_version": "1.1"}
        return made.app({**scope, "root_path": "", "state": {}}, receive, send)

    chat = b'{"messages": [{"role": "user", "content": "x"}]}'
    bodies = {"/v1/completions": b'{"prompt": "x"}', "/v1/chat/completions": chat}
    tracemalloc.start()
    try:
        tasks = [asyncio.create_task(request(*one)) for _ in range(8) for one in bodies.items()]
        while len(made.engine.waiting) < 16:
            await asyncio.sleep(0.01)
        held, _ = tracemalloc.get_traced_memory()
        assert held < 4 * 2**20
    finally:
        tracemalloc.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
