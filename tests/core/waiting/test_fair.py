"""Fair shares: who is next among tenants, what is charged, and what is not saved up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from headway.core.events import Admitted, Preempted, Stepped
from headway.core.executor import Capacity, Ticket
from headway.core.plan import Failure, StepResult
from headway.core.request import FinishReason, Request
from headway.core.terms import Terms
from headway.core.waiting.accounts import (
    BLOCK_S_COST,
    CACHED_COST,
    GAP_PERIOD_S,
    MAX_IDLE_ACCOUNTS,
    OUTPUT_COST,
    PROMPT_COST,
    Accounts,
)
from headway.core.waiting.fair import CACHED_LEAD, FairQueue
from headway.executors.fake import FakeExecutor
from tests.support.harness import Harness, make_request


def terms(tenant: str, **fields: Any) -> Terms:
    return Terms(tenant, cache_group=tenant, **fields)


def served(engine: Harness, tenant: str) -> float:
    account = engine.scheduler.accounts.get(tenant)
    assert account is not None
    return account.served


class Line:
    """A fair queue and its accounts, with arrival orders in order of joining."""

    def __init__(self, cached: set[str] | None = None) -> None:
        self.accounts = Accounts()
        self.queue = FairQueue(self.accounts, lambda request: request.id in (cached or ()))
        self._num = 0

    def join(self, request_id: str, tenant: str, **fields: Any) -> Request:
        self._num += 1
        spot = fields.pop("is_spot", False)
        weight = fields.pop("weight", 1.0)
        request = make_request(request_id, arrival_order=self._num, **fields)
        request.terms = terms(tenant, is_spot=spot, weight=weight)
        self.accounts.open(request)
        self.queue.push(request)
        self.accounts.begin_wait(request)
        return request

    def take(self) -> str:
        request = self.queue.pop()
        assert request is not None
        self.accounts.end_wait(request)
        return request.id

    def charge(self, tenant: str, amount: float) -> None:
        account = self.accounts.get(tenant)
        assert account is not None
        account.charge(amount)


# ------------------------------------------------------------------------ the order


def test_the_tenant_given_least_is_next():
    line = Line()
    for at in range(3):
        line.join(f"a{at}", "a")
        line.join(f"b{at}", "b")
    assert line.take() == "a0"
    line.charge("a", 10)
    assert line.take() == "b0"
    line.charge("b", 4)
    assert line.take() == "b1"
    line.charge("b", 4)
    assert line.take() == "b2"
    assert line.take() == "a1"


def test_twice_the_weight_is_twice_the_service():
    line = Line()
    for at in range(30):
        line.join(f"a{at}", "a", weight=2.0)
        line.join(f"b{at}", "b")
    taken: Counter[str] = Counter()
    for _ in range(30):
        tenant = line.take()[0]
        taken[tenant] += 1
        line.charge(tenant, 5)
    assert taken == {"a": 20, "b": 10}


def test_the_service_gap_is_between_waiting_tenants_only():
    line = Line()
    for tenant in "ab":
        line.join(f"{tenant}0", tenant, weight=2.0 if tenant == "b" else 1.0)
    line.charge("a", 100)
    line.charge("b", 60)
    assert line.accounts.service_gap(0.0) == 100 - 60 / 2
    line.join("c0", "c")
    assert line.accounts.service_gap(GAP_PERIOD_S) == 100 - 60 / 2, "c starts at the least counter"
    line.charge("c", 90)
    assert line.accounts.service_gap(1.5 * GAP_PERIOD_S) == 100 - 60 / 2, "computed once a period"
    assert line.accounts.service_gap(2 * GAP_PERIOD_S) == 30 + 90 - 60 / 2
    assert [line.take(), line.take()] == ["b0", "a0"]
    assert line.accounts.service_gap(2 * GAP_PERIOD_S) == 0
    line.accounts.check([])


def test_each_step_exports_the_service_gap():
    engine = Harness(max_num_seqs=1)
    for number in range(2):
        for tenant in "ab":
            engine.add(f"{tenant}{number}", 8, terms=terms(tenant), max_tokens=2)
    gaps = list[float]()
    while engine.core.has_work:
        engine.step()
        gaps.append(engine.seen(Stepped)[-1].service_gap)
    assert gaps[0] == 8 * PROMPT_COST + OUTPUT_COST
    assert gaps[-1] == 0


def test_within_a_tenant_priority_goes_first_and_then_the_place():
    line = Line()
    line.join("late", "a", priority=1)
    line.join("first", "a")
    line.join("second", "a")
    assert [line.take() for _ in range(3)] == ["first", "second", "late"]


def test_priority_is_nothing_to_other_tenants():
    line = Line()
    line.join("a", "a")
    line.join("b", "b", priority=-100)
    assert line.take() == "a"


def test_spot_comes_after_everybody_else_however_little_it_was_given():
    line = Line()
    line.join("spot", "s", is_spot=True)
    line.join("a0", "a")
    line.charge("a", 1000)
    line.join("a1", "a")
    assert [line.take() for _ in range(3)] == ["a0", "a1", "spot"]


def test_service_as_spot_is_no_part_of_a_tenants_share():
    line = Line()
    line.join("night", "x", is_spot=True)
    assert line.take() == "night"
    spot = line.accounts.get("x", is_spot=True)
    assert spot is not None
    spot.charge(1000)
    line.join("y0", "y")
    line.charge("y", 10)
    line.join("day", "x")
    line.join("y1", "y")
    line.charge("x", 1)
    assert [line.take() for _ in range(3)] == ["y0", "y1", "day"], "x begins level with y"


def test_ordinary_service_is_not_held_against_a_tenants_spot_requests():
    line = Line()
    line.join("day", "x")
    assert line.take() == "day"
    line.charge("x", 1000)
    line.join("x0", "x", is_spot=True)
    line.join("y0", "y", is_spot=True)
    assert [line.take() for _ in range(2)] == ["x0", "y0"]


def test_spot_requests_count_in_no_gap_weight_or_share():
    line = Line()
    line.join("s0", "s", is_spot=True)
    for tenant in "ab":
        line.join(f"{tenant}0", tenant)
    for tenant in "ab":
        line.charge(tenant, 500)
    assert line.accounts.service_gap(0.0) == 0
    assert line.accounts.active_weight == 2.0
    assert line.accounts.share(terms("a")) == 0.5
    line.join("a1", "a", is_spot=True, weight=9.0)
    assert line.accounts.share(terms("a")) == 0.5, "the weight of a spot tier is its own"
    line.accounts.check([])


def test_a_cached_prefix_goes_first_among_tenants_given_about_as_much():
    line = Line(cached={"b0", "c0"})
    for tenant, amount in (("a", 0), ("b", 100), ("c", 50)):
        line.join(f"{tenant}0", tenant)
        line.charge(tenant, amount)
    assert [line.take() for _ in range(3)] == ["c0", "b0", "a0"]


def test_a_cached_prefix_is_worth_no_more_than_the_slack():
    line = Line(cached={f"b{at}" for at in range(99)})
    line.join("a0", "a")
    for at in range(99):
        line.join(f"b{at}", "b")
    num_before = 0
    while line.take() != "a0":
        line.charge("b", 60)
        num_before += 1
    assert num_before == CACHED_LEAD // 60 + 1


# --------------------------------------------------------------------------- lifting


def test_idleness_is_not_saved_up():
    line = Line()
    line.join("a0", "a")
    line.join("idle", "b")
    assert [line.take(), line.take()] == ["a0", "idle"]
    for at in range(1, 6):
        line.join(f"a{at}", "a")
    line.charge("a", 100)
    # b was away while a was given 100: it comes back as if it had been given as much.
    line.join("b1", "b")
    line.join("b2", "b")
    account = line.accounts.get("b")
    assert account is not None
    assert account.counter == 100


def test_what_was_given_beyond_the_share_is_not_forgotten_by_going_away():
    line = Line()
    line.join("a0", "a")
    line.join("b0", "b")
    line.take()
    line.charge("a", 500)
    line.join("a1", "a")
    assert line.take() == "b0"


def test_one_who_is_put_back_is_not_lifted():
    line = Line()
    line.join("a", "a")
    line.join("b", "b")
    line.charge("b", 50)
    request = line.queue.pop()
    assert request is not None
    line.queue.push(request)
    account = line.accounts.get("a")
    assert account is not None
    assert account.counter == 0


def test_lanes_of_tenants_that_left_are_dropped_behind_a_waiting_head():
    line = Line()
    line.join("head", "a")
    for at in range(500):
        line.queue.remove(line.join(f"r{at}", f"t{at}"))
    assert list(line.queue._lanes[0]) == ["a"]
    assert len(line.queue._heaps[0]) <= 2 * 1 + 64
    assert line.take() == "head"


def test_a_tenant_that_comes_back_behind_a_waiting_head_is_listed_once():
    line = Line()
    line.join("a0", "a")
    line.join("b0", "b")
    line.charge("b", 5)
    for at in range(200):
        line.queue.remove(line.join(f"r{at}", "c"))
    line.join("c0", "c")
    line.charge("c", 9)
    assert [line.take() for _ in range(3)] == ["a0", "b0", "c0"]


def test_accounts_of_tenants_long_gone_are_forgotten():
    accounts = Accounts()
    for at in range(MAX_IDLE_ACCOUNTS + 10):
        request = make_request(f"r{at}", terms=terms(str(at)))
        accounts.open(request)
        accounts.close(request)
    assert len(accounts) == MAX_IDLE_ACCOUNTS


# --------------------------------------------------------------------------- charges


def test_prompt_output_and_blocks_are_charged():
    engine = Harness(block_size=4)
    engine.add("a", 6, max_tokens=3, terms=terms("t"))
    engine.step()
    assert served(engine, "t") == 6 * PROMPT_COST + OUTPUT_COST
    engine.advance(2.0)
    engine.run()
    held = engine.finish("a").kv_block_s
    assert held == pytest.approx(4.0, abs=0.1), "two blocks for two seconds"
    assert served(engine, "t") == pytest.approx(
        6 * PROMPT_COST + 3 * OUTPUT_COST + held * BLOCK_S_COST
    )


def test_a_cached_prompt_is_charged_less():
    engine = Harness(block_size=4)
    prompt = list(range(9))
    engine.add("a", prompt, max_tokens=1, terms=terms("t"))
    engine.run()
    before = served(engine, "t")
    engine.add("b", prompt, max_tokens=1, terms=terms("t"))
    engine.run()
    gained = served(engine, "t") - before
    assert gained == pytest.approx(8 * CACHED_COST + PROMPT_COST + OUTPUT_COST, abs=0.01)


def test_eight_samples_are_charged_as_eight():
    engine = Harness(max_num_seqs=8, max_num_batched_tokens=64)
    engine.add("one", 4, max_tokens=5, terms=terms("one"))
    engine.run()
    engine.add("many", 4, max_tokens=5, n=8, terms=terms("many"))
    engine.run()
    assert served(engine, "one") == pytest.approx(4 + 10, abs=0.5)
    assert served(engine, "many") == pytest.approx(4 + 80, abs=0.5)


def test_what_is_computed_again_is_not_charged_again():
    def charged(num_blocks: int) -> tuple[float, int]:
        engine = Harness(num_blocks=num_blocks, block_size=4, enable_prefix_caching=False)
        for request_id in "abc":
            engine.add(request_id, 8, max_tokens=8, terms=terms("t"))
        engine.run()
        return served(engine, "t"), len(engine.seen(Preempted))

    calm, num_none = charged(64)
    tight, num_some = charged(6)
    assert num_none == 0
    assert num_some > 0
    # Blocks are held for no time at all between steps of this clock, but for rounding.
    assert tight == pytest.approx(calm, abs=0.1)


def test_a_prompt_that_is_given_up_half_way_is_paid_half_way():
    engine = Harness(max_num_batched_tokens=5)
    engine.add("a", 16, terms=terms("t"))
    engine.step()
    assert served(engine, "t") == 16
    engine.abort("a")
    assert served(engine, "t") == pytest.approx(5, abs=0.01)
    # The counter does not fall; what was given back is credit for the next prompt.
    account = engine.scheduler.accounts.get("t")
    assert account is not None
    before = account.counter
    engine.add("b", 4, max_tokens=1, terms=terms("t"))
    engine.step()
    assert account.counter == pytest.approx(before, abs=0.01)


# -------------------------------------------------------------------- in the engine


def flood(engine: Harness, tenant: str, count: int, **fields: Any) -> None:
    for at in range(count):
        engine.add(f"{tenant}{at}", 4, terms=terms(tenant, **fields), max_tokens=8)


def test_a_flood_delays_another_tenant_by_one_seat_only():
    engine = Harness(max_num_seqs=2)
    flood(engine, "f", 20)
    engine.step()
    engine.add("quiet", 4, terms=terms("q"), max_tokens=8)
    engine.until(lambda: "quiet" in engine.running)
    third = engine.seen(Admitted)[2]
    assert third.request_id == "quiet", "the next free seat was its own"
    engine.run()


def test_spot_gives_its_seat_to_anybody_else():
    engine = Harness(max_num_seqs=2)
    flood(engine, "s", 2, is_spot=True)
    engine.step()
    engine.add("a", 4, terms=terms("a"))
    assert "a" in engine.step()
    assert [event.request_id for event in engine.seen(Preempted)] == ["s1"]
    engine.run()


def test_spot_is_never_immune_to_an_ordinary_request():
    engine = Harness(max_num_seqs=1, max_preemptions=2)
    engine.add("spot", 4, max_tokens=40, terms=terms("s", is_spot=True))
    for at in range(4):
        engine.until(lambda: engine.running == ["spot"])
        engine.add(f"a{at}", 4, max_tokens=2, terms=terms("a"))
        assert f"a{at}" in engine.step()
    assert len(engine.seen(Preempted, "spot")) == 4
    engine.run()


def test_spot_is_the_first_to_lose_its_blocks_and_then_the_tenant_given_most():
    engine = Harness(num_blocks=12, block_size=4, max_num_batched_tokens=64)
    engine.add("spot", 15, max_tokens=8, terms=terms("s", is_spot=True))
    engine.step()
    engine.add("old", 16, max_tokens=8, terms=terms("rich"))
    engine.add("young", 16, max_tokens=8, terms=terms("a"))
    engine.steps(2)
    assert [event.request_id for event in engine.seen(Preempted)] == ["spot"]


def test_the_tenant_given_most_loses_its_blocks_before_a_younger_request():
    engine = Harness(num_blocks=12, block_size=4, max_num_batched_tokens=64)
    engine.add("first", 16, max_tokens=8, terms=terms("a"))
    engine.add("rich", 16, max_tokens=8, terms=terms("rich"))
    engine.add("young", 16, max_tokens=8, terms=terms("b"))
    engine.step()
    account = engine.scheduler.accounts.get("rich")
    assert account is not None
    account.charge(5000)
    engine.step()
    assert [event.request_id for event in engine.seen(Preempted)] == ["rich"]
    engine.run()


@pytest.mark.parametrize("at_head", [True, False])
def test_priority_works_at_a_full_batch_within_a_tenant(at_head: bool):
    engine = Harness(max_num_seqs=3)
    engine.add("a0", 4, terms=terms("a"), max_tokens=30, priority=5)
    engine.add("b0", 4, terms=terms("b"), max_tokens=30, priority=9)
    engine.add("a1", 4, terms=terms("a"), max_tokens=30, priority=7)
    engine.step()
    if not at_head:
        engine.add("other", 4, terms=terms("c"))
        engine.step()
    engine.add("vip", 4, terms=terms("a"), priority=0)
    engine.step()
    assert [event.request_id for event in engine.seen(Preempted)] == ["a1"]
    assert "vip" in engine.running
    engine.run()


def test_of_several_that_may_take_a_place_the_most_urgent_does():
    engine = Harness(max_num_seqs=2)
    engine.add("a0", 4, terms=terms("a"), max_tokens=30, priority=9)
    engine.add("b0", 4, terms=terms("b"), max_tokens=30)
    engine.step()
    engine.add("other", 4, terms=terms("c"))
    engine.step()
    engine.add("urgent", 4, terms=terms("a"), priority=5)
    engine.add("vip", 4, terms=terms("a"), priority=0)
    engine.step()
    assert "vip" in engine.running
    preempted = [(event.request_id, event.by) for event in engine.seen(Preempted)]
    assert preempted == [("a0", "vip")], "nobody sat down only to stand up again"
    engine.run()


def test_priority_preempts_nobody_of_another_tenant():
    engine = Harness(max_num_seqs=1)
    engine.add("b", 4, terms=terms("b"), max_tokens=30, priority=9)
    engine.step()
    engine.add("vip", 4, terms=terms("a"), priority=0)
    engine.steps(3)
    assert engine.seen(Preempted) == []


def test_a_step_that_failed_is_not_charged_as_output():
    class Failing(FakeExecutor):
        def collect(self, ticket: Ticket) -> StepResult:
            result = super().collect(ticket)
            outcomes = tuple(Failure("broken") for _ in result.outcomes)
            return replace(result, outcomes=outcomes)

    engine = Harness(executor=Failing(Capacity(64, 4, 10_000)))
    engine.add("a", 8, terms=terms("a"))
    engine.step()
    assert engine.finish("a").reason is FinishReason.ERROR
    assert served(engine, "a") == 0.0


def test_a_preempted_request_does_not_bring_an_old_weight_back():
    engine = Harness(max_num_seqs=1)
    engine.add("old", 4, max_tokens=9, priority=1, terms=terms("a", weight=1.0))
    engine.steps(2)
    engine.add("new", 4, max_tokens=2, terms=terms("a", weight=5.0))
    engine.step()
    assert engine.seen(Preempted, "old")
    account = engine.scheduler.accounts.get("a")
    assert account is not None
    assert account.weight == 5.0
    engine.run()


def test_a_tenant_whose_account_was_forgotten_begins_with_the_new_one():
    line = Line()
    line.join("b", "b")
    line.charge("b", 1.0)
    gone = line.join("old", "a")
    line.charge("a", 1000.0)
    line.queue.remove(gone)
    del line.accounts._accounts[False]["a"]
    line.join("new", "a")
    line.charge("a", 5.0)
    line.join("b2", "b")
    assert [line.take() for _ in range(3)] == ["b", "b2", "new"]
