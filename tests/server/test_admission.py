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
from headway.engine.client.waiting_streams import WaitingStreams
from headway.engine.process.messages import EventBatch
from headway.errors import OverloadedError, TenantLimitError
from headway.server.admission import AdmissionController, DrainRate


class StillEngine:
    """Keeps added requests waiting until a test admits them."""

    def __init__(self, policy: str) -> None:
        capacity = SimpleNamespace(max_model_len=1000)
        self.info = SimpleNamespace(capacity=capacity, scheduling_policy=policy)
        self.waiting = WaitingStreams()
        self.num_added = 0
        self.refused: list[tuple[Any, Exception]] = []
        self.listener: Any = None
        self.num_admitted = 0

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
        self.num_admitted += 1
        self.listener(EventBatch(admitted=[Admitted("x", 0.0, 0.0, 0, 1, False)]))

    async def refuse(self, stream: Any, error: Exception) -> None:
        self.waiting.pop(stream.request_id)
        self.refused.append((stream, error))


def make(
    policy: str = "fair", **settings: Any
) -> tuple[AdmissionController, StillEngine, VirtualClock]:
    engine, clock = StillEngine(policy), VirtualClock()
    return AdmissionController(ServerConfig(**settings), engine, clock), engine, clock  # pyright: ignore


def test_a_full_queue_is_refused() -> None:
    admission, engine, _ = make(max_num_queued_reqs=3)
    engine.add()
    with admission.admit("", 10), admission.admit("", 10):
        assert admission.num_queued == 3
        with (
            pytest.raises(OverloadedError, match="3 requests are waiting") as refusal,
            admission.admit("", 10),
        ):
            pass
        assert refusal.value.retry_after_s >= 1
    assert admission.num_queued == 1


def refusal_of(admission: AdmissionController, tenant: str, num_bytes: int = 10) -> str:
    try:
        with admission.admit(tenant, num_bytes):
            return ""
    except OverloadedError as error:
        return str(error)


@pytest.mark.parametrize(("policy", "is_shared"), [("fair", False), ("fcfs", True)])
def test_the_flood_of_one_tenant_fills_the_queue_of_others_only_without_shares(
    policy: str, is_shared: bool
) -> None:
    admission, engine, _ = make(policy, max_num_queued_reqs=8, max_num_queued_tokens=100)
    for _ in range(8):
        engine.add(tenant="flood")
    assert "8 requests are waiting" in refusal_of(admission, "flood")
    assert bool(refusal_of(admission, "other")) is is_shared
    if is_shared:
        return
    # Of two tenants that wait, each may have half of it.
    for _ in range(3):
        engine.add(tenant="other")
    assert not refusal_of(admission, "other")
    engine.add(tenant="other")
    assert "12 requests are waiting" in refusal_of(admission, "other")
    engine.add(num_tokens=12, tenant="third")
    assert "132 prompt tokens" in refusal_of(admission, "third", 200)


def queue_up(
    admission: AdmissionController, engine: StillEngine, tenant: str, gateway: str | None = None
) -> bool:
    """One more request of a tenant joins the queue, unless it is refused."""
    try:
        with admission.admit(tenant, 40, gateway=gateway):
            engine.add(tenant=tenant, num_tokens=10)
    except OverloadedError as error:
        assert error.retry_after_s >= 1
        return False
    return True


def test_the_queue_is_bounded_however_many_tenants_there_are() -> None:
    admission, engine, _ = make(max_num_queued_reqs=256)
    num_in = sum(queue_up(admission, engine, f"t{number}") for number in range(10_000))
    assert num_in == admission.num_queued == 512


def test_the_tokens_that_wait_are_bounded_but_for_one_prompt() -> None:
    admission, engine, _ = make(max_num_queued_tokens=10_000)
    for number in range(100):
        with contextlib.suppress(OverloadedError), admission.admit(f"t{number}", None):
            engine.add(tenant=f"t{number}", num_tokens=900)
    assert 20_000 <= engine.waiting.totals.total.num_tokens < 20_900


