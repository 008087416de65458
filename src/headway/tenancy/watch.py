"""Notices that the tenants file has changed, and takes it over if it is right.

A file that is missing or wrong is said so once, and what was read before stays in force.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from headway.errors import ConfigError
from headway.tenancy.directory import Directory
from headway.tenancy.reading import read_roster
from headway.tenancy.values import Roster

logger = logging.getLogger(__name__)

Signature = tuple[int, ...]
_MISSING: Signature = ()
_UNKNOWN: Signature = (-1,)
MAX_READS = 5
SETTLE_S = 0.1


class RosterFile:
    """The file, and what is known of the state it was last read in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _UNKNOWN

    def has_changed(self) -> bool:
        """Since it was last read. Costs one look at the file system."""
        return self._signature() != self._seen

    def read(self) -> Roster:
        """What is in it now; may take long. ConfigError says what is wrong with it."""
        for _ in range(MAX_READS):
            self._seen = self._signature()
            roster = read_roster(self.path)
            if self._signature() == self._seen:
                return roster
            # Half of it may be missing, and what is missing may be who is disabled.
            time.sleep(SETTLE_S)
        self._seen = _UNKNOWN
        raise ConfigError(f"{self.path} changes while it is read")

    def _signature(self) -> Signature:
        try:
            status = os.stat(self.path)
        except OSError:
            return _MISSING
        # A file put in place of another may have its size and time, but not its number.
        return status.st_mtime_ns, status.st_size, status.st_ino


class Watch:
    """Keeps a directory as its file says."""

    def __init__(self, file: RosterFile, directory: Directory) -> None:
        self._file = file
        self._directory = directory

    async def look(self, is_forced: bool = False) -> None:
        """Read the file again if it has changed, or in any case."""
        if not is_forced and not self._file.has_changed():
            return
        before = self._directory.roster
        try:
            # Thousands of tenants take a while to read; those who stream must not wait for it.
            roster = await asyncio.to_thread(self._file.read)
            self._directory.adopt(roster)
        except ConfigError as error:
            logger.error("the tenants stay as they were: %s", error)
        else:
            logger.info("%s", _difference(self._file.path, before, roster))


def _difference(path: Path, old: Roster, new: Roster) -> str:
    num_added = len(new.tenants.keys() - old.tenants.keys())
    num_removed = len(old.tenants.keys() - new.tenants.keys())
    changed = [one for one in new.tenants if one in old.tenants]
    num_changed = sum(new.tenants[one] != old.tenants[one] for one in changed)
    tiers = "" if new.tiers == old.tiers else "; the tiers changed"
    return (
        f"read {path} again: {len(new.tenants)} tenants ({num_added} added, {num_removed} removed, "
        f"{num_changed} changed){tiers}"
    )
