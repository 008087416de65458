"""Who may ask. A dependency of the router: it looks at no path that could be spelled around it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request

from headway.server.errors import ApiError, ErrorAnswer

_REFUSAL = ErrorAnswer(
    401,
    "a valid API key is required: Authorization: Bearer <key>",
    "authentication_error",
    "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def require_key(keys: Sequence[str]) -> Callable[[Request], Awaitable[None]]:
    """A dependency that lets a request through if it brings one of the keys; with no keys, all."""
    digests = [_digest(key) for key in keys]

    async def check(request: Request) -> None:
        if digests and not _is_known(request.headers.get("authorization", ""), digests):
            raise ApiError(_REFUSAL)

    return check


def _is_known(header: str, digests: Sequence[bytes]) -> bool:
    scheme, _, key = header.partition(" ")
    offered = _digest(key.strip())
    # Digests have one length, and all of them are compared: the time taken tells nothing.
    matches = [hmac.compare_digest(offered, digest) for digest in digests]
    return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
