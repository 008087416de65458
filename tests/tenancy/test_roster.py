"""What a tenants file may say, and what is said of one that is wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headway.core.terms import Targets, Terms
from headway.errors import ConfigError
from headway.tenancy.roster import parse_roster, read_roster
from headway.tenancy.values import Price, Quotas, Tenant, Tier, terms_for
from tests.conftest import ROOT

A, B = (f"sha256:{letter * 64}" for letter in "ab")
WHOLE = f"""
tiers:
  premium:
    weight: 4
    ttft_ms: 500
    tpot_ms: 50.5
    deadline_ms: 60000
    price: {{prompt: 0.5, cached_prompt: 0.1, output: 1.5}}
  batch: {{spot: true, price: {{prompt: 0.25}}}}
tenants:
  alice:
    keys: [{A}, {B}]
    tier: premium
    weight: 2.5
    quotas:
      requests_per_minute: 600
      tokens_per_minute: 100000
      concurrent_requests: 8
      kv_share: 0.5
    cache_group: ours
    admin: true
  bob:
  007: {{tier: batch, disabled: yes}}
"""


def test_everything_it_may_say() -> None:
    roster = parse_roster(WHOLE)
    assert roster.tiers == {
        "premium": Tier(
            "premium", 4.0, Targets(0.5, 0.0505, 60.0), Price(0.5, 0.1, 1.5), is_spot=False
        ),
        # Without a price of its own, a cached prompt costs what a prompt does.
        "batch": Tier("batch", price=Price(0.25, 0.25), is_spot=True),
    }
    digests = tuple(bytes.fromhex(letter * 64) for letter in "ab")
    assert roster.tenants == {
        "alice": Tenant(
            "alice", digests, "premium", 2.5, Quotas(600, 100000, 8, 0.5), "ours", is_admin=True
        ),
        "bob": Tenant("bob"),
        "007": Tenant("007", tier="batch", is_disabled=True),
    }


def test_the_terms_are_those_of_tenant_and_tier_together() -> None:
    roster = parse_roster(WHOLE)
    alice, bob, spot = roster.tenants.values()
    assert terms_for(alice, roster.tier_of(alice)) == Terms(
        tenant="alice",
        tier="premium",
        weight=10.0,
        max_kv_share=0.5,
        cache_group="group ours",
        targets=Targets(0.5, 0.0505, 60.0),
    )
    assert terms_for(bob, roster.tier_of(bob)) == Terms("bob", "default", cache_group="bob")
    assert terms_for(spot, roster.tier_of(spot)).is_spot


def test_the_default_tier_can_be_described() -> None:
    roster = parse_roster("tiers: {default: {weight: 3}}\ntenants: {bob: }")
    assert roster.tier_of(roster.tenants["bob"]).weight == 3.0
    assert roster.tier("no-such") is None


def test_no_tenant_can_be_called_like_a_group() -> None:
    roster = parse_roster("tenants: {alice: {cache_group: x}, x: }")
    groups = {terms_for(one, Tier()).cache_group for one in roster.tenants.values()}
    assert len(groups) == 2


TENANT = "tenants:\n  alice:\n    "
TIER = "tenants: {a: }\ntiers:\n  t:\n    "


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "headway tenants add"),
        ("\n \n", "empty"),
        ("# words\n", "neither 'tiers:' nor 'tenants:'"),
        ("- a\n- b\n", "neither 'tiers:' nor 'tenants:'"),
        ("tenants: {}", "no tenants"),
        ("tiers: {a: {}}", "no tenants"),
        ("tenants:\n  alice: [1, 2", "this is not YAML"),
        ("tenants:\n\talice:", "line 2: this is not YAML"),
        ("tenants: !!python/object/apply:os.getcwd []", "line 1: this is not YAML"),
        ("tenant:\n  alice:\n", "line 1: tenant: is not known here; known are: tiers, tenants"),
        ("tenants:\n  alice:\n  bob:\n  alice:\n", "line 4: 'alice' is there twice, first on 2"),
        (f"{TENANT}weight: 1\n    weight: 2", "line 4: 'weight' is there twice"),
        ("tenants:\n  a b:\n", "line 2: tenants.a b: a name must be"),
        (f"tenants:\n  {'x' * 65}:\n", "a name must be 1 to 64"),
        ("tenants:\n  ? [a]\n  : 1\n", "line 2: a name must be plain text"),
        ("tenants: [alice]\n", "line 1: tenants: must hold a section for each"),
        ("tenants: {alice: premium}\n", "tenants.alice: must hold entries such as 'keys: ...'"),
        (f"{TENANT}teir: x", "line 3: tenants.alice.teir: is not known here"),
        (f"{TENANT}<<: x", "tenants.alice.<<: is not known here"),
        (f"{TENANT}tier: gold", "tenants.alice.tier: there is no tier 'gold'; there are: default"),
        (f"{TENANT}tier: 5", "tenants.alice.tier: must be text; put quotes around it, got 5"),
        (f"{TENANT}weight: 0", "line 3: tenants.alice.weight: must be a number from 0.001 to 1000"),
        (f"{TENANT}weight: -1", "got -1"),
        (f"{TENANT}weight: .nan", "must be a number"),
        (f"{TENANT}weight: .inf", "must be a number"),
        (f"{TENANT}weight: true", "must be a number"),
        (f"{TENANT}weight: '2'", "must be a number"),
        (f"{TENANT}weight: [2]", "must be a number"),
        (f"{TENANT}admin: 1", "tenants.alice.admin: must be true or false, got 1"),
        (f"{TENANT}disabled: 'no'", "must be true or false"),
        (f"{TENANT}cache_group: a b", "tenants.alice.cache_group: must be 1 to 64"),
        (f"{TENANT}quotas: 5", "must hold entries such as 'requests_per_minute: ...'"),
        (f"{TENANT}quotas:\n      rpm: 5", "line 4: tenants.alice.quotas.rpm: is not known here"),
        (f"{TENANT}quotas: {{requests_per_minute: 0}}", "whole number of at least 1"),
        (f"{TENANT}quotas: {{tokens_per_minute: 1.5}}", "whole number of at least 1"),
        (f"{TENANT}quotas: {{concurrent_requests: true}}", "whole number of at least 1"),
        (f"{TENANT}quotas: {{kv_share: 0}}", "tenants.alice.quotas.kv_share: must be more than 0"),
        (f"{TENANT}quotas: {{kv_share: 1.1}}", "from 0 to 1"),
        (f"{TENANT}keys: {A}", "must be a list of 'sha256:<64 hex digits>'"),
        (f"{TENANT}keys: [{A[:-1]}]", "headway keys hash"),
        (f"{TENANT}keys: [{A}, 5]", "must be a list"),
        (f"tenants:\n  a: {{keys: [{A}]}}\n  b: {{keys: [{A}]}}", "line 3: tenants.b.keys: one"),
        (f"{TIER}wieght: 1", "line 4: tiers.t.wieght: is not known here"),
        (f"{TIER}ttft_ms: 0", "tiers.t.ttft_ms: must be a number from 0.001"),
        (f"{TIER}deadline_ms: 1e9", "tiers.t.deadline_ms: must be a number"),
        (f"{TIER}price: 5", "tiers.t.price: must hold entries such as 'prompt: ...'"),
        (f"{TIER}price: {{output: -1}}", "tiers.t.price.output: must be a number from 0"),
        (f"{TIER}spot: maybe", "tiers.t.spot: must be true or false"),
    ],
)
def test_an_error_names_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_roster(text)
    assert says in str(caught.value)


def test_a_key_in_the_clear_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_roster("tenants: {alice: {keys: [hw-in-the-clear]}}")
    assert "clear" not in str(caught.value)


def test_a_file_is_named_in_what_is_said_of_it(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    with pytest.raises(ConfigError, match=r"there is no tenants file .* adds one"):
        read_roster(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the tenants file"):
        read_roster(path)
    path.write_text("tenants: 5")
    with pytest.raises(ConfigError, match=r"tenants\.yaml: line 1"):
        read_roster(path)
    with pytest.raises(ConfigError, match="cannot read the tenants file"):
        read_roster(tmp_path)
    digest = hashlib.sha256(b"k").hexdigest()
    path.write_text(f"tenants: {{a: {{keys: ['sha256:{digest}']}}}}")
    assert read_roster(path).tenants["a"].key_digests == (hashlib.sha256(b"k").digest(),)


def test_the_example_in_the_docs_is_right() -> None:
    text = (ROOT / "docs" / "tenants.md").read_text()
    roster = parse_roster(text.partition("```yaml\n")[2].partition("```")[0])
    alice, premium = roster.tenants["alice"], roster.tiers["premium"]
    assert roster.tier_of(alice) is premium
    assert premium.price == Price(0.5, 0.1, 1.5)
    assert alice.quotas == Quotas(600, 100_000, 8, 0.5)
    assert roster.tiers["batch"].is_spot
