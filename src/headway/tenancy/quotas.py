"""What a tenant has used, against what it may use: two buckets and a count, O(1) for each request.

A bucket fills evenly, up to a minute's worth. Output is not known in advance, so it is paid for as
it comes and a bucket may be in debt; then nothing is let in until it is paid. A request larger than
a whole bucket is let in when the bucket is full: otherwise it never could be.
"""

from __future__ import annotations

import math

from headway.clock import Clock
from headway.errors import QuotaError
from headway.tenancy.values import Quotas

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Of a token: what repeated sums of fractions may be off by."""


class TokenBucket:
    """So much per minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What may be taken now; less than nothing is a debt."""
        if now > self._at:
            gained = (now - self._at) * self.per_minute / MINUTE_S
            self._level = min(float(self.per_minute), self._level + gained)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """How long until so much may be taken; of more than fits, until it is full."""
        missing = min(amount, self.per_minute) - self.level(now) - _ROUNDING
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def full_in_s(self, now: float) -> float:
        return self.wait_s(self.per_minute, now)

    def num_left(self, now: float) -> int:
        """Whole ones that may be taken now."""
        return max(0, math.floor(self.level(now) + _ROUNDING))

    def take(self, amount: float, now: float) -> None:
        """Pay; a negative amount is paid back."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit from now on; what has been used stays used."""
        level = self.level(now)
        self.per_minute = per_minute
        self._level = min(float(per_minute), level)


class Meter:
    """One tenant's use of its quotas."""

    def __init__(self, quotas: Quotas, clock: Clock) -> None:
        self._clock = clock
        self.num_in_flight = 0
        """Requests let in that have not ended."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_quotas(quotas)

    def set_quotas(self, quotas: Quotas) -> None:
        """Other limits from now on; what has been used stays used."""
        now = self._clock.now()
        self.quotas = quotas
        self.requests = _resized(self.requests, quotas.requests_per_minute, now)
        self.tokens = _resized(self.tokens, quotas.tokens_per_minute, now)

    @property
    def is_idle(self) -> bool:
        """Nothing is under way and nothing is owed: a fresh one would be the same."""
        now = self._clock.now()
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.num_in_flight and all(not bucket.full_in_s(now) for bucket in buckets)

    def now(self) -> float:
        return self._clock.now()

    def open_lease(self) -> QuotaLease:
        """Let a request in before anything is known of it, or say when to come back."""
        lease = QuotaLease(self, self._clock)
        lease.reserve(1, 0)
        return lease


class QuotaLease:
    """What one HTTP request takes of its tenant's quotas, from its arrival to its end.

    Whoever holds one sees to it that `release` is called.
    """

    def __init__(self, meter: Meter, clock: Clock) -> None:
        self._meter = meter
        self._clock = clock
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._is_released = False

    def reserve(self, num_requests: int, num_prompt_tokens: int) -> None:
        """It is so much in all, as far as is known by now; refused if that is too much. What it
        took before stays taken: a body has been read for it."""
        meter, now = self._meter, self._clock.now()
        num_others = meter.num_in_flight - self._num_requests
        _check_concurrent(num_others, num_requests, meter.quotas.concurrent_requests)
        _check_bucket("requests", meter.requests, num_requests, self._num_requests, now)
        # Who is in debt waits until it is paid, even if nothing is known yet of what is asked.
        least = max(1, num_prompt_tokens)
        _check_bucket("tokens", meter.tokens, least, self._num_prompt_tokens, now)
        if meter.requests is not None:
            meter.requests.take(num_requests - self._num_requests, now)
        meter.num_in_flight += num_requests - self._num_requests
        self._num_requests = num_requests
        self._charge_tokens(num_prompt_tokens - self._num_prompt_tokens)
        self._num_prompt_tokens = num_prompt_tokens

    def charge(self, num_tokens: int) -> None:
        """So much output more."""
        self._num_output_tokens += num_tokens
        self._charge_tokens(num_tokens)

    def settle(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """This is what it came to in the end, whatever was taken on the way."""
        taken = self._num_prompt_tokens + self._num_output_tokens
        self._num_prompt_tokens, self._num_output_tokens = num_prompt_tokens, num_output_tokens
        self._charge_tokens(num_prompt_tokens + num_output_tokens - taken)

    def release(self) -> None:
        """It has ended; doing so again does nothing."""
        if not self._is_released:
            self._is_released = True
            self._meter.num_in_flight -= self._num_requests

    def _charge_tokens(self, num_tokens: int) -> None:
        if num_tokens and self._meter.tokens is not None:
            self._meter.tokens.take(num_tokens, self._clock.now())


def _check_concurrent(num_others: int, num_requests: int, limit: int | None) -> None:
    if limit is not None and num_others and num_others + num_requests > limit:
        # Nobody knows when one of them will end.
        retry_after_s = 1
        raise QuotaError(
            f"{num_others} requests of this tenant are under way; at most {limit} may be",
            retry_after_s,
            "concurrent_requests",
        )


def _check_bucket(
    kind: str, bucket: TokenBucket | None, amount: int, taken: int, now: float
) -> None:
    """Refuse what the bucket does not hold; `taken` of it has been taken already."""
    if bucket is None:
        return
    wait_s = bucket.wait_s(min(amount, bucket.per_minute) - taken, now)
    if wait_s > 0:
        raise QuotaError(
            f"this tenant may use {bucket.per_minute} {kind} per minute and has "
            f"{bucket.num_left(now)} left; this request needs {amount}",
            max(1, math.ceil(wait_s)),
            f"{kind}_per_minute",
        )


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket
