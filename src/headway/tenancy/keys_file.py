"""Keys from the settings and the keys file, with their tenants.

What a key permits is not decided here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.tenancy.keys import NAME, NAME_RULE, digest_of_text, write_digest

_FILE_MODE = 0o600
_LINE = re.compile(r"sha256:([0-9a-f]{64})\s+(\S+)")
_HOW_TO_ADD = "`headway keys new NAME --file {path}` adds one"


@dataclass(frozen=True, slots=True)
class Key:
    """The digest of a key and the name of its tenant."""

    tenant: str
    digest: bytes

    @property
    def line(self) -> str:
        """The key as a line of a keys file."""
        return f"{write_digest(self.digest)} {self.tenant}"


def key_for(secret: str, tenant: str | None = None) -> Key:
    """Return the entry of a key; by default its digest names it."""
    digest = digest_of_text(secret)
    if tenant is not None and not NAME.fullmatch(tenant):
        raise ConfigError(f"the name of a key must be {NAME_RULE}, got {tenant[:80]!r}")
    return Key(tenant or f"key-{digest.hex()[:8]}", digest)


def load_keys(config: ServerConfig) -> tuple[Key, ...]:
    """Return every key of this server: those of the file and those of `api_key`."""
    single_keys = tuple(key_for(secret) for secret in config.api_key)
    if config.api_keys_file is None:
        return single_keys
    return (*read_keys_file(Path(config.api_keys_file)), *single_keys)


def read_keys_file(path: Path) -> tuple[Key, ...]:
    """Return the keys of a file; an empty file is an error."""
    how = _HOW_TO_ADD.format(path=path)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no keys file {path}; {how}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys file {path}: {error}") from error
    keys = _parse(text, path)
    if not keys:
        raise ConfigError(f"the keys file {path} has no keys; {how}")
    return keys


def append_key(path: Path, key: Key) -> None:
    """Add a key to a file; a new file is readable by its owner only."""
    try:
        text = path.read_text("utf-8") if path.exists() else ""
        _parse(f"{text}\n{key.line}", path)
        line = f"{key.line}\n" if text.endswith("\n") or not text else f"\n{key.line}\n"
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _FILE_MODE)
        with os.fdopen(file, "a", encoding="utf-8") as out:
            out.write(line)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot write the keys file {path}: {error}") from error


def _parse(text: str, path: Path) -> tuple[Key, ...]:
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        key = _parse_line(entry, f"{path}, line {number}")
        if keys.setdefault(key.digest, key) != key:
            raise ConfigError(
                f"{path}, line {number}: an earlier line has this key under another name"
            )
    return tuple(keys.values())


def _parse_line(entry: str, location: str) -> Key:
    match = _LINE.fullmatch(entry)
    if match is None:
        # The error text omits the line, which may contain a key instead of its hash.
        raise ConfigError(
            f"{location} is not 'sha256:<64 hex digits> <name>'; "
            "`headway keys hash NAME` makes such a line from a key"
        )
    if not NAME.fullmatch(match[2]):
        raise ConfigError(f"{location}: the name of a key must be {NAME_RULE}")
    return Key(match[2], bytes.fromhex(match[1]))
