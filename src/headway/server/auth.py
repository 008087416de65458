"""Who may ask, and as which tenant.

The guard stands around a whole router. It looks at no path and no method, so there is none that
could be spelled around it, and a wrong path says as little as a right one to who has no key.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from headway.server.errors import ApiError, ErrorAnswer
from headway.server.proxies import SILENCE, Proxies
from headway.server.rate_headers import with_rate_headers
from headway.tenancy import Directory, Standing
from headway.tenancy.keys import digest_of

_REFUSAL = ErrorAnswer(
    401,
    "a valid API key is required: Authorization: Bearer <key>",
    "authentication_error",
    "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_DISABLED = ErrorAnswer(
    403,
    "this tenant has been disabled; ask whoever runs the server",
    "permission_error",
    "tenant_disabled",
)


class Guard:
    """Lets a request through if it brings a key of a tenant; where no keys are, every request.

    Handlers find in `request.state`: `tenant`, its name; `is_admin`, whether it may see what is
    others'; `terms`, on which it is served; `standing`, all of it. Decided once: what changes in
    the tenants file afterwards is for the next request.
    """

    def __init__(self, app: ASGIApp, directory: Directory, proxies: Proxies) -> None:
        self._app = app
        self._directory = directory
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)
            return
        standing = self._standing(scope)
        scope.setdefault("state", {}).update(
            tenant=standing.tenant.name,
            is_admin=standing.tenant.is_admin,
            terms=standing.terms,
            standing=standing,
        )
        await self._app(scope, receive, with_rate_headers(send, standing.meter))

    def _standing(self, scope: Scope) -> Standing:
        standing = self._by_key(scope)
        if standing.tenant.is_disabled:
            raise ApiError(_DISABLED)
        word = self._proxies.word_on(scope)
        if word is SILENCE:
            return standing
        if word.tenant:
            standing = self._directory.named(word.tenant, standing)
            if standing.tenant.is_disabled:
                raise ApiError(_DISABLED)
        if word.tier:
            tier = self._directory.roster.tier(word.tier)
            if tier is None:
                message = f"there is no tier {word.tier!r}: the gateway's objective names a tier"
                raise ApiError(
                    ErrorAnswer(400, message, "invalid_request_error", "invalid_gateway_header")
                )
            standing = standing.in_tier(tier)
        return standing

    def _by_key(self, scope: Scope) -> Standing:
        if self._directory.is_open:
            return self._directory.anonymous
        offered = [value for name, value in scope["headers"] if name == b"authorization"]
        # Of several headers, a proxy in front may have read another one than we would.
        scheme, _, secret = (offered[0] if len(offered) == 1 else b"").partition(b" ")
        standing = self._directory.by_digest(digest_of(secret.strip()))
        if standing is None or scheme.lower() != b"bearer":
            raise ApiError(_REFUSAL)
        return standing
