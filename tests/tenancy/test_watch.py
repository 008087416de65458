"""A changed file is taken over, a wrong one is not, and each is said once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from headway.clock import VirtualClock
from headway.tenancy import watch as watch_module
from headway.tenancy.directory import Directory
from headway.tenancy.keys import digest_of
from headway.tenancy.reading import read_roster
from headway.tenancy.values import Roster
from headway.tenancy.watch import RosterFile, Watch

A, B = digest_of(b"a"), digest_of(b"b")


def line(name: str, digest: bytes) -> str:
    return f"tenants: {{{name}: {{keys: ['sha256:{digest.hex()}']}}}}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(line("alice", A))
    return path


def follow(path: Path) -> tuple[Watch, Directory]:
    file = RosterFile(path)
    directory = Directory(VirtualClock(), roster=file.read())
    return Watch(file, directory), directory


async def test_a_changed_file_is_taken_over(path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    watch, directory = follow(path)
    await watch.look()
    assert not caplog.records
    path.write_text(line("alice", B) + "tiers: {gold: {}}\n")
    await watch.look()
    assert directory.by_digest(A) is None
    assert directory.by_digest(B) is not None
    await watch.look()
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
    await watch.look()
    assert directory.by_digest(B) is not None


def changing(path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    """Have the file written on while it is read, once for each text."""

    def read(path: Path) -> Roster:
        roster = read_roster(path)
        if texts:
            path.write_text(texts.pop(0))
        return roster

    monkeypatch.setattr(watch_module, "read_roster", read)
    monkeypatch.setattr(watch_module, "SETTLE_S", 0.0)


async def test_half_a_file_is_not_taken_over(path: Path, monkeypatch) -> None:
    watch, directory = follow(path)
    half = line("bob", B)
    whole = half.replace("]}", "], disabled: true}")
    path.write_text(half)
    changing(path, monkeypatch, [whole])
    taken = []
    monkeypatch.setattr(directory, "adopt", taken.append)
    await watch.look()
    (roster,) = taken
    assert roster.tenants["bob"].is_disabled


async def test_a_file_that_keeps_changing_changes_nothing(path: Path, monkeypatch, caplog) -> None:
    watch, directory = follow(path)
    path.write_text(line("bob", B))
    changing(path, monkeypatch, [line("bob" + "b" * i, B) for i in range(watch_module.MAX_READS)])
    await watch.look()
    assert directory.by_digest(A) is not None and directory.by_digest(B) is None
    assert "changes while it is read" in caplog.text
    await watch.look()  # it has settled
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
        await watch.look()
    assert directory.by_digest(A) is not None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith("the tenants stay as they were: ")
    assert str(path) in record.getMessage()
    assert record.exc_info is None
    path.write_text(line("bob", B))
    await watch.look()
    assert directory.by_digest(B) is not None


async def test_it_is_read_again_when_told_to(path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    watch, _ = follow(path)
    await watch.look(is_forced=True)
    assert "0 changed" in caplog.text


async def test_a_key_that_is_another_tenants_is_a_wrong_file(path: Path, caplog) -> None:
    file = RosterFile(path)
    directory = Directory(VirtualClock(), {B: "bob"}, file.read())
    path.write_text(line("alice", B))
    await Watch(file, directory).look()
    assert "the tenants stay as they were" in caplog.text
    standing = directory.by_digest(B)
    assert standing is not None and standing.tenant.name == "bob"
