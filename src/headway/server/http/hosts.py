"""Which Host headers the server accepts.

A page of another site can point its own name to this machine (DNS rebinding), and a browser then
lets the page talk to a server here. But the browser sends that name as the Host. Only the raw
header is read, because a URL built from it could contain anything.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from headway.errors import ConfigError
from headway.server.http.errors import ApiError, ErrorResponse

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
LOOPBACK_NETWORK = 127
"""First number of every loopback address."""
ANY = "*"
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """The accepted host names, on any port; None accepts all."""

    names: frozenset[str] | None

    @classmethod
    def of(cls, listen_on: str, allowed: Sequence[str]) -> HostPolicy:
        """Return the policy of a listener; loopback names are always accepted.

        No site can point a loopback name to another machine.
        """
        if ANY in allowed or (not allowed and not is_loopback(listen_on)):
            return cls(None)
        return cls(LOOPBACK | {_name_in_list(name) for name in allowed})

    def refusal(self, values: Sequence[str], http_version: str) -> str | None:
        """Return what is wrong with the Host headers of a request, or None."""
        if not values and http_version == "1.0" and self.names is None:
            return None
        if len(values) != 1:
            return f"a request must have one Host header, this one has {len(values)}"
        match = _HOST.fullmatch(values[0])
        if match is None:
            return "the Host header is not a host name with an optional port"
        name = _normal(match[1])
        if self.names is not None and name not in self.names:
            return (
                f"this server does not answer to the host {name[:100]!r}; "
                "start it with --allowed-host to allow a name"
            )
        return None


class HostCheck:
    """ASGI middleware that answers 400 to a Host that is not accepted."""

    def __init__(self, app: ASGIApp, policy: HostPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            values = [
                value.decode("latin-1") for name, value in scope["headers"] if name == b"host"
            ]
            refusal = self._policy.refusal(values, scope.get("http_version", "1.1"))
            if refusal is not None:
                raise ApiError(
                    ErrorResponse(400, refusal, "invalid_request_error", "host_not_allowed")
                )
        await self._app(scope, receive, send)


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach a listener on this address."""
    name = _normal(address)
    if name == "localhost":
        return True
    try:
        return socket.inet_aton(name)[0] == LOOPBACK_NETWORK  # also reads 127.1
    except OSError:
        pass
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:  # a name, which may have any address
        return False


def _normal(name: str) -> str:
    return name.lower().removesuffix(".")


def _name_in_list(name: str) -> str:
    bare = f"[{name}]" if name.count(":") > 1 and not name.startswith("[") else name
    match = _HOST.fullmatch(bare)
    if match is None or match[1] != bare:
        raise ConfigError(f"--allowed-host takes a host name without a port, got {name[:100]!r}")
    return _normal(bare)
