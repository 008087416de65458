"""Reloads the tenants file or the keys file when it has changed and is valid.

A file that is missing or invalid is logged once, and the values read before stay in force. The two
files are independent: an invalid file does not stop the other from being adopted.
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
    """A file, its last valid content, and its state when it was last read."""

    def __init__(self, path: Path, parse: Callable[[Path], T]) -> None:
        """Read the file with `parse`, which raises ConfigError for invalid content."""
        self.path = path
        self._parse = parse
        self._last_signature = _UNKNOWN
        self.latest = self._read()

    def has_changed(self) -> bool:
        """Return whether the file has changed since it was last read; costs one stat call."""
        return self._signature() != self._last_signature

    def read(self) -> None:
        """Set `latest` from the file; on ConfigError, `latest` stays. May take long."""
        self.latest = self._read()

    def _read(self) -> T:
        for _ in range(MAX_READS):
            self._last_signature = self._signature()
            value = self._parse(self.path)
            if self._signature() == self._last_signature:
                return value
            # Part of the file may be missing, for example that a tenant is disabled.
            time.sleep(SETTLE_S)
        self._last_signature = _UNKNOWN
        raise ConfigError(f"{self.path} changes while it is read; replace it in one step (mv)")

    def _signature(self) -> Signature:
        try:
            status = os.stat(self.path)
        except OSError:
            return _MISSING
        # A file that replaces another may have its size and time, but not its inode.
        return status.st_mtime_ns, status.st_size, status.st_ino


RosterFile = WatchedFile[Roster]
KeysFile = WatchedFile[Mapping[bytes, str]]


class RosterWatcher:
    """Keeps a directory up to date with its files, of which there may be none."""

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
        """Read the files that have changed, or all if forced, and adopt their content."""
        files = {"keys": self._keys_file, "tenants": self._roster_file}
        read: set[str] = set()
        for name, file in files.items():
            if file is None or not (is_forced or file.has_changed()):
                continue
            try:
                # Reading thousands of tenants takes a while, and streams must not wait for it.
                await asyncio.to_thread(file.read)
                read.add(name)
            except ConfigError as error:
                logger.error("the %s stay as they were: %s", name, error)
        if read:
            self._adopt(read)

    def _adopt(self, read: set[str]) -> None:
        """Adopt both files; if they contradict each other, adopt one of them."""
        old_roster, old_keys = self._directory.roster, self._directory.keys
        roster = old_roster if self._roster_file is None else self._roster_file.latest
        keys = old_keys if self._keys_file is None else self._keys_file.latest
        # The new keys come first: the other file must not keep a revoked key valid.
        choices = (
            ("", roster, keys),
            ("tenants", old_roster, keys),
            ("keys", roster, old_keys),
        )
        reason = ""
        for unchanged, new_roster, new_keys in choices:
            try:
                self._directory.adopt(new_roster, new_keys)
            except ConfigError as error:
                reason = reason or str(error)
                continue
            if unchanged:
                logger.error("the %s stay as they were: %s", unchanged, reason)
                read = read - {unchanged}

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
