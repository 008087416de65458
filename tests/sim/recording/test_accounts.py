"""Requests of a ledger as a load: their times, lengths, tenants and terms, and assumed prefixes."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import msgspec
import pytest

from benchmarks.sim.policy_loads import PolicyLoad, read_loads
from headway.core.events import Admitted, Arrived, Event, Finished, Forked
from headway.core.terms import Targets, Terms
from headway.observe.ledger.store import UnreadableRow
from headway.observe.trace.account import RequestAccount
from headway.sim.prediction.served import ServedRequest
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.settings import change_settings, parse_term_changes
from headway.sim.prediction.setup import Setup
from headway.sim.profile.catalog import find_profile
from headway.sim.recording.accounts import AccountCounts, load_of_accounts
from headway.sim.recording.items import RecordedItem
from headway.workload import Listed
from tests.observe.stories import STOP, Story, tokens
from tests.observe.test_metrics import step
from tests.sim.support import CAPACITY, make_profile


def account(number: int = 1, **fields: Any) -> RequestAccount:
    known = {
        "id": f"cmpl-{number:x}",
        "state": "finished",
        "arrived_at": 1.8e9 + number,
        "duration_s": 2.0,
        "tenant": "a",
        "num_prompt_tokens": 40,
        "num_output_tokens": 5,
        "max_tokens": 20,
    }
    return RequestAccount(**(known | fields))


def load(*accounts: RequestAccount | UnreadableRow) -> tuple[list[RecordedItem], AccountCounts]:
    found = load_of_accounts(accounts, CAPACITY)
    items = [one for one in found.workload.requests if isinstance(one, RecordedItem)]
    assert [one.number for one in items] == list(range(len(items)))
    return items, found.counts


def lengths(items: list[RecordedItem]) -> list[tuple[int, int]]:
    for one in items:
        assert len(one.output_ids) == one.num_output_tokens
    return [(len(one.prompt_token_ids), one.num_output_tokens) for one in items]


def test_times_lengths_and_terms_are_those_of_the_ledger() -> None:
    terms = {"tenant": "b", "tier": "gold", "weight": 2.0, "max_kv_share": 0.5, "is_spot": True}
    targets = {"target_ttft_s": 0.5, "target_tpot_s": 0.1, "deadline_s": 9.0}
    late = account(4, num_output_tokens=7, max_tokens=9, priority=2, **terms, **targets)
    items, counts = load(account(1), late, account(2, tenant=""))
    assert [(one.at, one.tenant) for one in items] == [(0.0, "a"), (1.0, None), (3.0, "b")]
    assert lengths(items) == [(40, 5), (40, 5), (40, 7)]
    assert items[2].terms == Terms(**terms, cache_group="b", targets=Targets(0.5, 0.1, 9.0))  # pyright: ignore
    assert (items[2].priority, items[2].max_tokens) == (2, 9)
    assert counts == AccountCounts(num_requests=3)


def test_what_was_cached_is_cached_again_for_its_tenant_alone() -> None:
    accounts = [
        account(1, num_cached_tokens=32),
        account(11, num_cached_tokens=32),
        account(21, num_cached_tokens=16),
        account(31),
        account(41, num_cached_tokens=32, tenant="b"),
        account(51, num_cached_tokens=32, tenant=""),
    ]
    found = load_of_accounts(accounts, CAPACITY).workload
    served = serve_load(Setup.of(make_profile()), found, Limits(len(accounts))).requests
    assert [one.num_cached_tokens for one in served] == [0, 32, 16, 0, 0, 0]


def test_terms_of_a_tenant_can_be_changed() -> None:
    busy = [account(n, arrived_at=0.1 * n, num_output_tokens=50) for n in range(20)]
    workload = load_of_accounts([*busy, account(tenant="b", arrived_at=1.05)], CAPACITY).workload
    changes = parse_term_changes(["b.ttft_s=0.0001"])
    setup = replace(Setup.of(make_profile()), term_changes=changes)
    served = serve_load(setup, workload, Limits(21)).requests
    assert [one.tenant for one in served if one.is_refused] == ["b"]


def test_requests_without_output_and_rows_without_sense_are_counted() -> None:
    items, counts = load(
        account(1),
        account(2, num_output_tokens=0, finish_reason="abort"),
        account(3, max_tokens=0),
        UnreadableRow("cmpl-4", "no JSON"),
        account(5, finish_reason="abort"),
    )
    assert len(items) == 3
    assert items[1].max_tokens == items[1].num_output_tokens == 5
    assert counts == AccountCounts(num_requests=3, num_left_out=1, num_unreadable=1, num_old=1)
    assert load() == ([], AccountCounts())


@pytest.mark.parametrize(
    "fields",
    [
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": -5},
        {"num_prompt_tokens": 10**15},
        {"num_output_tokens": 10**15},
        {"num_output_tokens": -1},
        {"num_cached_tokens": 41},
        {"max_tokens": -1},
        {"num_parts": 0},
        {"num_parts": 10**12},
        {"n": 0},
        {"n": 10**12},
        {"weight": 0.0},
        {"weight": -1.0},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"max_kv_share": 1.5},
        {"target_ttft_s": -1.0},
        {"deadline_s": float("nan")},
        {"priority": 10**30},
        {"arrived_at": float("inf")},
        {"tenant": "a\x1b[2J"},
        {"tier": "gold\n"},
    ],
)
def test_a_row_that_no_server_wrote_is_left_out(fields: dict[str, Any]) -> None:
    items, counts = load(account(1), account(2, **fields))
    assert len(items) == 1
    assert (counts.num_requests, counts.num_unreadable) == (1, 1)


def story(*batches: list[Event]) -> RequestAccount:
    return Story(*batches).only


def two_prompts_of_two_samples() -> RequestAccount:
    return story(
        [Arrived("r-1", 0.0, 40, n=2, max_tokens=9), Arrived("r-1-1", 0.5, 24, n=2, max_tokens=9)],
        [Admitted("r-1", 1.0, 1.0, 16, 40, False), Admitted("r-1-1", 1.0, 0.5, 0, 24, False)],
        [tokens("r-1"), tokens("r-1-1"), step(1.5)],
        [Forked("r-1#1", 1.5, "r-1"), Forked("r-1-1#1", 1.5, "r-1-1"), step(2.0)],
        [tokens("r-1", 2), tokens("r-1#1", 4), tokens("r-1-1", 1), tokens("r-1-1#1", 8), step(3.0)],
        [
            Finished(name, 3.0, STOP, number)
            for name, number in (("r-1", 3), ("r-1#1", 4), ("r-1-1", 2), ("r-1-1#1", 8))
        ],
    )


def test_prompts_and_samples_of_one_request_are_as_they_were() -> None:
    items, counts = load(two_prompts_of_two_samples())
    assert sorted(lengths(items)) == [(24, 2), (24, 8), (40, 3), (40, 4)]
    assert sorted(one.at for one in items) == [0.0, 0.0, 0.5, 0.5]
    by_length = {len(one.prompt_token_ids): one.prompt_token_ids for one in items}
    assert {one.prompt_token_ids for one in items} == set(by_length.values())
    assert len({one.output_ids[0] for one in items}) == 4
    assert len(set(by_length[40])) == 2  # 16 tokens of the tenant's prefix, 24 of its own
    assert counts == AccountCounts(num_requests=1, num_divided=1)


@pytest.mark.parametrize(
    "fields", [{}, {"timeline": ()}, {"num_prompt_tokens": 65}, {"num_parts": 5}]
)
def test_parts_are_equal_where_the_timeline_does_not_show_them(fields: dict[str, Any]) -> None:
    shown = two_prompts_of_two_samples()
    cut = {"timeline": shown.timeline[:4], "num_output_tokens": 19}
    one: RequestAccount = msgspec.structs.replace(shown, **(cut | fields))
    items, counts = load(one)
    assert counts == AccountCounts(num_requests=1, num_divided=1, num_even=1)
    if one.num_parts == 4:
        assert sorted(lengths(items)) == [(32, 4), (32, 5), (32, 5), (32, 5)]
        assert len({one.prompt_token_ids for one in items}) == 2
    assert sum(one.num_output_tokens for one in items) == 19


def test_samples_that_had_no_token_are_no_requests() -> None:
    items, _ = load(account(1, n=4, num_parts=4, num_output_tokens=2, max_tokens=1))
    assert lengths(items) == [(40, 1), (40, 1)]


def test_a_longest_output_that_was_all_of_a_context_is_that_of_the_engine() -> None:
    small = replace(CAPACITY, max_model_len=64)
    for capacity, expected in ((CAPACITY, 2008), (small, 24)):
        (item,) = load_of_accounts([account(max_tokens=10**6)], capacity).workload.requests
        assert isinstance(item, RecordedItem)
        assert item.max_tokens == expected
    tiny = replace(CAPACITY, max_model_len=30)
    (item,) = load_of_accounts([account()], tiny).workload.requests
    assert isinstance(item, RecordedItem)
    assert item.max_tokens == 5


def test_a_row_with_the_largest_values_that_servers_take_is_simulated() -> None:
    most = {"priority": 2**63 - 1, "weight": 1e6, "deadline_s": 1e6, "target_ttft_s": 1e-3}
    accounts = [account(1, **most), account(1, **most | {"priority": 1 - 2**63, "weight": 1e-6})]
    found = load_of_accounts(accounts, CAPACITY)
    assert found.counts.num_requests == 2
    served = serve_load(Setup.of(make_profile()), found.workload, Limits(2)).requests
    assert all(one.finished_at is not None for one in served)


def test_a_hostile_neighbour_changes_no_prefix_of_another() -> None:
    """However many tokens it says were cached, another tenant's requests are as alone."""
    own = [account(10 * number, num_cached_tokens=32) for number in range(1, 4)]
    flood = [
        account(number, tenant="b", num_cached_tokens=40, num_output_tokens=1)
        for number in range(1, 30)
        if number % 10
    ]

    def cached(accounts: list[RequestAccount]) -> list[int | None]:
        workload: Listed = load_of_accounts(accounts, CAPACITY).workload
        served = serve_load(Setup.of(make_profile()), workload, Limits(len(accounts))).requests
        return [one.num_cached_tokens for one in served if one.tenant == "a"]

    assert cached(own) == cached([*own, *flood]) == [0, 32, 32]


