"""Which engines there are: a fixed list, a file, a name in DNS, or the manager of a fleet.

A source that cannot be read changes nothing: the engines known so far stay. So does a source that
names none, unless it may: a fleet may have been scaled to no engine.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from headway.engine.client.async_engine import AsyncEngine
from headway.errors import ConfigError
from headway.fleet.frontends.fleet_discovery import FleetDiscovery
from headway.fleet.frontends.link import LinkParts, NetworkLink
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint

logger = logging.getLogger(__name__)

POLL_S = 1.0
MAX_ENGINES = 1024
_MAX_FILE_BYTES = 1024**2


class Discovery(Protocol):
    """A source of endpoints."""

    may_be_empty: bool
    """Whether no endpoint is an answer too."""

    async def find(self, engine: AsyncEngine) -> frozenset[Endpoint]:
        """Return the endpoints now; raise OSError or ConfigError if they cannot be read.

        A manager is told what `engine`, their user, needs.
        """
        ...


class FileDiscovery:
    """Reads one `tcp://HOST:PORT` per line; # begins a comment."""

    may_be_empty = False

    def __init__(self, path: Path) -> None:
        self._path = path

    async def find(self, engine: AsyncEngine) -> frozenset[Endpoint]:
        with self._path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return frozenset(Endpoint.parse(line, f"a line of {self._path}") for line in lines if line)


class DnsDiscovery:
    """Resolves a name to the addresses of all engines, which listen on one port."""

    may_be_empty = False

    def __init__(self, name: str, port: int) -> None:
        self._name = name
        self._port = port

    async def find(self, engine: AsyncEngine) -> frozenset[Endpoint]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._name, self._port, type=socket.SOCK_STREAM)
        hosts = {str(address[0]) for *_, address in found}
        return frozenset(
            Endpoint(f"[{host}]" if ":" in host else host, self._port) for host in hosts
        )


class FixedDiscovery:
    """The endpoints of a list."""

    may_be_empty = False

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = frozenset(endpoints)

    async def find(self, engine: AsyncEngine) -> frozenset[Endpoint]:
        return self._endpoints


def parse_discovery(
    engines: Sequence[str], discover: str | None, key: ClusterKey | None = None
) -> Discovery:
    """Return the source that the settings name; raise ConfigError if they name none or two."""
    if bool(engines) == (discover is not None):
        raise ConfigError("a frontend needs either --engine tcp://HOST:PORT or --discover")
    if discover is None:
        return FixedDiscovery([Endpoint.parse(text, "--engine") for text in engines])
    kind, _, rest = discover.partition(":")
    if kind == "file" and rest:
        return FileDiscovery(Path(rest))
    if kind == "fleet":
        return FleetDiscovery.parse(rest, key)
    name, _, port = rest.rpartition(":")
    if kind == "dns" and name and port.isascii() and port.isdecimal():
        endpoint = Endpoint.parse(f"tcp://{name}:{port}", "--discover")
        return DnsDiscovery(endpoint.host, endpoint.port)
    raise ConfigError(
        "--discover must be dns:NAME:PORT, file:PATH or fleet:tcp://HOST:PORT/POOL, got "
        f"{discover[:200]!r}"
    )


class EngineSet:
    """Keeps the links of a frontend to the engines that a source names."""

    def __init__(self, discovery: Discovery, parts: LinkParts) -> None:
        self._discovery = discovery
        self._parts = parts
        self._known: frozenset[Endpoint] = frozenset()
        self._last_problem = ""

    async def update(self, engine: AsyncEngine) -> None:
        """Add links to new engines, and retire those that are no longer named."""
        try:
            found = await self._discovery.find(engine)
            if not found and not self._discovery.may_be_empty:  # as while a file is written anew
                raise ConfigError("no engine is named")
            if len(found) > MAX_ENGINES:
                raise ConfigError(f"{len(found)} engines are named, {MAX_ENGINES} at most")
            for endpoint in found:
                endpoint.check_key(self._parts.key is not None, "--discover")
        except (OSError, ConfigError) as error:
            if str(error) != self._last_problem:
                logger.warning("the engines cannot be found: %s", error)
                self._last_problem = str(error)
            return
        self._last_problem = ""
        engine.is_managed = self._discovery.may_be_empty
        for endpoint in sorted(found - self._known, key=lambda one: one.address):
            engine.add_engine(NetworkLink(endpoint, self._parts))
        for endpoint in self._known - found:
            logger.info("engine %s is no longer named", endpoint.address)
            engine.retire_engine(endpoint.address)
        self._known = found

    async def follow(self, engine: AsyncEngine) -> None:
        """Update at intervals, until cancelled."""
        while True:
            await self.update(engine)
            await asyncio.sleep(POLL_S)
