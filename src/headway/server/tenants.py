"""Everyone this server knows, from its settings: single keys, the keys file, the tenants file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.clock import Clock
from headway.config import ServerConfig
from headway.server.keys import load_keys
from headway.tenancy import Directory
from headway.tenancy.watch import RosterFile, Watch


@dataclass(frozen=True, slots=True)
class Tenants:
    """The directory, and what keeps it up to date if there is a file."""

    directory: Directory
    watch: Watch | None = None


def load_tenants(config: ServerConfig, clock: Clock) -> Tenants:
    """Read all of it. ConfigError says what is wrong: a mistake must not open a server."""
    keys = {key.digest: key.tenant for key in load_keys(config)}
    if config.tenants_file is None:
        return Tenants(Directory(clock, keys))
    file = RosterFile(Path(config.tenants_file))
    directory = Directory(clock, keys, file.read())
    return Tenants(directory, Watch(file, directory))
