"""fleet.yaml: the pools of a fleet, their engines and frontends.

Every field is checked before anything starts; an unknown field or setting is refused by name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headway.config import SECTIONS, load_config
from headway.errors import ConfigError
from headway.fleet.network.endpoints import Endpoint

MAX_FILE_BYTES = 64 * 1024
MAX_POOLS = 16
MAX_ENGINES = 256
MAX_FRONTENDS = 32
MAX_SETTINGS = 64
MAX_TEXT = 1024
DEFAULT_LEASE_S = 600.0
ENGINE_SECTIONS = (
    *("model", "cache", "scheduler", "supervision", "recording", "logs", "listener", "orphans"),
)
FRONTEND_SECTIONS = ("server", "logs", "tracing", "ledger", "frontend", "routing")
TAKEN = frozenset(
    {"model", "listen", "lease_s", "engine", "discover", "host", "port", "admin_port", "reuse_port"}
)
"""Settings that the manager or other fields of the file decide."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
Cpus = Annotated[float, msgspec.Meta(ge=0, le=1024)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Setting = str | int | float | bool | list[str] | None
Settings = Annotated[dict[str, Setting], msgspec.Meta(max_length=MAX_SETTINGS)]


class RaySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Ray cluster that places the hosts."""

    address: Text
    """HOST:PORT of the head."""
    namespace: Text = "headway"


class EnginesSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engines of a pool."""

    min: Annotated[int, msgspec.Meta(ge=0, le=MAX_ENGINES)] = 1
    max: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] | None = None
    """Most engines; without it, as many as `min`, and no autoscaling."""
    cpus: Cpus = 1.0
    """CPUs that Ray reserves for each."""
    lease_s: Annotated[float, msgspec.Meta(ge=1, le=7 * 86400)] = DEFAULT_LEASE_S
    """Seconds without a frontend and without its host after which an engine ends."""
    settings: Settings = {}

    @property
    def most(self) -> int:
        return max(self.min, 1) if self.max is None else self.max


class FrontendsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frontends of a pool; on one machine they share the port."""

    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_FRONTENDS)] = 1
    host: Text = "127.0.0.1"
    port: Port = 8000
    cpus: Cpus = 0.1
    settings: Settings = {}


class PoolSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engines of one model, and the frontends that use them."""

    name: Text
    model: Text
    """A path that is the same on every machine, or a Hugging Face id."""
    engines: EnginesSpec = EnginesSpec()
    frontends: FrontendsSpec = FrontendsSpec()


class FleetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of fleet.yaml."""

    name: Text
    pools: Annotated[list[PoolSpec], msgspec.Meta(min_length=1, max_length=MAX_POOLS)]
    cluster_key_file: Text
    ray: RaySpec | None = None
    """Without it, all hosts run on this machine."""
    max_engines: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOLS * MAX_ENGINES)] | None = None
    """Most engines of all pools together: beyond, they move between pools by demand."""
    manager: Text = "tcp://127.0.0.1:0"
    """Address of the manager, as hosts and frontends reach it; port 0: a free one."""

    def pool(self, name: str) -> PoolSpec:
        """Return a pool by its name; raise ConfigError if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(f"fleet {self.name} has no pool {name[:100]!r}; it has {self.pool_names}")

    @property
    def pool_names(self) -> str:
        return ", ".join(pool.name for pool in self.pools)


def read_spec(path: Path) -> FleetSpec:
    """Read and check fleet.yaml; raise ConfigError that names what is wrong."""
    import yaml

    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        given: Any = yaml.safe_load(content)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not YAML: {reason[:300]}") from error
    try:
        spec = msgspec.convert(given, FleetSpec)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    try:
        return check_spec(spec, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def check_spec(spec: FleetSpec, folder: Path) -> FleetSpec:
    """Return the spec with full paths; raise ConfigError if its fields contradict each other."""
    names = [spec.name, *(pool.name for pool in spec.pools)]
    for name in names:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"name {name[:100]!r} must be 1 to 32 of a-z, 0-9 and -")
    if len(set(names[1:])) < len(names[1:]):
        raise ConfigError("two pools have the same name")
    if spec.ray is not None:
        Endpoint.parse(f"tcp://{spec.ray.address}", "ray.address (as HOST:PORT)")
    host = Endpoint.parse(spec.manager, "manager", may_be_any=True).host
    if host == "*":
        raise ConfigError("manager must name the address by which hosts reach it, not *")
    for pool in spec.pools:
        _check_pool(pool)
    ports = [pool.frontends.port for pool in spec.pools if pool.frontends.count]
    if 0 in ports or len(set(ports)) < len(ports):
        raise ConfigError("the frontends of each pool need a port of their own")
    least = sum(pool.engines.min for pool in spec.pools)
    if spec.max_engines is not None and spec.max_engines < least:
        raise ConfigError(f"max_engines ({spec.max_engines}) is below the sum of min ({least})")
    key_file = folder.absolute() / Path(spec.cluster_key_file).expanduser()
    return msgspec.structs.replace(spec, cluster_key_file=str(key_file))


def _check_pool(pool: PoolSpec) -> None:
    engines, frontends = pool.engines, pool.frontends
    if engines.max is not None and engines.max < engines.min:
        raise ConfigError(f"pool {pool.name}: max ({engines.max}) is below min ({engines.min})")
    for part, settings, sections in (
        ("engines", engines.settings, ENGINE_SECTIONS),
        ("frontends", frontends.settings, FRONTEND_SECTIONS),
    ):
        where = f"pool {pool.name}: {part}.settings"
        known = {
            name for section in sections for name in SECTIONS[section].__dataclass_fields__
        } - TAKEN
        unknown = sorted(name for name in settings if name.replace("-", "_") not in known)
        if unknown:
            raise ConfigError(f"{where} has no {', '.join(unknown)[:200]}")
        try:
            load_config(settings, environ={})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error


def flags_of(settings: dict[str, Setting]) -> list[str]:
    """Return settings as flags of `headway engine` and `headway frontend`."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}={one}" for one in value]
        elif value is not None:
            flags.append(f"--{flag}={value}")
    return flags
