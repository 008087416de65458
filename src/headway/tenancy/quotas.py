"""Use of a tenant's quotas: two token buckets and a count, O(1) per request.

A bucket refills evenly, up to a minute's worth. The output of a request is not known in advance. It
is charged as it is produced, so a bucket may go into debt; then requests are refused until the debt
is paid. A request larger than a whole bucket is accepted when the bucket is full, because it would
otherwise never be accepted.
"""

from __future__ import annotations

import math
from typing import Protocol

from headway.clock import Clock
from headway.errors import QuotaError
from headway.tenancy.values import Quotas

MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Error that sums of fractions of a token may accumulate."""


class TokenBucket:
    """A bucket that refills at `per_minute`, up to a minute's worth."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Return the amount that may be taken now; a negative level is a debt."""
        if now > self._at:
            gained = (now - self._at) * self.per_minute / MINUTE_S
            self._level = min(float(self.per_minute), self._level + gained)
            self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` may be taken, or until the bucket is full."""
        missing = min(amount, self.per_minute) - self.level(now) - _ROUNDING
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def full_in_s(self, now: float) -> float:
        return self.wait_s(self.per_minute, now)

    def num_left(self, now: float) -> int:
        """Return the whole units that may be taken now."""
        return max(0, math.floor(self.level(now) + _ROUNDING))

    def take(self, amount: float, now: float) -> None:
        """Take an amount; a negative amount is given back."""
        self._level = min(float(self.per_minute), self.level(now) - amount)

    def resize(self, per_minute: int, now: float) -> None:
        """Change the rate; the use so far still counts."""
        level = self.level(now)
        self.per_minute = per_minute
        self._level = min(float(per_minute), level)


class Meter:
    """One tenant's use of its quotas."""

    def __init__(self, quotas: Quotas, clock: Clock) -> None:
        self._clock = clock
        self.num_in_flight = 0
        """Accepted requests that have not ended."""
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.set_quotas(quotas)

    def set_quotas(self, quotas: Quotas) -> None:
        """Change the limits; the use so far still counts."""
        now = self._clock.now()
        self.quotas = quotas
        self.requests = _resized(self.requests, quotas.requests_per_minute, now)
        self.tokens = _resized(self.tokens, quotas.tokens_per_minute, now)

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way and all buckets are full."""
        now = self._clock.now()
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.num_in_flight and all(not bucket.full_in_s(now) for bucket in buckets)

    def now(self) -> float:
        return self._clock.now()

    @property
    def has_limits(self) -> bool:
        quotas = self.quotas
        limits = quotas.requests_per_minute, quotas.tokens_per_minute, quotas.concurrent_requests
        return any(limit is not None for limit in limits)

    @property
    def used(self) -> tuple[float, float]:
        """Requests and tokens that the buckets lack, as after a recent use."""
        now = self._clock.now()
        requests, tokens = (
            0.0 if bucket is None else bucket.per_minute - bucket.level(now)
            for bucket in (self.requests, self.tokens)
        )
        return requests, tokens

    def take(self, num_requests: float, num_tokens: float) -> None:
        """Count use that was accepted elsewhere."""
        now = self._clock.now()
        if self.requests is not None:
            self.requests.take(num_requests, now)
        if self.tokens is not None:
            self.tokens.take(num_tokens, now)

    def open_lease(self) -> QuotaLease:
        """Accept a request before its size is known, or raise QuotaError."""
        lease = QuotaLease(self, self._clock)
        lease.reserve(1, 0)
        return lease

    def restore_lease(self, num_requests: int) -> QuotaLease:
        """Return the lease of requests that were accepted elsewhere, and have not ended."""
        lease = QuotaLease(self, self._clock)
        lease.num_requests = num_requests
        self.num_in_flight += num_requests
        return lease

    def count_repeat(self) -> None:
        """Count a request whose answer exists already, or raise QuotaError."""
        now = self._clock.now()
        _check_bucket("requests", self.requests, 1, 0, now)
        if self.requests is not None:
            self.requests.take(1, now)


class LeaseMirror(Protocol):
    """Hears what a lease takes, where the use of all frontends is counted."""

    def charge(self, num_tokens: int) -> None: ...

    def release(self) -> None: ...


class QuotaLease:
    """What one HTTP request holds of its tenant's quotas, from its arrival to its end.

    The owner of a lease must call `release`.
    """

    def __init__(self, meter: Meter, clock: Clock) -> None:
        self.meter = meter
        self._clock = clock
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self._num_output_tokens = 0
        self._is_released = False
        self.mirror: LeaseMirror | None = None

    def reserve(self, num_requests: int, num_prompt_tokens: int) -> None:
        """Set the request's known size; raise QuotaError if it is too large.

        What the lease took before stays taken, because the server has read a body for it.
        """
        meter, now = self.meter, self._clock.now()
        num_others = meter.num_in_flight - self.num_requests
        _check_concurrent(num_others, num_requests, meter.quotas.concurrent_requests)
        _check_bucket("requests", meter.requests, num_requests, self.num_requests, now)
        # A tenant in debt waits until the debt is paid, even if the prompt is not known yet.
        least = max(1, num_prompt_tokens)
        _check_bucket("tokens", meter.tokens, least, self.num_prompt_tokens, now)
        if meter.requests is not None:
            meter.requests.take(num_requests - self.num_requests, now)
        meter.num_in_flight += num_requests - self.num_requests
        self.num_requests = num_requests
        self._charge_tokens(num_prompt_tokens - self.num_prompt_tokens)
        self.num_prompt_tokens = num_prompt_tokens

    def charge(self, num_tokens: int) -> None:
        """Charge output tokens."""
        self._num_output_tokens += num_tokens
        self._charge_tokens(num_tokens)

    def settle(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Replace what the lease has taken by the final token counts."""
        num_charged = self.num_prompt_tokens + self._num_output_tokens
        self.num_prompt_tokens, self._num_output_tokens = num_prompt_tokens, num_output_tokens
        self._charge_tokens(num_prompt_tokens + num_output_tokens - num_charged)

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        if not self._is_released:
            self._is_released = True
            if self.mirror is not None:
                self.mirror.release()
            self.meter.num_in_flight -= self.num_requests

    def _charge_tokens(self, num_tokens: int) -> None:
        if num_tokens and self.mirror is not None:
            self.mirror.charge(num_tokens)
        if num_tokens and self.meter.tokens is not None:
            self.meter.tokens.take(num_tokens, self._clock.now())


def _check_concurrent(num_others: int, num_requests: int, limit: int | None) -> None:
    if limit is not None and num_others and num_others + num_requests > limit:
        # The end of a running request cannot be predicted.
        retry_after_s = 1
        raise QuotaError(
            f"{num_others} requests of this tenant are running or waiting; its quota "
            f"concurrent_requests is {limit}",
            retry_after_s,
            "concurrent_requests",
        )


def _check_bucket(
    kind: str, bucket: TokenBucket | None, amount: int, num_charged: int, now: float
) -> None:
    """Raise QuotaError if the bucket lacks `amount`, of which `num_charged` is already taken."""
    if bucket is None:
        return
    wait_s = bucket.wait_s(min(amount, bucket.per_minute) - num_charged, now)
    if wait_s > 0:
        raise QuotaError(
            f"this tenant may use {bucket.per_minute} {kind} per minute and has "
            f"{bucket.num_left(now)} left; this request needs {amount} ({kind}_per_minute)",
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
