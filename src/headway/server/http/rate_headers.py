"""The x-ratelimit headers in OpenAI's form, on every answer to a tenant with rate limits."""

from __future__ import annotations

import math

from starlette.types import Message, Send

from headway.tenancy import Meter
from headway.tenancy.quotas import TokenBucket


def with_rate_headers(send: Send, meter: Meter) -> Send:
    """Return a `send` that adds the rate headers when an answer begins."""
    if meter.requests is None and meter.tokens is None:
        return send

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_headers(meter)]}
        await send(message)

    return send_with_headers


def _headers(meter: Meter) -> list[tuple[bytes, bytes]]:
    now = meter.now()
    return [
        (f"x-ratelimit-{name}-{kind}".encode(), value.encode())
        for kind, bucket in (("requests", meter.requests), ("tokens", meter.tokens))
        if bucket is not None
        for name, value in _values(bucket, now).items()
    ]


def _values(bucket: TokenBucket, now: float) -> dict[str, str]:
    return {
        "limit": str(bucket.per_minute),
        "remaining": str(bucket.num_left(now)),
        "reset": duration(bucket.full_in_s(now)),
    }


def duration(seconds: float) -> str:
    """Return a duration such as 120ms, 8.64s or 6m0s, rounded up."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
