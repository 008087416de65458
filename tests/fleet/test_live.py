"""Requests of a connection: attempts, samples, credit."""

from __future__ import annotations

import pytest

from headway.core.params import SamplingParams
from headway.engine.process.messages import AddRequest
from headway.errors import WireError
from headway.fleet.network.live import LiveRequests
from headway.fleet.network.wire import Credit


def command(name: str, attempt: int = 0, n: int = 1, num_prompt: int = 0) -> AddRequest:
    params = SamplingParams(max_tokens=9, n=n)
    index = int(name.partition("#")[2] or 0)
    return AddRequest(
        name, [1, 2, 3], params, 0, 0.0, index=index, num_prompt_tokens=num_prompt, attempt=attempt
    )


def test_only_the_newest_attempt_is_live() -> None:
    live = LiveRequests(Credit())
    assert live.add(command("a", 0)) == []
    assert live.add(command("a", 2)) == ["0:a"]
    assert live.is_live(2, "a")
    assert not live.is_live(0, "a")
    for old in (1, 2):
        with pytest.raises(WireError):
            live.add(command("a", old))
    live.check()


def test_the_samples_of_an_attempt_are_sent_one_by_one_after_the_first_token() -> None:
    live = LiveRequests(Credit())
    live.add(command("a", 0, n=3))
    assert live.add(command("a", 1, num_prompt=2)) != []
    assert live.add(command("a#2", 1, num_prompt=2)) == []
    assert live.attempt_of("a#2") == 1
    assert live.attempt_of("a#1") is None, "this sample had ended"
    live.end("a")
    assert live.is_live(1, "a#2"), "the first sample ends alone"
    live.end("a#2")
    assert not len(live)
    live.check()


def test_a_prompt_that_ends_before_its_fork_ends_with_all_samples() -> None:
    live = LiveRequests(Credit())
    live.add(command("a", n=3))
    live.end("a")
    assert not len(live)
    live.add(command("b", n=3))
    live.fork(0, "b#1")
    live.end("b")
    assert live.is_live(0, "b#1")
    assert sorted(live.clear()) == ["0:b#1", "0:b#2"]
    live.check()


def test_a_fork_of_an_older_attempt_is_not_one_of_the_newer() -> None:
    live = LiveRequests(Credit())
    live.add(command("a", 0, n=3))
    live.add(command("a", 1, n=3))
    live.fork(0, "a#1")
    live.end("a")
    assert not len(live), "the newer attempt ended before its fork"
    live.check()


def test_the_credit_bounds_requests_and_tokens() -> None:
    live = LiveRequests(Credit(num_requests=2, num_tokens=8))
    assert live.has_room(3)
    live.add(command("a"))
    live.add(command("b"))
    assert not live.has_room(3)
    live.end("a")
    assert live.has_room(3)
    small = LiveRequests(Credit(num_requests=9, num_tokens=4))
    assert small.has_room(9), "a request alone is never too large"
    small.add(command("a", 1, num_prompt=2))
    assert not small.has_room(3)
    assert small.has_room(3, "a#1"), "nor are its samples, one by one"
