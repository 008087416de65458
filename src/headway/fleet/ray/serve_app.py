"""A fleet as a Ray Serve application, for `serve deploy` and KubeRay; needs `ray[serve]`.

    serve run headway.fleet.ray.serve_app:app file=/path/to/fleet.yaml

Serve keeps the manager of the fleet running, shows its status and changes the number of engines.
Clients talk to the frontends of the fleet, not to Serve's proxy: tokens do not pass through Ray.
Deleting the application leaves the fleet as it is, because an update of the application deletes its
replicas too; `headway fleet down` ends it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve

from headway.errors import ConfigError
from headway.fleet.manage.control import ControlRequest, FleetClient, FleetStatus
from headway.fleet.manage.spec import FleetSpec, RaySpec, read_spec


class FleetConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `user_config` of the deployment may say; a change does not restart anything."""

    engines: dict[str, int | None] = {}
    """Engines of each pool; null gives a pool back to autoscaling."""


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0}, health_check_period_s=5)
class FleetApp:
    """Has a manager run on its node, and passes what Serve asks to it."""

    def __init__(self, file: str) -> None:
        """Start the fleet of a file, or go on with it if it is there."""
        self._spec = on_this_cluster(read_spec(Path(file)))
        self._client = FleetClient(self._spec.name)
        self._start()

    def _start(self) -> None:
        if not self._client.is_up:
            self._client.start(self._spec)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Set the number of engines; called by Serve at the start and after each change."""
        config = msgspec.convert(user_config, FleetConfig)
        for pool, number in config.engines.items():
            request = ControlRequest("scale", pool, number)
            await asyncio.to_thread(self._client.ask, request)

    async def check_health(self) -> None:
        """Start a lost manager again; raise ConfigError if it does not answer."""
        await asyncio.to_thread(self._start)
        await asyncio.to_thread(self._client.status)

    async def __call__(self, _request: Any) -> dict[str, Any]:
        """Answer every HTTP request with the status of the fleet."""
        status: FleetStatus = await asyncio.to_thread(self._client.status)
        return msgspec.to_builtins(status)


def on_this_cluster(spec: FleetSpec) -> FleetSpec:
    """Return a spec that is placed by the Ray cluster that this process has joined."""
    address = ray.get_runtime_context().gcs_address
    return msgspec.structs.replace(spec, ray=RaySpec(address))


def app(arguments: dict[str, str]) -> serve.Application:
    """Build the application; `file` is the path of fleet.yaml on the node of the replica."""
    if set(arguments) != {"file"}:
        raise ConfigError("give the file of the fleet, and nothing else: file=/path/to/fleet.yaml")
    return FleetApp.bind(arguments["file"])  # pyright: ignore[reportAttributeAccessIssue]
