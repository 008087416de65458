"""Request: the transition table, the end of an output, and forking."""

from __future__ import annotations

from itertools import product

import pytest

from headway.core.params import SamplingParams
from headway.core.request import (
    TRANSITIONS,
    FinishReason,
    Request,
    RequestState,
    sample_id,
)
from headway.core.terms import Terms
from tests.support.harness import make_request

LEGAL = {(state, target) for state, targets in TRANSITIONS.items() for target in targets}


@pytest.mark.parametrize(("state", "target"), sorted(product(RequestState, RequestState)))
def test_a_move_is_made_and_stamped_if_the_table_has_it_and_raises_if_not(
    state: RequestState, target: RequestState
):
    request = make_request(state=state)
    if (state, target) in LEGAL:
        request.set_state(target, 3.0)
        assert (request.state, request.state_since) == (target, 3.0)
    else:
        with pytest.raises(RuntimeError, match="not a legal transition"):
            request.set_state(target, 3.0)
        assert request.state is state


def test_nothing_leaves_finished_and_everything_else_can_finish():
    assert not TRANSITIONS[RequestState.FINISHED]
    for state in set(RequestState) - {RequestState.FINISHED}:
        assert RequestState.FINISHED in TRANSITIONS[state]


def test_the_last_token_allowed_ends_with_length():
    request = make_request(max_tokens=2)
    assert [request.append(token_id) for token_id in (1, 2)] == [None, FinishReason.LENGTH]


def test_a_stop_token_ends_with_stop_even_as_the_last_token_allowed():
    request = make_request(max_tokens=2, stop_token_ids=(9,))
    assert [request.append(token_id) for token_id in (1, 9)] == [None, FinishReason.STOP]


def test_a_stop_token_before_min_tokens_is_an_ordinary_token():
    request = make_request(max_tokens=4, min_tokens=2, stop_token_ids=(9,))
    assert [request.append(9) for _ in range(2)] == [None, FinishReason.STOP]
    assert request.num_output_tokens == 2


def test_a_fork_is_another_sample_with_the_same_arrival_order():
    parent = make_request(
        "p",
        [1, 2, 3],
        n=3,
        priority=5,
        terms=Terms(tenant="t"),
        seed=11,
        arrived_at=2.0,
        arrival_order=4,
    )
    parent.append(9)
    child = parent.fork(2, now=8.0)
    assert (child.id, child.index, child.token_ids) == ("p#2", 2, [1, 2, 3])
    assert (child.seed, child.priority, child.terms.tenant, child.arrival_order) == (11, 5, "t", 4)
    assert (child.arrived_at, child.state_since, child.num_computed) == (2.0, 8.0, 0)
    assert child.params.n == 1
    assert child.state is RequestState.WAITING
    child.append(7)
    assert parent.token_ids == [1, 2, 3, 9], "samples share no list"


def test_the_first_sample_keeps_the_id_of_its_prompt():
    assert [sample_id("x", index) for index in range(3)] == ["x", "x#1", "x#2"]
    assert make_request("x", n=3).sample_ids == ("x", "x#1", "x#2")


def test_an_id_that_could_be_a_samples_is_refused():
    with pytest.raises(ValueError, match="#"):
        make_request("x#1")


@pytest.mark.parametrize(("token_ids", "max_tokens"), [([], 4), ([1], None)])
def test_a_request_needs_a_prompt_and_a_bound_on_its_output(
    token_ids: list[int], max_tokens: int | None
):
    params = SamplingParams(max_tokens=max_tokens)
    with pytest.raises(ValueError, match="prompt and resolved"):
        Request(id="x", token_ids=token_ids, params=params, seed=0, arrived_at=0.0)


@pytest.mark.parametrize(
    "damage",
    [
        {"num_computed": 5},
        {"num_computed": -1},
        {"num_prompt_tokens": 9},
        {"token_ids": list(range(13))},
        {"finish_reason": FinishReason.STOP},
        {"state": RequestState.FINISHED},
    ],
    ids=lambda damage: next(iter(damage)),
)
def test_check_sees_damage(damage: dict[str, object]):
    request = make_request(prompt=4, max_tokens=8)
    request.check()
    for name, value in damage.items():
        setattr(request, name, value)
    with pytest.raises(AssertionError):
        request.check()
