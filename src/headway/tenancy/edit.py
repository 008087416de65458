"""Changes the tenants file, for the commands of `headway tenants`.

The file is valid at every moment: the new text is checked, written to a temporary file and renamed.
A lock makes concurrent commands wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.tenancy.document import Section, parse, write
from headway.tenancy.keys import NAME, NAME_RULE, digest_of_text, make_key, write_digest
from headway.tenancy.roster import how_to_add, parse_roster, roster_of

_OWNER_ONLY = 0o600
_GROUP = 0o060


@dataclass(frozen=True, slots=True)
class EditResult:
    """Result of a change."""

    path: Path
    has_lost_comments: bool
    key: str = ""
    """The new key, to be shown once; only its hash is in the file."""


def add_tenant(path: Path, name: str, entries: Mapping[str, Any]) -> EditResult:
    """Add a tenant with a new key; create the file if there is none."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"the name of a tenant must be {NAME_RULE}, got {name[:80]!r}")
    with _open_for_edit(path, may_create=True) as edit:
        if name in edit.tenants:
            raise ConfigError(
                f"{path} has a tenant {name} already; "
                f"`headway tenants rotate {name} --file {path}` gives it a new key"
            )
        key = make_key()
        edit.tenants[name] = _section({"keys": [_written(key)], **entries})
    return EditResult(path, edit.has_comments, key)


def rotate_key(path: Path, name: str, keeps_old: bool) -> EditResult:
    """Give a tenant a new key, instead of its old keys or beside them."""
    with _open_for_edit(path) as edit:
        tenant, key = edit.tenant(name), make_key()
        old = tenant.get("keys") or [] if keeps_old else []
        tenant["keys"] = [*old, _written(key)]
    return EditResult(path, edit.has_comments, key)


def set_disabled(path: Path, name: str, is_disabled: bool) -> EditResult:
    """Disable a tenant, or enable it again."""
    with _open_for_edit(path) as edit:
        tenant = edit.tenant(name)
        tenant.pop("disabled", None)
        if is_disabled:
            tenant["disabled"] = True
    return EditResult(path, edit.has_comments)


@dataclass(slots=True)
class _OpenDocument:
    path: Path
    document: Section
    has_comments: bool

    @property
    def tenants(self) -> Section:
        if not self.document.get("tenants"):
            self.document["tenants"] = Section()
        return self.document["tenants"]

    def tenant(self, name: str) -> Section:
        if name not in self.tenants:
            raise ConfigError(f"{self.path} has no tenant {name[:80]!r}; {how_to_add(self.path)}")
        if self.tenants[name] is None:
            self.tenants[name] = Section()
        return self.tenants[name]


@contextmanager
def _open_for_edit(path: Path, may_create: bool = False) -> Generator[_OpenDocument, None, None]:
    """Yield the file as a document; afterwards check the changed document and write it."""
    # A symbolic link stays a link; its target is replaced.
    target = path.resolve()
    with _locked(target.parent):
        edit = _open(target, path, may_create)
        yield edit
        text = write(edit.document)
        try:
            parse_roster(text)
        except ConfigError as error:
            raise ConfigError(f"{path} was not changed: {error}") from error
        try:
            _replace(target, text)
        except OSError as error:
            raise ConfigError(f"cannot write the tenants file {path}: {error}") from error


def _open(target: Path, path: Path, may_create: bool) -> _OpenDocument:
    try:
        text = target.read_text("utf-8")
    except FileNotFoundError as error:
        if may_create:
            return _OpenDocument(path, Section(), False)
        raise ConfigError(f"there is no tenants file {path}; {how_to_add(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the tenants file {path}: {error}") from error
    if may_create and not text.strip():
        return _OpenDocument(path, Section(), False)
    try:
        document = parse(text)
        # A file with tiers and no tenants yet is valid input for `add_tenant`.
        if document.get("tenants") or not may_create:
            roster_of(document)
    except ConfigError as error:
        raise ConfigError(f"{path} was not changed: {error}") from error
    has_comments = any(line.lstrip().startswith("#") or " #" in line for line in text.splitlines())
    return _OpenDocument(path, document, has_comments)


@contextmanager
def _locked(folder: Path) -> Generator[None, None, None]:
    """Lock the folder, so that no lock file is left."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"cannot open the folder {folder}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, text: str) -> None:
    before = target.stat() if target.exists() else None
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(os.open(temporary, flags, _OWNER_ONLY), "w", encoding="utf-8") as out:
            if before is not None:
                # The server may run as another user than this command.
                with suppress(PermissionError):
                    os.fchown(out.fileno(), before.st_uid, before.st_gid)
                os.fchmod(out.fileno(), _OWNER_ONLY | stat.S_IMODE(before.st_mode) & _GROUP)
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise


def _section(entries: Mapping[str, Any]) -> Section:
    section = Section()
    for name, value in entries.items():
        section[name] = _section(value) if isinstance(value, Mapping) else value
    return section


def _written(key: str) -> str:
    return write_digest(digest_of_text(key))
