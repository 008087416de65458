"""Authentication: finds the tenant of a request.

The middleware wraps a whole router and looks at no path and no method. So no spelling of a path
avoids it, and a wrong path tells a client without a key no more than a right one.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from headway.server.http.errors import ApiError, ErrorResponse
from headway.server.http.proxies import NO_IDENTITY, TrustedProxies
from headway.server.http.rate_headers import with_rate_headers
from headway.tenancy import Directory, TenantRecord
from headway.tenancy.keys import digest_of

_REFUSAL = ErrorResponse(
    401,
    "a valid API key is required: Authorization: Bearer <key>, or x-api-key: <key>",
    "authentication_error",
    "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)
_DISABLED = ErrorResponse(
    403,
    "this tenant is disabled; ask the operator of the server to enable it",
    "permission_error",
    "tenant_disabled",
)
_FOR_ADMINS = ErrorResponse(
    403,
    "this names tenants and needs an admin's key; set 'admin: true' for it in the tenants file",
    "permission_error",
    "admin_only",
)


def check_admin(request: Request, directory: Directory) -> None:
    """Refuse a tenant that may not see all tenants."""
    if not directory.may_see_all(request.state.record):
        raise ApiError(_FOR_ADMINS)


class Authentication:
    """ASGI middleware that refuses requests without a valid key.

    On a server without keys every request passes. Handlers read from `request.state`: `tenant`, the
    name; `is_admin`, whether the tenant may see data of others; `terms`; `record`, the whole
    TenantRecord. The values are fixed for the request: a change of the tenants file applies to the
    next request.
    """

    def __init__(self, app: ASGIApp, directory: Directory, proxies: TrustedProxies) -> None:
        self._app = app
        self._directory = directory
        self._proxies = proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)
            return
        record = self._resolve_tenant(scope)
        scope.setdefault("state", {}).update(
            tenant=record.tenant.name,
            is_admin=record.tenant.is_admin,
            terms=record.terms,
            record=record,
        )
        await self._app(scope, receive, with_rate_headers(send, record.meter))

    def _resolve_tenant(self, scope: Scope) -> TenantRecord:
        record = self._by_key(scope)
        if record.tenant.is_disabled:
            raise ApiError(_DISABLED)
        identity = self._proxies.identity_of(scope)
        if identity is NO_IDENTITY:
            return record
        if identity.tenant:
            record = self._directory.find_named(identity.tenant, record)
            if record.tenant.is_disabled:
                raise ApiError(_DISABLED)
        if identity.tier:
            tier = self._directory.roster.tier(identity.tier)
            if tier is None:
                message = (
                    f"there is no tier {identity.tier!r} in the tenants file; the gateway's "
                    "objective header names it"
                )
                raise ApiError(
                    ErrorResponse(400, message, "invalid_request_error", "invalid_gateway_header")
                )
            record = record.with_tier(tier)
        return record

    def _by_key(self, scope: Scope) -> TenantRecord:
        if self._directory.is_open:
            return self._directory.anonymous
        record = self._directory.by_digest(digest_of(_secret(scope)))
        if record is None:
            raise ApiError(_REFUSAL)
        return record


def _secret(scope: Scope) -> bytes:
    """Return the key of a request; x-api-key counts only without an Authorization header.

    Gateways have an x-api-key of their own, which they pass on.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    values = [value for name, value in headers if name == b"authorization"]
    is_bearer = bool(values)
    values = values or [value for name, value in headers if name == b"x-api-key"]
    if len(values) != 1:
        # With several headers, a proxy may have checked another one than this server would.
        raise ApiError(_REFUSAL)
    if not is_bearer:
        return values[0].strip()
    scheme, _, secret = values[0].partition(b" ")
    if scheme.lower() != b"bearer":
        raise ApiError(_REFUSAL)
    return secret.strip()
