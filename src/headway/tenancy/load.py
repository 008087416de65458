"""Loads all tenants from the settings: single keys, the keys file, the tenants file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.clock import Clock
from headway.config import ServerConfig
from headway.tenancy import Directory
from headway.tenancy.keys_file import load_keys
from headway.tenancy.watch import KeysFile, RosterFile, RosterWatcher


@dataclass(frozen=True, slots=True)
class LoadedTenants:
    """The directory, and the watcher that reloads its files."""

    directory: Directory
    watch: RosterWatcher


def load_tenants(config: ServerConfig, clock: Clock) -> LoadedTenants:
    """Read all keys and tenants; a mistake raises ConfigError."""

    def read_keys(_path: Path) -> Mapping[bytes, str]:
        return {key.digest: key.tenant for key in load_keys(config)}

    roster_file = keys_file = None
    if config.api_keys_file is not None:
        keys_file = KeysFile(Path(config.api_keys_file), read_keys)
    if config.tenants_file is not None:
        from headway.tenancy.roster import read_roster  # needs yaml, which takes long

        roster_file = RosterFile(Path(config.tenants_file), read_roster)
    directory = Directory(
        clock,
        read_keys(Path()) if keys_file is None else keys_file.latest,
        None if roster_file is None else roster_file.latest,
    )
    return LoadedTenants(directory, RosterWatcher(directory, roster_file, keys_file))
