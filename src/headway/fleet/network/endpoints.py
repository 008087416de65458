"""Addresses of engines, and who may use them without a key."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from headway.errors import ConfigError

_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.%]+\]|[A-Za-z0-9._-]+|\*):([0-9]{1,5})")
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port of TCP."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, setting: str, may_be_any: bool = False) -> Endpoint:
        """Return the endpoint of `tcp://HOST:PORT`; raise ConfigError that names the setting.

        `may_be_any` allows what one can listen on but not connect to: every address, any port.
        """
        match = _ENDPOINT.fullmatch(text)
        if match is None or int(match[2]) > MAX_PORT:
            raise ConfigError(f"{setting} must be tcp://HOST:PORT, got {text[:200]!r}")
        if not may_be_any and (match[1] == "*" or int(match[2]) == 0):
            raise ConfigError(f"{setting} must name one host and port, got {text[:200]!r}")
        return cls(match[1], int(match[2]))

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        return self.host.startswith("[")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be at the other end."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:  # a name, or * for every address
            return False

    def check_key(self, has_key: bool, setting: str) -> None:
        """Raise ConfigError if this endpoint needs a cluster key and there is none."""
        if not has_key and not self.is_loopback:
            raise ConfigError(
                f"{setting} {self.address} leaves this machine and needs --cluster-key-file; make "
                "a key with: headway keys cluster FILE, and copy the file to every machine of the "
                "cluster"
            )
