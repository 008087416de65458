"""Profiles by name: files, profiles that Headway ships, and datasheets."""

from __future__ import annotations

from pathlib import Path

from headway.errors import ConfigError
from headway.sim.profile.datasheet import FORM, PREFIX, Datasheet
from headway.sim.profile.machine import MachineProfile, read_profile

SHIPPED = Path(__file__).parent / "shipped"
HELP = (
    "File written by `headway profile`, the name of a shipped profile, or a GPU by its datasheet: "
    f"{FORM}"
)


def find_profile(name: str) -> MachineProfile:
    """Return the profile of a name: a path, a shipped one, or a datasheet."""
    if name.startswith(PREFIX):
        return Datasheet.parse(name).profile()
    path = Path(name)
    if path.exists() or path.suffix:
        return read_profile(path)
    shipped = {one.stem: one for one in sorted(SHIPPED.glob("*.json"))}
    if name not in shipped:
        raise ConfigError(
            f"no file and no shipped profile {name!r}; shipped are: {', '.join(shipped) or 'none'}"
        )
    return read_profile(shipped[name])
