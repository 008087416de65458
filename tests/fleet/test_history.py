"""The history checker finds every way in which a stream can be wrong."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest

from benchmarks.support.history import ChoiceHistory, History, problems

TOKENS = ["the", " quick", " brown", " fox", " jumps"]


def good() -> History:
    choices = {
        0: ChoiceHistory(list(TOKENS), [-0.1, -0.2, -0.3, -0.4, -0.5], ["length"]),
        1: ChoiceHistory(["a", "b", "b", "c"], [], ["stop"]),
    }
    return History("cmpl-1", choices, num_done=1, num_tokens=9, times=[1.0, 1.1, 3.0, 3.1])


def dropped(history: History) -> None:
    del history.choices[0].tokens[2]


def dropped_at_the_end(history: History) -> None:
    history.choices[0].tokens.pop()


def doubled(history: History) -> None:
    history.choices[0].tokens.insert(2, TOKENS[1])


def doubled_at_the_end(history: History) -> None:
    history.choices[0].tokens.append(TOKENS[-1])


def changed(history: History) -> None:
    history.choices[0].tokens[2] = " red"


def reordered(history: History) -> None:
    tokens = history.choices[0].tokens
    tokens[1], tokens[2] = tokens[2], tokens[1]


def in_another_choice(history: History) -> None:
    history.choices[1].tokens.append(history.choices[0].tokens.pop())


def rescored(history: History) -> None:
    history.choices[0].logprobs[3] = -0.41


def without_end(history: History) -> None:
    history.choices[0].ends = []


def with_two_ends(history: History) -> None:
    history.choices[0].ends.append("length")


def ended_otherwise(history: History) -> None:
    history.choices[0].ends = ["stop"]


def after_the_end(history: History) -> None:
    history.choices[0].num_after_end = 1


def unfinished(history: History) -> None:
    history.num_done = 0


def finished_twice(history: History) -> None:
    history.num_done = 2


def miscounted(history: History) -> None:
    history.num_tokens = 8


def with_error(history: History) -> None:
    history.errors.append("the engine is gone")


def without_a_choice(history: History) -> None:
    del history.choices[1]


FAULTS: dict[Callable[[History], None], str] = {
    dropped: "choice 0: position 2: dropped",
    dropped_at_the_end: "choice 0: position 4: dropped",
    doubled: "choice 0: position 2: doubled",
    doubled_at_the_end: "choice 0: position 5: doubled",
    changed: "choice 0: position 2: changed",
    reordered: "choice 0: position 1: reordered",
    in_another_choice: "choice 0: position 4: dropped",
    rescored: "log-probabilities",
    without_end: "ends []",
    with_two_ends: "ends ['length', 'length']",
    ended_otherwise: "ends ['stop']",
    after_the_end: "1 tokens after the end",
    unfinished: "announced 0 times",
    finished_twice: "announced 2 times",
    miscounted: "8 tokens counted, not 9",
    with_error: "error: the engine is gone",
    without_a_choice: "choices [0], not [0, 1]",
}


def test_the_same_history_has_no_problems() -> None:
    assert problems(good(), good()) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_fault_is_found_and_named(fault: Callable[[History], None]) -> None:
    history = deepcopy(good())
    fault(history)
    assert any(FAULTS[fault] in problem for problem in problems(history, good()))


def test_events_of_a_stream_become_a_history() -> None:
    history = History()
    chunk = '{"choices": [{"index": 0, "text": "%s", "logprobs": null, "finish_reason": %s}]}'
    history.add(chunk % ("ab", "null"))
    history.add(chunk % ("c", '"length"'))
    history.add(chunk % ("d", "null"))
    history.add('{"choices": [], "usage": {"completion_tokens": 3}}')
    history.add("[DONE]")
    assert history.choices[0] == ChoiceHistory(list("abcd"), [], ["length"], num_after_end=1)
    assert (history.num_done, history.num_tokens) == (1, 3)
    assert history.longest_gap_s(since=0.0) < 1.0
