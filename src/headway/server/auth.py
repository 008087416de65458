"""Who may ask, and as which tenant.

The guard stands around a whole router. It looks at no path and no method, so there is none that
could be spelled around it, and a wrong path says as little as a right one to who has no key.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from headway.server.errors import ApiError, ErrorAnswer
from headway.server.keys import Key, digest_of

_REFUSAL = ErrorAnswer(
    401,
    "a valid API key is required: Authorization: Bearer <key>",
    "authentication_error",
    "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


class Guard:
    """Lets a request through if it brings one of the keys; with no keys, every request.

    Handlers find the tenant in `request.state.tenant`: the key's name, or nothing without keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[Key]) -> None:
        self._app = app
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = self._tenant(scope)
        await self._app(scope, receive, send)

    def _tenant(self, scope: Scope) -> str:
        if not self._keys:
            return ""
        offered = [value for name, value in scope["headers"] if name == b"authorization"]
        # Of several headers, a proxy in front may have read another one than we would.
        key = _find(offered[0], self._keys) if len(offered) == 1 else None
        if key is None:
            raise ApiError(_REFUSAL)
        return key.tenant


def _find(header: bytes, keys: Sequence[Key]) -> Key | None:
    scheme, _, secret = header.partition(b" ")
    offered = digest_of(secret.strip())
    # All are compared, in constant time each: how long it takes tells nothing.
    matches = [key for key in keys if hmac.compare_digest(offered, key.digest)]
    return matches[0] if matches and scheme.lower() == b"bearer" else None
