"""Requests of a lost engine: they go before those that came here first, and pay once."""

from __future__ import annotations

import pytest

from headway.core.events import Admitted
from headway.core.terms import Terms
from headway.core.waiting.accounts import OUTPUT_COST, PROMPT_COST
from tests.support.harness import Harness, make_request


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "deadline"])
def test_resent_requests_go_first_in_the_order_in_which_they_were_sent(policy: str):
    engine = Harness(max_num_seqs=1, scheduling_policy=policy)
    engine.add("running", 4, max_tokens=2)
    engine.step()
    for name in ("here1", "here2"):
        engine.add(name, 4, max_tokens=1)
    for name in ("resent1", "resent2"):
        engine.core.add(make_request(name, 4, max_tokens=1), is_resent=True)
    engine.run()
    admitted = [event.request_id for event in engine.seen(Admitted)]
    assert admitted == ["running", "resent1", "resent2", "here1", "here2"]


def test_a_resent_request_goes_before_its_own_tenant_only():
    """A tenant that lost an engine gains nothing over the tenants of this one."""
    engine = Harness(max_num_seqs=1, scheduling_policy="fair")
    engine.add("running", 4, max_tokens=2, terms=Terms("a"))
    engine.step()
    engine.add("here", 4, max_tokens=1, terms=Terms("b"))
    engine.core.add(make_request("resent", 4, max_tokens=1, terms=Terms("a")), is_resent=True)
    engine.run()
    admitted = [event.request_id for event in engine.seen(Admitted)]
    assert admitted == ["running", "here", "resent"]


@pytest.mark.parametrize("is_resent", [False, True])
def test_the_prompt_of_a_request_that_had_tokens_is_not_charged_again(is_resent: bool):
    engine = Harness(scheduling_policy="fair")
    request = make_request("ran", 10, max_tokens=5, num_prompt_tokens=8, terms=Terms("a"))
    engine.core.add(request, is_resent=is_resent)
    engine.run()
    account = engine.scheduler.accounts.get("a")
    assert account is not None
    prompt = 0.0 if is_resent else PROMPT_COST * 8
    assert account.served == pytest.approx(prompt + OUTPUT_COST * 3, abs=0.5)
