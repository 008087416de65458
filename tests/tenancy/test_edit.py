"""Commands that change the tenants file, and the file at every moment in between."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.tenancy import edit as edit_module
from headway.tenancy.edit import add_tenant, rotate_key, set_disabled
from headway.tenancy.keys import digest_of_text
from headway.tenancy.roster import read_roster


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_add_makes_a_file_for_its_owner_only(path: Path) -> None:
    key = add_tenant(path, "alice", {}).key
    assert mode(path) == 0o600
    assert key not in path.read_text()
    assert read_roster(path).tenants["alice"].key_digests == (digest_of_text(key),)
    assert [one.name for one in path.parent.iterdir()] == ["tenants.yaml"]


def test_add_keeps_what_is_there(path: Path) -> None:
    path.write_text("tiers: {gold: {weight: 3}}  # dear\ntenants: {'007': {tier: gold}}\n")
    path.chmod(0o644)
    before = read_roster(path)
    edited = add_tenant(path, "bob", {"tier": "gold", "quotas": {"tokens_per_minute": 5}})
    assert edited.has_lost_comments
    after = read_roster(path)
    assert after.tiers == before.tiers
    assert after.tenants["007"] == before.tenants["007"]
    assert after.tenants["bob"].quotas.tokens_per_minute == 5
    assert mode(path) == 0o640  # the server may be in the group
    assert not add_tenant(path, "carol", {}).has_lost_comments


@pytest.mark.parametrize(
    "text", ["", " \n", "tiers: {gold: {}}", "tenants: {}", "tenants:", "tenants: []"]
)
def test_a_file_that_has_no_tenant_yet_may_be_added_to(path: Path, text: str) -> None:
    path.write_text(text)
    add_tenant(path, "alice", {})
    assert list(read_roster(path).tenants) == ["alice"]


@pytest.mark.parametrize(
    ("name", "entries", "says"),
    [
        ("alice", {}, "already; `headway tenants rotate alice"),
        ("a b", {}, "must be 1 to 64"),
        ("bob", {"tier": "gold"}, "was not changed: .*there is no tier 'gold'"),
        ("bob", {"weight": -1}, "was not changed"),
        ("bob", {"quotas": {"kv_share": 2}}, "was not changed"),
    ],
)
def test_what_would_be_wrong_is_not_written(path: Path, name, entries, says) -> None:
    add_tenant(path, "alice", {})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=says):
        add_tenant(path, name, entries)
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1


def test_a_wrong_file_is_left_alone(path: Path) -> None:
    for text in ("tenants: {alice: {teir: x}}", "tenants: [", "nonsense"):
        path.write_text(text)
        for change in (
            lambda: add_tenant(path, "bob", {}),
            lambda: rotate_key(path, "alice", False),
            lambda: set_disabled(path, "alice", True),
        ):
            with pytest.raises(ConfigError, match="was not changed"):
                change()
        assert path.read_text() == text


def test_rotate_replaces_or_adds_a_key(path: Path) -> None:
    first = digest_of_text(add_tenant(path, "alice", {}).key)
    second = digest_of_text(rotate_key(path, "alice", keeps_old=True).key)
    assert read_roster(path).tenants["alice"].key_digests == (first, second)
    third = digest_of_text(rotate_key(path, "alice", keeps_old=False).key)
    assert read_roster(path).tenants["alice"].key_digests == (third,)
    with pytest.raises(ConfigError, match="no tenant 'bob'"):
        rotate_key(path, "bob", False)
    path.write_text("tenants: {bob: }")
    rotate_key(path, "bob", True)
    assert len(read_roster(path).tenants["bob"].key_digests) == 1


def test_disable_and_enable(path: Path) -> None:
    add_tenant(path, "alice", {})
    set_disabled(path, "alice", True)
    assert read_roster(path).tenants["alice"].is_disabled
    set_disabled(path, "alice", False)
    assert not read_roster(path).tenants["alice"].is_disabled
    with pytest.raises(ConfigError, match="there is no tenants file"):
        set_disabled(path.with_name("other"), "alice", True)


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    add_tenant(path, "alice", {})
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    add_tenant(link, "bob", {})
    assert link.is_symlink()
    assert list(read_roster(path).tenants) == ["alice", "bob"]


def test_a_failed_write_leaves_the_file_as_it_was(path: Path, monkeypatch) -> None:
    add_tenant(path, "alice", {})
    before = path.read_bytes()

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(edit_module.os, "fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        add_tenant(path, "bob", {})
    assert path.read_bytes() == before
    assert len(list(path.parent.iterdir())) == 1


def test_many_at_once_lose_nothing_and_the_file_is_always_right(path: Path) -> None:
    add_tenant(path, "first", {})
    is_done = threading.Event()
    seen: list[int] = []
    failures: list[Exception] = []

    def watch() -> None:
        while not is_done.is_set():
            try:
                seen.append(len(read_roster(path).tenants))
            except Exception as error:
                failures.append(error)

    def add(group: int) -> None:
        for number in range(5):
            add_tenant(path, f"t{group}-{number}", {})

    watcher = threading.Thread(target=watch)
    workers = [threading.Thread(target=add, args=(group,)) for group in range(4)]
    watcher.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    is_done.set()
    watcher.join()
    assert not failures
    assert seen == sorted(seen)
    assert len(read_roster(path).tenants) == 21
