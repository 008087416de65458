"""Whose word counts on who a request is for: the gateways in front of this server.

A gateway names the tenant and the tier in headers. They count only from the addresses the operator
trusts, taken from the connection itself; from anyone else they are as good as not there. A trusted
proxy must take away those its own clients send.
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
    """What a proxy said of a request; empty is nothing."""

    tenant: str = ""
    tier: str = ""


NO_IDENTITY = GatewayIdentity()


class TrustedProxies:
    """The proxies whose word counts."""

    def __init__(self, networks: Sequence[Network]) -> None:
        self._networks = tuple(networks)
        self._has_warned = False

    @classmethod
    def of(cls, entries: Sequence[str]) -> TrustedProxies:
        """From addresses and networks as settings have them."""
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
        """What whoever sent this may say of it."""
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
        # A listener of both kinds shows the addresses of the one in the other's form.
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)

    def _warn_once(self, scope: Scope) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        peer = (scope.get("client") or ("an unknown address",))[0]
        logger.warning(
            "ignored a gateway's headers from %s, which is no --trusted-proxy; this is said once",
            peer,
        )


def _single_value(headers: Sequence[tuple[bytes, bytes]], names: Sequence[bytes]) -> str:
    """The value of a header of these names. Of two that differ, one may be a client's own."""
    values = {value.strip() for name, value in headers if name in names} - {b""}
    if not values:
        return ""
    value = values.pop()
    if values or not _VALUE.fullmatch(value):
        name = names[0].decode()
        problem = "was given twice" if values else "must be 1 to 128 visible ASCII characters"
        raise ApiError(
            ErrorResponse(
                400, f"{name} {problem}", "invalid_request_error", "invalid_gateway_header"
            )
        )
    return value.decode("ascii")
