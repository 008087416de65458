"""`headway tenants` as a person meets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.errors import ConfigError
from headway.tenancy.keys import digest_of_text
from headway.tenancy.roster import read_roster
from headway.tenancy.values import Quotas


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.yaml"


def run(path: Path, *arguments: str):
    return CliRunner().invoke(make_app(), ["tenants", *arguments, "--file", str(path)])


def test_add_prints_the_key_alone_on_standard_output(path: Path) -> None:
    result = run(path, "add", "alice")
    assert result.exit_code == 0
    key = result.stdout.strip()
    assert key.startswith("hw-") and len(key.split()) == 1
    assert f"added alice to {path}" in result.stderr
    assert "the only time" in result.stderr
    assert "comments" not in result.stderr
    assert read_roster(path).tenants["alice"].key_digests == (digest_of_text(key),)


def test_add_takes_every_term(path: Path) -> None:
    path.write_text("tiers: {gold: {}}  # ours\n")
    quotas = ("requests_per_minute=60", "tokens_per_minute=9", "concurrent_requests=2")
    flags = [word for quota in (*quotas, "kv_share=0.5") for word in ("--quota", quota)]
    result = run(path, "add", "alice", "--tier", "gold", "--weight", "2.5", "--admin", *flags)
    assert result.exit_code == 0, result.exception
    assert f"the comments in {path} were not kept" in result.stderr
    alice = read_roster(path).tenants["alice"]
    assert (alice.tier, alice.weight, alice.is_admin) == ("gold", 2.5, True)
    assert alice.quotas == Quotas(60, 9, 2, 0.5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("add", "alice"), "already"),
        (("add", "bob", "--tier", "gold"), "no tier 'gold'; there are: default"),
        (("add", "bob", "--weight", "0"), "must be a number from 0.001"),
        (("add", "bob", "--quota", "rpm=5"), "NAME one of requests_per_minute"),
        (("add", "bob", "--quota", "tokens_per_minute"), "'' is not a number"),
        (("add", "bob", "--quota", "tokens_per_minute=many"), "'many' is not a number"),
        (("add", "bob", "--quota", "tokens_per_minute=0"), "at least 1"),
        (("add", "not a name"), "must be 1 to 64"),
        (("rotate", "bob"), "no tenant 'bob'"),
        (("disable", "bob"), "no tenant 'bob'"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(path: Path, arguments, says) -> None:
    run(path, "add", "alice")
    before = path.read_bytes()
    result = run(path, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert says in str(result.exception)
    assert not result.stdout
    assert path.read_bytes() == before


def test_list_shows_no_keys(path: Path) -> None:
    key = run(path, "add", "alice", "--quota", "requests_per_minute=60", "--admin").stdout.strip()
    run(path, "add", "bob")
    run(path, "disable", "bob")
    result = run(path, "list")
    assert result.exit_code == 0
    first, alice, bob = result.stdout.splitlines()
    assert first.split() == ["TENANT", "TIER", "WEIGHT", "QUOTAS", "KEYS"]
    digest = digest_of_text(key).hex()
    assert alice.split() == ["alice", "default", "1", "60", "req/min", digest[:8], "admin"]
    assert bob.split()[-1] == "disabled"
    assert key not in result.stdout and digest not in result.stdout
    missing = run(path.with_name("other"), "list")
    assert "there is no tenants file" in str(missing.exception)


def test_rotate_says_what_becomes_of_the_others(path: Path) -> None:
    run(path, "add", "alice")
    assert "its other keys stay valid" in run(path, "rotate", "alice", "--keep-old").stderr
    assert len(read_roster(path).tenants["alice"].key_digests) == 2
    result = run(path, "rotate", "alice")
    assert "its other keys are gone" in result.stderr
    (digest,) = read_roster(path).tenants["alice"].key_digests
    assert digest == digest_of_text(result.stdout.strip())


def test_disable_and_enable(path: Path) -> None:
    run(path, "add", "alice")
    assert "alice is disabled" in run(path, "disable", "alice").stderr
    assert read_roster(path).tenants["alice"].is_disabled
    assert "alice is enabled" in run(path, "enable", "alice").stderr
    assert not read_roster(path).tenants["alice"].is_disabled
