from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InvalidRequestError
from headway.text import StopStrings, TextDelta

LETTERS = st.text(alphabet="ab\n", max_size=12)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def brute_force(text: str, stops: list[str], include: bool) -> TextDelta:
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            stop = max(endings, key=len)
            return TextDelta(text[: end if include else end - len(stop)], stop)
    return TextDelta(text)


def longest_held(text: str, stops: list[str]) -> int:
    return max(
        (n for stop in stops for n in range(len(stop)) if n and text.endswith(stop[:n])), default=0
    )


@given(chunks=st.lists(LETTERS), stops=STOPS, include=st.booleans())
def test_agrees_with_brute_force_however_the_text_is_cut(chunks, stops, include):
    stopper = StopStrings(stops, include)
    sent, stop, fed = "", None, ""
    for chunk in chunks:
        delta = stopper.feed(chunk)
        stopper.check()
        fed += chunk
        sent, stop = sent + delta.text, delta.stop
        if stop is None:
            assert len(fed) - len(sent) == longest_held(fed, stops)
    last = stopper.finish()
    assert TextDelta(sent + last.text, last.stop) == brute_force("".join(chunks), stops, include)
    assert stop == last.stop


@given(text=LETTERS, stops=STOPS)
def test_sent_text_never_holds_a_stop_string(text, stops):
    stopper = StopStrings(stops)
    sent = "".join([stopper.feed(character).text for character in text]) + stopper.finish().text
    assert not any(stop in sent for stop in stops)


def test_match_across_a_border():
    stopper = StopStrings(["</s>"])
    assert stopper.feed("Hello <") == TextDelta("Hello ")
    assert stopper.feed("/s") == TextDelta("")
    assert stopper.feed("> more") == TextDelta("", "</s>")
    assert stopper.feed("more") == TextDelta("", "</s>")
    assert stopper.finish() == TextDelta("", "</s>")


def test_the_match_that_ends_first_wins():
    assert StopStrings(["abcd", "bc"]).feed("xabcd") == TextDelta("xa", "bc")
    assert StopStrings(["bc", "abc"]).feed("xabcd") == TextDelta("x", "abc")


def test_included_stop_string():
    stopper = StopStrings(["END"], include_stop_str_in_output=True)
    assert stopper.feed("xE") == TextDelta("x")
    assert stopper.feed("NDy") == TextDelta("END", "END")


def test_an_empty_stop_string_is_refused():
    with pytest.raises(InvalidRequestError) as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


def test_long_held_text_costs_linear_time():
    def seconds(length: int) -> float:
        stopper = StopStrings(["a" * length + "b"])
        started_at = time.perf_counter()
        for _ in range(2 * length):
            stopper.feed("a")
        return time.perf_counter() - started_at

    # Linear work gives 8, rescanning 64; a busy machine gets three tries.
    assert any(seconds(40_000) < 24 * seconds(5_000) for _ in range(3))
