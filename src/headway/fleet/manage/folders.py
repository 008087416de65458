"""The files of a fleet on one machine.

A home folder may be shared by machines, so the pid files of each machine have a folder of their
own, which is another one after a reboot.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headway.config import state_dir
from headway.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return a name of this machine since its last start."""
    try:
        boot_id = _BOOT_ID.read_text().strip()[:8]
    except OSError:
        boot_id = "boot"
    return f"{socket.gethostname()[:64]}-{boot_id}"


@dataclass(frozen=True)
class FleetFolder:
    """The folder of one fleet below the state directory."""

    root: Path

    @classmethod
    def of(cls, fleet: str) -> FleetFolder:
        return cls(Path(state_dir()) / "fleets" / fleet)

    @property
    def state(self) -> Path:
        """Spec and members of the fleet, as the manager last wrote them."""
        return self.root / "state.json"

    @property
    def manager(self) -> Path:
        """Pid file of the manager; its address is the control socket."""
        return self.root / "manager.json"

    @property
    def manager_log(self) -> Path:
        return self.root / "manager.log"

    @cached_property
    def machine(self) -> Path:
        """Folder of the members on this machine."""
        return self.root / machine_id()

    def pid_file(self, member: str) -> Path:
        return self.machine / f"{member}.json"

    def lock_file(self, member: str) -> Path:
        return self.machine / f"{member}.lock"

    def log_file(self, member: str) -> Path:
        return self.machine / f"{member}.log"

    def make(self) -> None:
        """Make the folders, for this user only; raise ConfigError if that is not possible."""
        try:
            for folder in (self.root, self.machine):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self.root}: {error.strerror}") from error

    def remove_state(self) -> None:
        """Remove all but the logs."""
        for path in (self.state, self.manager):
            path.unlink(missing_ok=True)
        for folder in (self.root, *(one for one in self.root.glob("*") if one.is_dir())):
            for path in folder.glob("*.lock"):
                path.unlink(missing_ok=True)


def list_fleets() -> list[str]:
    """Return the names of the fleets that this user has not brought down."""
    return sorted(path.parent.name for path in (Path(state_dir()) / "fleets").glob("*/state.json"))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file as a whole, readable by this user only."""
    part = path.with_suffix(f".{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    part.replace(path)
