"""The account of every wait: over a run with a little of everything, and in situations made so
that the cause is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.support.wait_checker import WaitChecker
from headway.core.causes import WaitCause
from headway.core.events import Admitted, Event, Preempted
from headway.core.request import Request
from headway.core.terms import Terms
from tests.sharing.mixed_run import run_mixed
from tests.sharing.rig import make_engine
from tests.support.harness import make_request


@pytest.mark.parametrize(
    ("policy", "num_requests"), [("fair", 600), ("priority", 300), ("fcfs", 300)]
)
def test_causes_add_up_and_preemptions_have_counterparts(policy: str, num_requests: int) -> None:
    checker = run_mixed(policy, num_requests)
    assert checker.problems == []
    # The run was what it should be: long waits, for many reasons, and many preemptions.
    causes = {cause for cause, seconds in checker.total_causes().items() if seconds > 1.0}
    expected = {WaitCause.KV_BLOCKS, WaitCause.RUNNING_LIMIT, WaitCause.EXECUTOR_BUSY}
    if policy == "fair":
        expected |= {WaitCause.TENANT_SHARE, WaitCause.TIER_ORDER}
    assert expected <= causes
    assert len(checker.preempted) > num_requests / 50
    assert any(not history.runs for history in checker.histories.values()), (
        "no client disconnected from the waiting queue"
    )


def run(requests: Iterable[Request], num_blocks: int = 64, **settings: Any) -> list[Event]:
    """Run all requests to their end; return the events, after checking their waits."""
    found: list[Event] = []
    engine = make_engine(num_blocks, found.extend, scheduling_policy="fair", **settings)
    engine.send(requests)
    engine.run()
    assert problems_in(found) == []
    return found


def problems_in(found: Iterable[Event]) -> list[str]:
    checker = WaitChecker()
    checker(list(found))
    checker.conclude()
    return checker.problems


def ask(request_id: str, tenant: str, at: float, prompt: int, max_tokens: int, **terms: Any):
    own = Terms(tenant=tenant, cache_group=tenant, **terms)
    return make_request(request_id, prompt, max_tokens, arrived_at=at, terms=own)


def wait_of(found: Iterable[Event], request_id: str) -> Admitted:
    """Return the first admission of a request."""
    return next(
        event for event in found if isinstance(event, Admitted) and event.request_id == request_id
    )


def share_of(cause: WaitCause, admitted: Admitted) -> float:
    assert admitted.waited_s > 0.1, "it had to wait, or nothing is shown"
    return sum(one.seconds for one in admitted.causes if one.cause is cause) / admitted.waited_s


def test_one_blocked_by_kv_blocks_is_told_so_and_who_holds_them() -> None:
    found = run(
        [
            ask("large", "holder", 0.0, 800, 100),
            ask("small", "holder", 0.0, 16, 60),
            ask("late", "waiter", 0.3, 300, 10),
        ]
    )
    late = wait_of(found, "late")
    assert share_of(WaitCause.KV_BLOCKS, late) > 0.9
    assert late.held_by == "holder"


def test_one_blocked_by_what_its_tenant_has_had_is_told_so() -> None:
    others = [ask(f"other{at}", "modest", 0.02, 16, 8) for at in range(4)]
    first, second = ask("first", "greedy", 0.0, 400, 80), ask("second", "greedy", 0.01, 100, 8)
    found = run([first, second, *others], max_num_seqs=1)
    after = wait_of(found, "second")
    assert after.at > wait_of(found, "other2").at
    assert share_of(WaitCause.TENANT_SHARE, after) > 0.8


def test_one_blocked_by_what_its_tenant_may_hold_is_told_so() -> None:
    found = run(
        [
            ask("first", "capped", 0.0, 200, 50, max_kv_share=0.25),
            ask("second", "capped", 0.3, 100, 10, max_kv_share=0.25),
            ask("free", "other", 0.31, 100, 10),
        ]
    )
    assert share_of(WaitCause.KV_QUOTA, wait_of(found, "second")) > 0.9
    assert wait_of(found, "free").waited_s < 0.1


def test_one_blocked_by_a_higher_tier_is_told_so() -> None:
    paid = [ask(f"paid{at}", "day", 0.0, 64, 20) for at in range(8)]
    spot = ask("spot", "night", 0.01, 64, 10, is_spot=True)
    found = run([*paid, spot], max_num_seqs=1)
    last = wait_of(found, "spot")
    assert last.at > wait_of(found, "paid7").at
    assert share_of(WaitCause.TIER_ORDER, last) > 0.8


def test_books_notice_causes_that_do_not_add_up() -> None:
    found = run([ask("a", "x", 0.0, 64, 20), ask("b", "y", 0.0, 64, 20)], max_num_seqs=1)
    whole = wait_of(found, "b")
    short = [one._replace(seconds=0.9 * one.seconds) for one in whole.causes]
    altered = [replace(event, causes=tuple(short)) if event is whole else event for event in found]  # pyright: ignore
    assert any("b waited" in problem for problem in problems_in(altered))


def test_books_notice_a_preemption_without_a_counterpart() -> None:
    spot = ask("spot", "night", 0.0, 64, 40, is_spot=True)
    found = run([spot, ask("paid", "day", 0.1, 64, 5)], max_num_seqs=1)
    given = next(event for event in found if isinstance(event, Preempted))
    assert (given.request_id, given.by) == ("spot", "paid")
    stray = [replace(event, by="nobody") if event is given else event for event in found]  # pyright: ignore
    assert any("nobody" in problem for problem in problems_in(stray))
    never = [e for e in found if not (isinstance(e, Admitted) and e.is_resumed)]
    assert any("spot waits" in problem for problem in problems_in(never))