def test_each_tenant_that_floods_leaves_room_for_the_next() -> None:
    admission, engine, _ = make(max_num_queued_reqs=64)
    numbers = []
    for number in range(5):
        count = 0
        while queue_up(admission, engine, f"t{number}"):
            count += 1
        numbers.append(count)
    assert numbers == [64, 32, 16, 8, 4]


def test_a_flood_of_names_from_a_gateway_leaves_room_for_keys() -> None:
    admission, engine, _ = make(max_num_queued_reqs=64)
    num_guests = sum(queue_up(admission, engine, f"guest-{i}", "gateway") for i in range(1000))
    assert num_guests == 96, "three quarters of the hard bound"
    assert not queue_up(admission, engine, "gateway"), "the gateway is one of them"
    num_own = 0
    while queue_up(admission, engine, "quiet"):
        num_own += 1
    assert num_own == 16
    # Nor does a second gateway take all of it.
    sum(queue_up(admission, engine, f"other-{i}", "second") for i in range(1000))
    assert queue_up(admission, engine, "third")


def test_an_unlisted_tenant_that_floods_leaves_room_for_others() -> None:
    admission, engine, _ = make(max_num_queued_reqs=64)
    while queue_up(admission, engine, "flood", "gateway"):
        pass
    assert admission.num_queued == 64
    assert all(queue_up(admission, engine, f"guest-{i}", "gateway") for i in range(32))


def test_gateways_of_unlisted_tenants_without_requests_are_dropped() -> None:
    admission, engine, _ = make(max_num_queued_reqs=8)
    for number in range(1000):
        assert queue_up(admission, engine, f"guest-{number}", "gateway")
        engine.admit()
        assert len(admission._gateways) <= 33


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_bodies_on_their_way_are_bounded_in_bytes(policy: str) -> None:
    admission, _, _ = make(
        policy, max_body_bytes=1000, max_num_queued_tokens=10**9, max_num_queued_reqs=10**6
    )
    with contextlib.ExitStack() as stack:
        num_held = 0
        with pytest.raises(OverloadedError, match="bytes of request bodies are waiting"):
            for _ in range(100):
                # One says how long it is, one does not, one is refused when it is read.
                length = (1000, None, 10**9)[num_held % 3]
                stack.enter_context(admission.admit("flood", length))
                num_held += 1
        assert num_held == 32
        if policy == "fair":
            stack.enter_context(admission.admit("other", 1000))
    assert not refusal_of(admission, "flood", 1000)


def test_random_floods_pass_no_bound_and_never_shut_out_a_quiet_key() -> None:
    random = Random(3)
    admission, engine, _ = make(max_num_queued_reqs=32)
    for _ in range(3_000):
        kind = random.random()
        if kind < 0.5:
            queue_up(admission, engine, f"guest-{random.randrange(500)}", "gateway")
        elif kind < 0.8:
            queue_up(admission, engine, f"key-{random.randrange(4)}")
        elif kind < 0.9 and engine.waiting:
            engine.admit()
        else:
            assert not refusal_of(admission, "quiet")
        assert admission.num_queued <= 64


def test_the_wait_behind_others_is_by_turns_where_tenants_have_shares() -> None:
    admission, engine, clock = make(max_queue_wait_s=3.0)
    with admission.admit("flood", 10):
        pass
    for _ in range(40):
        engine.add(tenant="flood")
    for _ in range(20):  # two a second
        clock.advance_to(clock.now() + 0.5)
        engine.admit()
    assert "admission is expected in 10 s" in refusal_of(admission, "flood")
    assert not refusal_of(admission, "other")
    for _ in range(3):
        engine.add(tenant="other")
    assert "admission is expected in 4 s" in refusal_of(admission, "other")


def test_a_request_counts_from_its_bytes_before_it_has_tokens() -> None:
    admission, _, _ = make(max_num_queued_tokens=600)
    with admission.admit("", 2000):  # about 500 tokens
        with pytest.raises(OverloadedError, match="prompt tokens"), admission.admit("", 800):
            pass
        with admission.admit("", 400):
            pass


def test_one_that_is_alone_is_never_too_much() -> None:
    admission, _, _ = make(max_num_queued_tokens=10)
    with admission.admit("", 10_000):
        pass


