"""The Idempotency-Key header: a name that a client gives a request which it may send again."""

from __future__ import annotations

from hashlib import blake2b

from starlette.requests import Request

from headway.server.http.errors import ApiError, ErrorResponse

HEADER = "idempotency-key"
MAX_KEY_CHARS = 255
_BAD_KEY = ErrorResponse(
    400,
    f"Idempotency-Key must be one header of 1 to {MAX_KEY_CHARS} printable ASCII characters",
    "invalid_request_error",
    "invalid_idempotency_key",
)


def alias_of(request: Request) -> str:
    """Return the name of a request by tenant and Idempotency-Key; empty without a key.

    A digest, so that no name of a tenant can be mistaken for that of another, and so that engines
    and frontends keep names of one length.
    """
    keys = request.headers.getlist(HEADER)
    if not keys:
        return ""
    key = keys[0]
    is_valid = 0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()
    if len(keys) > 1 or not is_valid:
        raise ApiError(_BAD_KEY)
    tenant: str = request.state.tenant
    text = f"{len(tenant)}:{tenant}:{key}".encode()
    # The point keeps it apart from ids, which GET /v1/streams takes.
    return f"key.{blake2b(text, digest_size=16, person=b'headway repeat').hexdigest()}"
