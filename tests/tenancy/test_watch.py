"""A changed file is taken over, a wrong one is not, and each is said once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from headway.clock import VirtualClock
from headway.errors import ConfigError
from headway.tenancy import watch as watch_module
from headway.tenancy.directory import Directory
from headway.tenancy.keys import digest_of
from headway.tenancy.roster import read_roster
from headway.tenancy.values import Roster
from headway.tenancy.watch import KeysFile, RosterFile, RosterWatcher

A, B = digest_of(b"a"), digest_of(b"b")


def line(name: str, digest: bytes) -> str:
    return f"tenants: {{{name}: {{keys: ['sha256:{digest.hex()}']}}}}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(line("alice", A))
    return path


class Reader:
    """Reads a roster; a test may put something in its place."""

    def __init__(self) -> None:
        self.read = read_roster

    def __call__(self, path: Path) -> Roster:
        return self.read(path)


reader = Reader()


def follow(path: Path) -> tuple[RosterWatcher, Directory]:
    file = RosterFile(path, reader)
    directory = Directory(VirtualClock(), roster=file.latest)
    return RosterWatcher(directory, file), directory


async def test_a_changed_file_is_taken_over(path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    watch, directory = follow(path)
    await watch.poll()
    assert not caplog.records
    path.write_text(line("alice", B) + "tiers: {gold: {}}\n")
    await watch.poll()
    assert directory.by_digest(A) is None
    assert directory.by_digest(B) is not None
    await watch.poll()
    assert [record.getMessage() for record in caplog.records] == [
        f"read {path} again: 1 tenants (0 added, 0 removed, 1 changed); the tiers changed"
    ]


async def test_one_of_the_same_size_and_time_is_noticed_too(path: Path) -> None:
    watch, directory = follow(path)
    status = path.stat()
    other = path.with_name("other")
    other.write_text(line("alice", B))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_size == status.st_size
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    await watch.poll()
    assert directory.by_digest(B) is not None


def changing(path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    """Have the file written on while it is read, once for each text."""

    def read(path: Path) -> Roster:
        roster = read_roster(path)
        if texts:
            path.write_text(texts.pop(0))
        return roster

    monkeypatch.setattr(reader, "read", read)
    monkeypatch.setattr(watch_module, "SETTLE_S", 0.0)


async def test_half_a_file_is_not_taken_over(path: Path, monkeypatch) -> None:
    watch, directory = follow(path)
    half = line("bob", B)
    whole = half.replace("]}", "], disabled: true}")
    path.write_text(half)
    changing(path, monkeypatch, [whole])
    taken = []
    monkeypatch.setattr(directory, "adopt", lambda roster, _keys: taken.append(roster))
    await watch.poll()
    (roster,) = taken
    assert roster.tenants["bob"].is_disabled


async def test_a_file_that_keeps_changing_changes_nothing(path: Path, monkeypatch, caplog) -> None:
    watch, directory = follow(path)
    path.write_text(line("bob", B))
    changing(path, monkeypatch, [line("bob" + "b" * i, B) for i in range(watch_module.MAX_READS)])
    await watch.poll()
    assert directory.by_digest(A) is not None and directory.by_digest(B) is None
    assert "changes while it is read" in caplog.text
    await watch.poll()  # it has settled
    assert directory.by_digest(B) is not None


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "tenants: [",
        "tenants: {bob: {teir: x}}",
        "tenants: {bob: {admin: !!bool x}}",
        "tenants: {bob: {weight: !!int ''}}",
        "tenants: {bob: {weight: !!timestamp x}}",
        f"tenants: {{bob: {{weight: {'9' * 400}}}}}",
        None,
    ],
)
async def test_a_wrong_file_changes_nothing_and_is_said_once(path: Path, caplog, broken) -> None:
    watch, directory = follow(path)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    for _ in range(3):
        await watch.poll()
    assert directory.by_digest(A) is not None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("the tenants stay as they were: ")
    assert str(path) in record.getMessage()
    assert record.exc_info is None
    path.write_text(line("bob", B))
    await watch.poll()
    assert directory.by_digest(B) is not None


async def test_a_forced_poll_reads_the_file_again(path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    watch, _ = follow(path)
    await watch.poll(is_forced=True)
    assert "0 changed" in caplog.text


async def test_a_key_that_is_another_tenants_is_a_wrong_file(path: Path, caplog) -> None:
    file = RosterFile(path, read_roster)
    directory = Directory(VirtualClock(), {B: "bob"}, file.latest)
    path.write_text(line("alice", B))
    await RosterWatcher(directory, file).poll()
    assert "the tenants stay as they were" in caplog.text
    record = directory.by_digest(B)
    assert record is not None and record.tenant.name == "bob"


# ---------------------------------------------------------------------- the keys file


def read_keys(path: Path) -> dict[bytes, str]:
    """As many lines `a alice`: the name of a secret, and of its tenant."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
        return {digest_of(secret.encode()): tenant for secret, tenant in pairs}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def tenant_of(directory: Directory, digest: bytes) -> str | None:
    record = directory.by_digest(digest)
    return None if record is None else record.tenant.name


