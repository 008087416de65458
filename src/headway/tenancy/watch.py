"""Notices that the tenants file or the keys file has changed, and adopts it if it is right.

A file that is missing or wrong is reported once, and what was read before stays in force. The files
stand apart: a wrong one does not keep the other from being adopted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from headway.errors import ConfigError
from headway.tenancy.directory import Directory
from headway.tenancy.values import Roster

logger = logging.getLogger(__name__)

T = TypeVar("T")
Signature = tuple[int, ...]
_MISSING: Signature = ()
_UNKNOWN: Signature = (-1,)
MAX_READS = 5
SETTLE_S = 0.1


class WatchedFile(Generic[T]):
    """A file, what was in it when it was last right, and the state it was last read in."""

    def __init__(self, path: Path, parse: Callable[[Path], T]) -> None:
        """Read the file with `parse`. ConfigError says what is wrong with it."""
        self.path = path
        self._parse = parse
        self._last_signature = _UNKNOWN
        self.latest = self._read()

    def has_changed(self) -> bool:
        """Whether it differs from when it was last read. Costs one look at the file system."""
        return self._signature() != self._last_signature

    def read(self) -> None:
        """Set `latest` to what is in it now; may take long. ConfigError, and `latest` stays."""
        self.latest = self._read()

    def _read(self) -> T:
        for _ in range(MAX_READS):
            self._last_signature = self._signature()
            value = self._parse(self.path)
            if self._signature() == self._last_signature:
                return value
            # Half of it may be missing, and what is missing may be who is disabled.
            time.sleep(SETTLE_S)
        self._last_signature = _UNKNOWN
        raise ConfigError(f"{self.path} changes while it is read")

    def _signature(self) -> Signature:
        try:
            status = os.stat(self.path)
        except OSError:
            return _MISSING
        # A file put in place of another may have its size and time, but not its number.
        return status.st_mtime_ns, status.st_size, status.st_ino


RosterFile = WatchedFile[Roster]
KeysFile = WatchedFile[Mapping[bytes, str]]


class RosterWatcher:
    """Keeps a directory as its files say; it may have none."""

    def __init__(
        self,
        directory: Directory,
        roster_file: RosterFile | None = None,
        keys_file: KeysFile | None = None,
    ) -> None:
        self._directory = directory
        self._roster_file = roster_file
        self._keys_file = keys_file

    async def poll(self, is_forced: bool = False) -> None:
        """Read the files that have changed, or all of them, and adopt what is in them."""
        files = {"keys": self._keys_file, "tenants": self._roster_file}
        read: set[str] = set()
        for name, file in files.items():
            if file is None or not (is_forced or file.has_changed()):
                continue
            try:
                # Thousands of tenants take a while to read; those who stream must not wait for it.
                await asyncio.to_thread(file.read)
                read.add(name)
            except ConfigError as error:
                logger.error("the %s stay as they were: %s", name, error)
        if read:
            self._adopt(read)

    def _adopt(self, read: set[str]) -> None:
        """Have the directory go by both files; if they contradict each other, by one of them."""
        old_roster, old_keys = self._directory.roster, self._directory.keys
        roster = old_roster if self._roster_file is None else self._roster_file.latest
        keys = old_keys if self._keys_file is None else self._keys_file.latest
        # A key that is revoked must not stay valid because of what the other file says.
        choices = (
            ("", roster, keys),
            ("tenants", old_roster, keys),
            ("keys", roster, old_keys),
        )
        why = ""
        for kept, new_roster, new_keys in choices:
            try:
                self._directory.adopt(new_roster, new_keys)
            except ConfigError as error:
                why = why or str(error)
                continue
            if kept:
                logger.error("the %s stay as they were: %s", kept, why)
                read = read - {kept}
            break
        roster, keys = self._directory.roster, self._directory.keys
        if self._keys_file is not None and ("keys" in read or keys != old_keys):
            logger.info("%s", _key_difference(self._keys_file.path, old_keys, keys))
        if self._roster_file is not None and ("tenants" in read or roster != old_roster):
            logger.info("%s", _difference(self._roster_file.path, old_roster, roster))


def _key_difference(path: Path, old: Mapping[bytes, str], new: Mapping[bytes, str]) -> str:
    num_added, num_removed = len(new.keys() - old.keys()), len(old.keys() - new.keys())
    return f"read {path} again: {len(new)} keys ({num_added} added, {num_removed} removed)"


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