LOADS = {one.name: one for one in read_loads()}


def served_then_and_by_its_accounts(
    load: PolicyLoad,
) -> tuple[list[ServedRequest], list[ServedRequest]]:
    """Serve a recorded load, and then what a ledger would have kept of it."""
    setup = change_settings(Setup.of(find_profile("smollm2-135m-2-cores")), load.settings)
    items = [one for one in load.workload.requests if isinstance(one, RecordedItem)]
    served = serve_load(setup, load.workload, Limits(len(items))).requests
    accounts = [
        account(
            arrived_at=1.8e9 + item.at,
            tenant=item.terms.tenant,
            tier=item.terms.tier,
            weight=item.terms.weight,
            max_kv_share=item.terms.max_kv_share,
            is_spot=item.terms.is_spot,
            target_ttft_s=item.terms.targets.ttft_s,
            target_tpot_s=item.terms.targets.tpot_s,
            deadline_s=item.terms.targets.deadline_s,
            max_tokens=item.max_tokens,
            priority=item.priority,
            num_prompt_tokens=len(item.prompt_token_ids),
            num_cached_tokens=one.num_cached_tokens or 0,
            num_output_tokens=item.num_output_tokens,
        )
        for item, one in zip(items, served, strict=True)
    ]
    workload = load_of_accounts(accounts, setup.spec.capacity).workload
    return served, serve_load(setup, workload, Limits(len(accounts))).requests


@pytest.mark.parametrize("name", sorted(LOADS.keys() - {"bursts", "prefixes"}))
def test_requests_that_share_nothing_are_served_as_those_of_a_recording(name: str) -> None:
    served, again = served_then_and_by_its_accounts(LOADS[name])
    expected = [pytest.approx(one.e2e_s, abs=1e-4) for one in served]
    assert [one.e2e_s for one in again] == expected


def test_prefixes_of_one_tenant_are_nearly_as_good_as_those_of_a_recording() -> None:
    """The figures of docs/simulate.md."""
    served, again = served_then_and_by_its_accounts(LOADS["prefixes"])
    hits = [sum(one.num_cached_tokens or 0 for one in load) for load in (served, again)]
    ttfts = [median(one.ttft_s or 0.0 for one in load) for load in (served, again)]
    assert hits[1] / hits[0] == pytest.approx(0.95, abs=0.005)
    assert ttfts == [pytest.approx(0.32, abs=0.005), pytest.approx(0.50, abs=0.005)]
