"""Quotas over several frontends: counted once, by the router or, without one, by each."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from benchmarks.support.fleets import Fleet
from headway.clock import VirtualClock
from headway.errors import QuotaError, WireError
from headway.fleet.router.messages import ChargeLease, LeaseItem, OpenLease, RestoreLease, UsedQuota
from headway.fleet.router.quotas import MAX_METERS, NEW_S, FleetMeters, SharedQuotas
from headway.fleet.router.wire import Told, decode_told, encode
from headway.tenancy import Meter, QuotaLease, Quotas
from headway.tenancy.keys import digest_of, write_digest
from tests.fleet.conftest import NUM_BLOCKS, STEP_S, wait_log

QUOTAS = Quotas(requests_per_minute=10, tokens_per_minute=1000, concurrent_requests=4)


class Frontend:
    """The quotas of a frontend, joined to a router without a network."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.meter = Meter(QUOTAS, clock)
        self.quotas = SharedQuotas()
        self.leases: dict[int, QuotaLease] = {}
        self.meters: FleetMeters | None = None
        self.is_slow = False

    def join(self, meters: FleetMeters | None) -> None:
        self.leases, self.meters = {}, meters
        if meters is None:
            self.quotas.unshare()
        else:
            self.quotas.share(self._tell)

    def _tell(self, item: LeaseItem) -> None:
        assert self.meters is not None
        (read,) = decode_told(encode(Told(1, [item]))).items
        answer = self.meters.handle(self.leases, read)  # pyright: ignore
        if answer is not None and not self.is_slow:
            asyncio.get_running_loop().call_soon(self.quotas.take, answer)

    async def open(self, num_tokens: int = 10, tenant: str = "t") -> QuotaLease:
        lease = self.meter.open_lease()
        try:
            lease.reserve(1, num_tokens)
            await self.quotas.reserve(tenant, lease)
        except QuotaError:
            lease.release()
            raise
        return lease


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


@pytest.fixture
def pair(clock: VirtualClock) -> tuple[Frontend, Frontend]:
    meters = FleetMeters(clock)
    frontends = Frontend(clock), Frontend(clock)
    for one in frontends:
        one.join(meters)
    return frontends


async def test_requests_of_two_frontends_are_one_use(pair: tuple[Frontend, Frontend]) -> None:
    leases = [await pair[number % 2].open() for number in range(4)]
    for one in pair:
        with pytest.raises(QuotaError, match="concurrent_requests is 4"):
            await one.open()
    for lease in leases:
        lease.release()
    for number in range(6):
        (await pair[number % 2].open()).release()
    with pytest.raises(QuotaError, match="10 requests per minute") as refused:
        await pair[0].open()
    assert refused.value.quota == "requests_per_minute"


async def test_tokens_of_two_frontends_are_one_use(pair: tuple[Frontend, Frontend]) -> None:
    first, second = pair
    lease = await first.open(500)
    lease.charge(300)
    with pytest.raises(QuotaError, match="tokens per minute"):
        await second.open(501)
    first.quotas.flush()
    with pytest.raises(QuotaError, match="200 left"):
        await second.open(201)
    left = second.meter.used
    assert left[1] == 0.0, "what the router refuses is given back here"
    lease.settle(500, 100)
    lease.release()
    assert await second.open(390)


async def test_the_next_router_knows_what_was_used(
    pair: tuple[Frontend, Frontend], clock: VirtualClock
) -> None:
    leases = [await pair[number % 2].open(100) for number in range(4)]
    for one in pair:
        one.join(None)
    (await pair[0].open(100)).release()  # alone, a frontend counts its own
    standby = FleetMeters(clock)
    for one in pair:
        one.join(standby)
    with pytest.raises(QuotaError, match="concurrent"):
        await pair[0].open()
    for lease in leases:
        lease.release()
    with pytest.raises(QuotaError, match="500 left"):
        await pair[1].open(501)
    # A frontend that was away for a moment is not counted twice.
    clock.advance_to(clock.now() + NEW_S)
    used = standby._meters["t"].used
    pair[0].join(standby)
    assert standby._meters["t"].used == used


async def test_a_router_that_does_not_answer_refuses_nobody(
    pair: tuple[Frontend, Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.fleet.router.quotas.ANSWER_S", 0.02)
    first, second = pair
    first.is_slow = True
    lease = await first.open()
    assert lease.mirror is None and not first.leases, "what it opened too late is closed"
    waiting = asyncio.create_task(first.open())
    await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    assert not first.leases and not first.quotas._asked
    assert await second.open()


async def test_a_tenant_uses_its_own_quota_only(pair: tuple[Frontend, Frontend]) -> None:
    for _ in range(4):
        await pair[0].open(tenant="hostile")
    pair[0].meter = Meter(QUOTAS, pair[0]._clock)
    assert await pair[0].open(tenant="other")


def test_memory_of_the_router_is_bounded(clock: VirtualClock) -> None:
    meters, leases = FleetMeters(clock), {}
    for number in range(MAX_METERS + 10):
        meters.handle(leases, UsedQuota(f"t{number}", QUOTAS, 0.0, 0.0))
    assert len(meters._meters) <= MAX_METERS and len(meters._known_at) == len(meters._meters)
    meters.handle(leases, OpenLease(1, "t", QUOTAS, 1, 1))
    with pytest.raises(WireError):
        meters.handle(leases, OpenLease(1, "t", QUOTAS, 1, 1))
    meters.handle(leases, ChargeLease(99, 5))  # a lease that is not there
    assert len(leases) == 1


@pytest.mark.parametrize(
    "item",
    [
        OpenLease(1, "t" * 300, QUOTAS, 1, 1),
        OpenLease(1, "t", Quotas(requests_per_minute=0), 1, 1),
        OpenLease(1, "t", QUOTAS, -5, 1),
        RestoreLease(1, "t", Quotas(tokens_per_minute=-1), 1),
        UsedQuota("t", QUOTAS, float("nan"), 0.0),
        UsedQuota("t", QUOTAS, 0.0, float("inf")),
    ],
)
def test_a_wrong_quota_is_no_message(item: LeaseItem) -> None:
    with pytest.raises(WireError):
        decode_told(encode(Told(1, [item])))


@pytest.mark.full
async def test_a_quota_holds_over_two_frontends_and_without_the_router(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Six requests a minute for all frontends; without a router, for each."""
    tenants = tmp_path / "tenants.yaml"
    key = write_digest(digest_of(b"a"))
    tenants.write_text(f"tenants:\n  a: {{keys: ['{key}'], quotas: {{requests_per_minute: 6}}}}\n")
    fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
    router = fleet.start_router()
    servers = [
        fleet.start_frontend(router=[router.address], tenants_file=str(tenants)) for _ in range(2)
    ]
    for server in servers:
        await wait_log(server, " decides", 90.0)
        await wait_log(server, " is up: ", 90.0)
    statuses = [await ask(server.url) for _ in range(5) for server in servers]
    assert statuses.count(200) == 6 and statuses.count(429) == 4
    router.kill()
    for server in servers:
        await wait_log(server, " is left with")
    # Each has had three, and knows of no others.
    statuses = [await ask(server.url) for _ in range(2) for server in servers]
    assert 200 in statuses


async def ask(url: str) -> int:
    body = {"prompt": "x", "max_tokens": 2}
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer a"}) as client:
        return (await client.post("/v1/completions", json=body)).status_code
