"""Gateway identities: tenant and tier that a trusted proxy names in headers.

The headers count only from addresses that the operator trusts, and the address is that of the
connection. From any other address they are ignored. A trusted proxy must remove the same headers
from the requests of its clients.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Scope

from headway.errors import ConfigError
from headway.server.http.errors import ApiError, ErrorResponse

logger = logging.getLogger(__name__)

FAIRNESS_HEADERS = (b"x-gateway-inference-fairness-id", b"x-llm-d-inference-fairness-id")
OBJECTIVE_HEADERS = (b"x-gateway-inference-objective", b"x-llm-d-inference-objective")
_HEADERS = frozenset((*FAIRNESS_HEADERS, *OBJECTIVE_HEADERS))
_VALUE = re.compile(rb"[!-~]{1,128}")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class GatewayIdentity:
    """Tenant and tier that a gateway named; empty means not named."""

    tenant: str = ""
    tier: str = ""


NO_IDENTITY = GatewayIdentity()


class TrustedProxies:
    """The networks of trusted proxies."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)
        self._has_warned = False

    @classmethod
    def of(cls, entries: Sequence[str]) -> TrustedProxies:
        """Return the proxies from the addresses and networks of the settings."""
        try:
            return cls([ipaddress.ip_network(entry.strip()) for entry in entries])
        except ValueError as error:
            raise ConfigError(
                f"trusted_proxy must be an address or a network such as 10.0.0.0/8: {error}"
            ) from error

    @property
    def trusts_everyone(self) -> bool:
        return any(network.prefixlen == 0 for network in self._networks)

    def identity_of(self, scope: Scope) -> GatewayIdentity:
        """Return the identity in a request's headers, if its sender is trusted."""
        headers = [(name, value) for name, value in scope["headers"] if name in _HEADERS]
        if not headers:
            return NO_IDENTITY
        if not self._trusts(scope):
            self._warn_once(scope)
            return NO_IDENTITY
        return GatewayIdentity(
            _single_value(headers, FAIRNESS_HEADERS), _single_value(headers, OBJECTIVE_HEADERS)
        )

    def _trusts(self, scope: Scope) -> bool:
        peer = scope.get("client")
        if not peer or not self._networks:
            return False
        try:
            address = ipaddress.ip_address(peer[0])
        except ValueError:
            return False
        # A dual-stack listener shows IPv4 addresses in their IPv6-mapped form.
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)

    def _warn_once(self, scope: Scope) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        peer = (scope.get("client") or ("an unknown address",))[0]
        logger.warning(
            "ignored gateway headers from %s, which is no --trusted-proxy; logged only once",
            peer,
        )


def _single_value(headers: Sequence[tuple[bytes, bytes]], names: Sequence[bytes]) -> str:
    """Return the value of a header that has several names; two different values are refused.

    One of two values may come from the gateway's client.
    """
    values = {value.strip() for name, value in headers if name in names} - {b""}
    if not values:
        return ""
    value = values.pop()
    if values or not _VALUE.fullmatch(value):
        name = names[0].decode()
        problem = "has two values" if values else "must be 1 to 128 visible ASCII characters"
        raise ApiError(
            ErrorResponse(
                400, f"{name} {problem}", "invalid_request_error", "invalid_gateway_header"
            )
        )
    return value.decode("ascii")
