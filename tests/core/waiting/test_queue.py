"""The waiting line: order, tombstones, and the claims of both policies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.request import Request
from headway.core.waiting.policies import PolicyQueue, fcfs, make_queue, priority
from headway.core.waiting.request_heap import RequestHeap
from headway.errors import ConfigError
from tests.support.harness import make_request


def placed(arrival_order: int, priority: int = 0, index: int = 0) -> Request:
    request = make_request(f"r{arrival_order}", priority=priority, arrival_order=arrival_order)
    request.index = index
    return request


def pop_all(queue: PolicyQueue | RequestHeap) -> list[Request]:
    popped: list[Request] = []
    while (request := queue.pop()) is not None:
        popped.append(request)
    return popped


def test_fcfs_goes_by_arrival_and_ignores_priority():
    queue = make_queue("fcfs")
    requests = [placed(order, priority=-order) for order in range(1, 6)]
    for request in reversed(requests):
        queue.push(request)
    assert pop_all(queue) == requests


def test_priority_goes_by_the_lower_number_and_then_by_arrival():
    queue = make_queue("priority")
    late, first, second = placed(1, priority=9), placed(2, priority=-1), placed(3, priority=-1)
    for request in (late, second, first):
        queue.push(request)
    assert pop_all(queue) == [first, second, late]


def test_an_unknown_policy_is_a_config_error_with_the_choices():
    with pytest.raises(ConfigError, match="fcfs, priority, got 'lifo'"):
        make_queue("lifo")


def test_equal_priorities_have_equal_rank_and_samples_of_a_prompt_keep_their_order():
    assert fcfs(placed(1, priority=3)).rank == fcfs(placed(2, priority=1)).rank
    assert priority(placed(1, priority=1)).rank < priority(placed(2, priority=3)).rank
    assert fcfs(placed(1, index=0)) < fcfs(placed(1, index=1)) < fcfs(placed(2, index=0))


def test_a_request_that_comes_back_takes_its_old_place():
    queue = make_queue("fcfs")
    first, second = placed(1), placed(2)
    queue.push(first)
    queue.push(second)
    assert queue.pop() is first
    queue.push(first)
    assert pop_all(queue) == [first, second]


def test_a_removed_request_is_never_popped():
    queue = make_queue("fcfs")
    requests = [placed(order) for order in range(1, 5)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    queue.remove(requests[2])
    assert len(queue) == 2
    assert set(queue) == {requests[1], requests[3]}
    assert pop_all(queue) == [requests[1], requests[3]]


def test_a_new_request_under_the_id_of_a_removed_one_is_not_taken_for_it():
    queue = make_queue("fcfs")
    old = placed(1)
    queue.push(old)
    queue.remove(old)
    new = make_request(old.id, arrival_order=7)
    queue.push(new)
    assert pop_all(queue) == [new]


def test_waiting_twice_and_removing_what_does_not_wait_are_bugs():
    queue = make_queue("fcfs")
    request = placed(1)
    with pytest.raises(RuntimeError, match="not waiting"):
        queue.remove(request)
    queue.push(request)
    with pytest.raises(RuntimeError, match="already in the heap"):
        queue.push(request)


def test_tombstones_never_outnumber_the_living_by_much():
    queue = RequestHeap(fcfs)
    requests = [placed(order) for order in range(1, 1001)]
    for request in requests:
        queue.push(request)
    for request in requests[:990]:
        queue.remove(request)
    assert len(queue._heap) <= 2 * len(queue) + 64
    assert pop_all(queue) == requests[990:]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9))))
def test_the_queue_agrees_with_a_sorted_list(actions: list[tuple[str, int]]):
    queue = make_queue("priority")
    model: list[Request] = []
    requests = [placed(order, priority=order % 3) for order in range(10)]
    for action, at in actions:
        request = requests[at]
        if action == "pop":
            expected = min(model, key=priority, default=None)
            assert queue.pop() is expected
            model = [other for other in model if other is not expected]
        elif action == "push" and request not in model:
            queue.push(request)
            model.append(request)
        elif action == "remove" and request in model:
            queue.remove(request)
            model.remove(request)
        assert len(queue) == len(model)
        assert set(queue) == set(model)
