"""What may be used, what is owed, and when to come back."""

from __future__ import annotations

import random

import pytest

from headway.clock import VirtualClock
from headway.errors import QuotaError
from headway.tenancy.quotas import Meter, TokenBucket
from headway.tenancy.values import Quotas


def make(**quotas: int) -> tuple[Meter, VirtualClock]:
    clock = VirtualClock(1000.0)
    return Meter(Quotas(**quotas), clock), clock


def refusal(meter: Meter) -> QuotaError:
    with pytest.raises(QuotaError) as caught:
        meter.open_lease()
    return caught.value


def wait(clock: VirtualClock, seconds: float) -> None:
    clock.advance_to(clock.now() + seconds)


def test_so_many_requests_a_minute() -> None:
    meter, clock = make(requests_per_minute=6)
    for _ in range(6):
        meter.open_lease()
    error = refusal(meter)
    assert (error.quota, error.retry_after_s) == ("requests_per_minute", 10)
    assert "6 requests per minute" in str(error)
    wait(clock, 9.5)
    assert refusal(meter).retry_after_s == 1
    wait(clock, 0.5)
    meter.open_lease()
    assert refusal(meter).retry_after_s == 10


def test_retry_after_is_when_it_works() -> None:
    """A client that waits for Retry-After is accepted, for any limit and arrival time."""
    for per_minute in (1, 7, 59, 61, 1000):
        meter, clock = make(requests_per_minute=per_minute)
        rng = random.Random(per_minute)
        for _ in range(3 * per_minute):
            wait(clock, rng.random() * 30 / per_minute)
            try:
                meter.open_lease()
            except QuotaError as error:
                wait(clock, error.retry_after_s)
                meter.open_lease()


def test_idle_time_is_worth_a_minute_at_most() -> None:
    meter, clock = make(requests_per_minute=3)
    wait(clock, 86_400)
    for _ in range(3):
        meter.open_lease()
    refusal(meter)


def test_a_prompt_is_checked_when_it_is_known_and_output_paid_as_it_comes() -> None:
    meter, clock = make(tokens_per_minute=600)
    assert meter.tokens is not None
    lease = meter.open_lease()
    lease.reserve(1, 500)
    lease.charge(50)
    assert meter.tokens.level(clock.now()) == pytest.approx(50)
    other = meter.open_lease()
    with pytest.raises(QuotaError) as caught:
        other.reserve(1, 150)
    assert (caught.value.quota, caught.value.retry_after_s) == ("tokens_per_minute", 10)
    lease.charge(150)  # a debt of 100
    assert refusal(meter).retry_after_s == 11
    wait(clock, 11)
    meter.open_lease().reserve(1, 10)


def test_what_is_larger_than_a_bucket_passes_when_it_is_full() -> None:
    meter, clock = make(tokens_per_minute=60, requests_per_minute=10)
    meter.open_lease().reserve(64, 600)
    assert meter.tokens is not None and meter.requests is not None
    assert meter.tokens.level(clock.now()) == pytest.approx(-540)
    assert meter.requests.level(clock.now()) == pytest.approx(-54)
    wait(clock, 599)
    with pytest.raises(QuotaError):
        meter.open_lease().reserve(1, 600)
    wait(clock, 601)
    meter.open_lease().reserve(64, 600)


def test_the_settlement_is_what_it_came_to() -> None:
    meter, clock = make(tokens_per_minute=1000)
    assert meter.tokens is not None
    lease = meter.open_lease()
    lease.reserve(2, 300)
    lease.charge(40)
    lease.settle(200, 55)  # one prompt never got a seat; 15 tokens were never read
    lease.settle(200, 55)
    assert meter.tokens.level(clock.now()) == pytest.approx(745)
    lease.settle(0, 0)
    assert meter.tokens.level(clock.now()) == pytest.approx(1000)


def test_so_many_at_once() -> None:
    meter, _ = make(concurrent_requests=2)
    first, second = meter.open_lease(), meter.open_lease()
    assert refusal(meter).quota == "concurrent_requests"
    first.release()
    first.release()
    assert meter.num_in_flight == 1
    third = meter.open_lease()
    with pytest.raises(QuotaError):
        third.reserve(2, 10)
    third.release()
    second.release()
    assert meter.num_in_flight == 0
    alone = meter.open_lease()
    alone.reserve(5, 10)  # never too much alone, or it would be forever
    refusal(meter)
    alone.release()
    assert meter.is_idle


def test_a_refused_lease_takes_nothing() -> None:
    meter, clock = make(requests_per_minute=5, tokens_per_minute=10, concurrent_requests=9)
    lease = meter.open_lease()
    lease.reserve(1, 10)
    level = meter.requests and meter.requests.level(clock.now())
    refusal(meter)
    assert level == (meter.requests and meter.requests.level(clock.now()))
    assert meter.num_in_flight == 1


def test_other_limits_keep_what_was_used() -> None:
    meter, clock = make(requests_per_minute=10)
    for _ in range(8):
        meter.open_lease()
    meter.set_quotas(Quotas(requests_per_minute=100, tokens_per_minute=50))
    assert meter.requests is not None and meter.tokens is not None
    assert meter.requests.level(clock.now()) == pytest.approx(2)
    assert meter.tokens.level(clock.now()) == 50
    meter.set_quotas(Quotas(requests_per_minute=1))
    assert meter.requests.level(clock.now()) == 1
    assert meter.tokens is None
    assert meter.num_in_flight == 8


def test_no_quotas_no_refusals() -> None:
    meter, _ = make()
    visits = [meter.open_lease() for _ in range(1000)]
    for lease in visits:
        lease.reserve(64, 10**9)
        lease.charge(10**9)
        lease.release()
    assert meter.is_idle


def test_over_a_long_time_the_rate_is_kept() -> None:
    """However requests come, no more than a bucket and the rate's worth gets through."""
    rng, bucket, now = random.Random(5), TokenBucket(120, 0.0), 0.0
    taken = 0
    while now < 3600:
        now += rng.expovariate(5.0)
        amount = rng.randint(1, 5)
        if not bucket.wait_s(amount, now):
            bucket.take(amount, now)
            taken += amount
        assert bucket.level(now) <= 120
        assert taken <= 120 + 2 * now + 1
    assert taken >= 2 * now * 0.99
