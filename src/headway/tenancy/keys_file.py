"""Keys given as such and in a keys file, and which tenant each stands for.

Who may do what with a key is not decided here.
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
    """What is known of a key: whose it is, and what it hashes to."""

    tenant: str
    digest: bytes

    @property
    def line(self) -> str:
        """The key as a line of a keys file."""
        return f"{write_digest(self.digest)} {self.tenant}"


def key_for(secret: str, tenant: str | None = None) -> Key:
    """The key's entry. One without a name is known by the start of its digest."""
    digest = digest_of_text(secret)
    if tenant is not None and not NAME.fullmatch(tenant):
        raise ConfigError(f"the name of a key must be {NAME_RULE}, got {tenant[:80]!r}")
    return Key(tenant or f"key-{digest.hex()[:8]}", digest)


def load_keys(config: ServerConfig) -> tuple[Key, ...]:
    """Every key that opens this server: those of the file, and those given as such."""
    given = tuple(key_for(secret) for secret in config.api_key)
    if config.api_keys_file is None:
        return given
    return (*read_keys_file(Path(config.api_keys_file)), *given)


def read_keys_file(path: Path) -> tuple[Key, ...]:
    """The keys of a file, which has at least one: an empty one must not mean an open server."""
    how = _HOW_TO_ADD.format(path=path)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no keys file {path}; {how}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys file {path}: {error}") from error
    keys = _parse(text, path)
    if not keys:
        raise ConfigError(f"the keys file {path} holds no keys; {how}")
    return keys


def append_key(path: Path, key: Key) -> None:
    """Add a key to a file, made if need be and then readable by its owner only."""
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
            raise ConfigError(f"{path}, line {number}: this key has another name further up")
    return tuple(keys.values())


def _parse_line(entry: str, location: str) -> Key:
    match = _LINE.fullmatch(entry)
    if match is None:
        # The line is not shown: someone may have written a key where its hash belongs.
        raise ConfigError(
            f"{location} is not 'sha256:<64 hex digits> <name>'; "
            "`headway keys hash NAME` makes such a line from a key"
        )
    if not NAME.fullmatch(match[2]):
        raise ConfigError(f"{location}: the name of a key must be {NAME_RULE}")
    return Key(match[2], bytes.fromhex(match[1]))