def test_the_limit_of_one_key_is_not_that_of_another() -> None:
    admission, engine, _ = make(max_num_queued_reqs_per_key=2)
    engine.add(tenant="a")
    with admission.admit("a", 1):
        with pytest.raises(TenantLimitError), admission.admit("a", 1):
            pass
        with admission.admit("b", 1):
            pass


def fill_and_drain(
    admission: AdmissionController, engine: StillEngine, clock: VirtualClock
) -> None:
    """Twenty wait, and one is admitted every half second."""
    with admission.admit("", 1):
        pass
    for _ in range(20):
        engine.add()
    for _ in range(12):
        clock.advance_to(clock.now() + 0.5)
        engine.admit()


def test_a_wait_that_would_be_too_long_is_refused_at_once() -> None:
    admission, engine, clock = make(max_queue_wait_s=5.0)
    fill_and_drain(admission, engine, clock)
    with admission.admit("", 1):  # 8 wait, at 2 a second
        pass
    for _ in range(5):
        engine.add()
    with (
        pytest.raises(OverloadedError, match="admission is expected in") as refusal,
        admission.admit("", 1),
    ):
        pass
    assert refusal.value.retry_after_s in (6, 7, 8)


def drain(engine: StillEngine, clock: VirtualClock, per_second: int, seconds: int) -> None:
    """Admit waiting requests at a rate."""
    for _ in range(per_second * seconds):
        clock.advance_to(clock.now() + 1 / per_second)
        engine.admit()


def test_the_first_that_leave_slowly_are_no_reason_to_refuse() -> None:
    admission, engine, clock = make(max_queue_wait_s=10.0)
    with admission.admit("", 1):
        pass
    for _ in range(90):
        engine.add()
    drain(engine, clock, 4, seconds=5)  # prompts in no cache
    assert not refusal_of(admission, "")  # 70 wait: 18 s if it went on like this
    drain(engine, clock, 16, seconds=2)
    assert not refusal_of(admission, "")
    assert admission._rate.per_second == pytest.approx(8, rel=0.1)


@pytest.mark.parametrize(("max_wait_s", "seconds"), [(10.0, 6), (4.0, 3)])
def test_a_queue_that_stays_slow_is_refused_after_half_of_the_wait(
    max_wait_s: float, seconds: int
) -> None:
    admission, engine, clock = make(max_queue_wait_s=max_wait_s)
    with admission.admit("", 1):
        pass
    for _ in range(90):
        engine.add()
    drain(engine, clock, 4, seconds - 1)
    assert not refusal_of(admission, "")
    drain(engine, clock, 4, seconds=1)
    assert "admission is expected in" in refusal_of(admission, "")


def test_many_that_leave_say_how_fast_it_goes_without_a_wait() -> None:
    rate = DrainRate(0.0, 10.0)
    for step in range(1, 20):
        rate.observe(step * 0.125, 4, 5)
        # Eight steps until the queue counts as backed up, and eight in which 32 leave.
        assert (rate.per_second is not None) == (step >= 16), step


def test_the_rate_is_not_measured_while_nothing_backs_up() -> None:
    rate = DrainRate(0.0, 10.0)
    for second in range(0, 1000, 10):
        rate.start(float(second))
        rate.observe(second + 0.05, 1, 0)
    assert rate.per_second is None


def test_the_rate_follows_what_it_sees() -> None:
    rate = DrainRate(0.0, 10.0)
    for step in range(1, 400):
        rate.observe(step * 0.1, 1, 5)
    assert rate.per_second == pytest.approx(10, rel=0.05)
    for step in range(1, 200):
        rate.observe(40 + step * 1.0, 1, 5)
    assert rate.per_second == pytest.approx(1, rel=0.05)


async def test_a_request_that_waited_too_long_is_refused() -> None:
    admission, engine, clock = make(max_queue_age_s=30.0)
    engine.add(at=0.0)
    engine.add(at=20.0)
    clock.advance_to(clock.now() + 29.0)
    await admission.refuse_expired()
    assert not engine.refused
    clock.advance_to(clock.now() + 2.0)
    await admission.refuse_expired()
    ((stream, error),) = engine.refused
    assert stream.command.arrived_at == 0.0
    assert isinstance(error, OverloadedError) and error.retry_after_s >= 1


