"""The engines of a pool, as the manager of a fleet names them.

The same exchange tells the manager what this frontend needs, and which engines it still uses.
"""

from __future__ import annotations

import re
import secrets

from headway.engine.client.async_engine import AsyncEngine
from headway.errors import ConfigError, WireError
from headway.fleet.manage.link import ManagerLink
from headway.fleet.manage.messages import (
    MANAGER_VERSION,
    EngineList,
    FleetNeed,
    FrontendReport,
)
from headway.fleet.network.checks import check_engine
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import EngineUp, decode_engine_message

_SOURCE = re.compile(r"(tcp://[^/]+)/([a-z0-9-]{1,32})(?:/([a-z0-9-]{1,64}))?")


class FleetDiscovery:
    """Asks the manager of a fleet; a manager that is away changes nothing."""

    may_be_empty = True

    def __init__(self, link: ManagerLink, pool: str, member: str = "") -> None:
        self._link = link
        self._pool = pool
        self._member = member
        self._instance = secrets.token_hex(8)
        self._seen = 0
        """Version of the last list; its engines are in use or about to be."""
        self._was_ready = False
        """Whether requests were taken at the last report: by now the port is open too."""

    @classmethod
    def parse(cls, source: str, key: ClusterKey | None) -> FleetDiscovery:
        """Return the discovery of `tcp://HOST:PORT/POOL` or `tcp://HOST:PORT/POOL/MEMBER`."""
        match = _SOURCE.fullmatch(source)
        if match is None:
            raise ConfigError(
                f"--discover fleet: must be fleet:tcp://HOST:PORT/POOL, got {source[:200]!r}"
            )
        if key is None:
            raise ConfigError(
                "--discover fleet: needs the --cluster-key-file of the fleet: its manager talks to "
                "no one else"
            )
        endpoint = Endpoint.parse(match[1], "--discover fleet:")
        return cls(ManagerLink(endpoint, key), match[2], match[3] or "")

    async def find(self, engine: AsyncEngine) -> frozenset[Endpoint]:
        """Report to the manager; return the engines that it names.

        Raises OSError if the manager is away, and ConfigError if it does not know the pool.
        """
        try:
            answer = await self._link.ask(self._report(engine))
        except WireError as error:
            raise ConfigError(f"the answer of the manager cannot be read: {error}") from error
        if not isinstance(answer, EngineList):
            raise ConfigError("the answer of the manager is that to a host")
        if answer.problem:
            raise ConfigError(answer.problem)
        found = {Endpoint.parse(one, "an address of the manager") for one in answer.addresses}
        self._seen = answer.version
        if answer.facts and not engine.takes_requests:
            self._expect(engine, answer.facts)
        return frozenset(found)

    def _expect(self, engine: AsyncEngine, facts: bytes) -> None:
        """Have requests wait for an engine like those that the pool had before this frontend."""
        try:
            message = decode_engine_message(facts)
        except WireError as error:
            raise ConfigError(f"the facts of the manager cannot be read: {error}") from error
        if not isinstance(message, EngineUp) or check_engine(message.info, message.credit):
            raise ConfigError("the facts of the manager are not those of an engine")
        if message.tokenizer == engine.tokenizer.digest():
            engine.expect(message.info)

    def _report(self, engine: AsyncEngine) -> FrontendReport:
        demand, was_ready = engine.demand, self._was_ready
        self._was_ready = engine.takes_requests
        need = FleetNeed()
        if demand is not None:
            need = FleetNeed(demand.work_rate, demand.backlog_s, demand.ttft_s, demand.speed)
        return FrontendReport(
            MANAGER_VERSION,
            self._pool,
            self._member,
            self._instance,
            self._seen,
            was_ready and engine.takes_requests,
            [one.link.name for one in engine.engines if one.streams],
            need,
        )