@pytest.fixture
def keys_path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("b bob\nc carol")
    return path


async def test_a_key_taken_from_the_keys_file_is_revoked(keys_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    file = KeysFile(keys_path, read_keys)
    directory = Directory(VirtualClock(), file.latest)
    watch = RosterWatcher(directory, keys_file=file)
    await watch.poll()
    assert not caplog.records
    keys_path.write_text("c carol\nd dora")
    await watch.poll()
    assert tenant_of(directory, B) is None
    assert tenant_of(directory, digest_of(b"c")) == "carol"
    assert tenant_of(directory, digest_of(b"d")) == "dora"
    (record,) = caplog.records
    assert record.getMessage() == f"read {keys_path} again: 2 keys (1 added, 1 removed)"


async def test_a_wrong_keys_file_keeps_the_keys_and_not_the_tenants(
    path: Path, keys_path: Path, caplog
) -> None:
    keys_file, roster_file = KeysFile(keys_path, read_keys), RosterFile(path, read_roster)
    directory = Directory(VirtualClock(), keys_file.latest, roster_file.latest)
    watch = RosterWatcher(directory, roster_file, keys_file)
    for broken in ("what is this", None):
        keys_path.write_text(broken) if broken else keys_path.unlink()
        await watch.poll()
        await watch.poll()
    messages = [record.getMessage() for record in caplog.records]
    assert [message.startswith("the keys stay as they were: ") for message in messages] == [
        True
    ] * 2
    assert tenant_of(directory, B) == "bob"
    path.write_text(line("alice", digest_of(b"new")))
    await watch.poll()
    assert tenant_of(directory, A) is None


async def test_files_that_contradict_each_other_do_not_stop_a_revocation(
    path: Path, keys_path: Path, caplog
) -> None:
    keys_file, roster_file = KeysFile(keys_path, read_keys), RosterFile(path, read_roster)
    directory = Directory(VirtualClock(), keys_file.latest, roster_file.latest)
    watch = RosterWatcher(directory, roster_file, keys_file)
    path.write_text(line("alice", B))
    await watch.poll()
    assert "the tenants stay as they were: a key of tenants.alice" in caplog.text
    assert tenant_of(directory, B) == "bob" and tenant_of(directory, A) == "alice"
    keys_path.write_text("b bob")
    await watch.poll()
    assert tenant_of(directory, digest_of(b"c")) is None
    keys_path.write_text("c carol")
    await watch.poll()  # no contradiction is left
    assert tenant_of(directory, B) == "alice" and tenant_of(directory, A) is None


async def test_without_files_there_is_nothing_to_read() -> None:
    await RosterWatcher(Directory(VirtualClock())).poll(is_forced=True)