async def test_a_request_with_a_longer_target_is_not_refused_before_it() -> None:
    admission, engine, clock = make(max_queue_age_s=30.0)
    start_s = clock.now()
    engine.add(at=start_s, targets=Targets(deadline_s=100.0))
    engine.add(at=start_s, targets=Targets(tpot_s=1.0))
    engine.add(at=start_s, targets=Targets(ttft_s=40.0, deadline_s=100.0))
    for at, left in ((31.0, [0, 2]), (41.0, [0]), (99.0, [0]), (101.0, [])):
        clock.advance_to(start_s + at)
        await admission.refuse_expired()
        assert [int(one.request_id) - 1 for one in engine.waiting] == left


def test_closed_admission_refuses_every_request() -> None:
    admission, _, _ = make()
    admission.close()
    with pytest.raises(OverloadedError, match="shutting down"), admission.admit("", 1):
        pass


def test_a_refusal_leaves_no_trace() -> None:
    admission, _, _ = make()
    with contextlib.suppress(ValueError), admission.admit("", 1):
        raise ValueError
    assert admission.num_queued == 0


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
    await made.admission.refuse_expired()
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


def test_several_prompts_count_as_several_requests() -> None:
    admission, engine, _ = make(max_num_queued_reqs=10)
    engine.add()
    with admission.admit("", 10) as reservation:
        admission.resize(reservation, 9, 100)
        assert admission.num_queued == 10
    with admission.admit("", 10) as reservation, pytest.raises(OverloadedError):
        admission.resize(reservation, 10, 100)
    assert admission.num_queued == 1


def test_a_body_of_unknown_length_counts_as_the_longest() -> None:
    admission, engine, _ = make(max_num_queued_tokens=1500)
    engine.add(num_tokens=600)
    with pytest.raises(OverloadedError, match="prompt tokens"), admission.admit("", None):
        pass


def test_an_old_drain_rate_refuses_nothing() -> None:
    admission, engine, clock = make(max_queue_wait_s=5.0)
    fill_and_drain(admission, engine, clock)
    for stream in list(engine.waiting):
        engine.waiting.pop(stream.request_id)
    engine.listener(EventBatch())
    clock.advance_to(clock.now() + 36_000.0)
    with admission.admit("", 1):
        for _ in range(20):
            engine.add()
        with admission.admit("", 1):
            pass


def test_bodies_on_their_way_are_not_taken_for_a_wait() -> None:
    admission, engine, clock = make(max_queue_wait_s=5.0, max_num_queued_tokens=10**9)
    fill_and_drain(admission, engine, clock)  # 8 wait, at 2 a second
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(admission.admit("", 10))


def test_one_that_is_slow_to_send_its_body_does_not_change_the_rate() -> None:
    admission, engine, clock = make()
    fill_and_drain(admission, engine, clock)
    while engine.waiting:
        engine.admit()
    before = admission._rate.per_second
    with admission.admit("slow", 10):
        clock.advance_to(clock.now() + 60.0)
        with admission.admit("", 10):
            engine.add()
        engine.admit()
        clock.advance_to(clock.now() + 60.0)
        engine.add()
    engine.admit()
    assert admission._rate.per_second == before


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


async def test_waiting_spot_requests_are_not_ahead_of_ordinary_ones() -> None:
    """A batch always has some waiting; their slow drain says nothing about ordinary requests."""
    admission, engine, clock = make(max_queue_wait_s=5.0, max_num_queued_reqs_per_key=3)
    spot = Terms(tenant="a", is_spot=True)
    for number in range(20):
        command = SimpleNamespace(token_ids=[1] * 10, terms=spot, arrived_at=0.0)
        stream: Any = SimpleNamespace(request_id=f"spot{number}", command=command)
        engine.waiting.add(stream)
    for _ in range(30):
        clock.advance_to(clock.now() + 10.0)
        engine.listener(EventBatch())
    with admission.admit("a", 10), admission.admit("a", 10), admission.admit("a", 10):
        with pytest.raises(TenantLimitError), admission.admit("a", 10):
            pass
        with pytest.raises(TenantLimitError), admission.admit("a", 10, is_spot=True):
            pass
    assert admission.num_queued == 20
