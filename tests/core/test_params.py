"""SamplingParams: what is refused, what is normalized, and what resolving leaves open (nothing)."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from headway.core.params import MAX_LOGIT_BIASES, MAX_STOP_STRINGS, SamplingParams
from headway.errors import HeadwayError, InvalidRequestError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (0, -1, 129, 1.0, True, "2", None)],
        *[("max_tokens", value) for value in (-1, 1.5, True)],
        *[("min_tokens", value) for value in (-1, 0.5, 17)],
        *[("temperature", value) for value in (-0.1, 100.5, NAN, INF, "1", True, None)],
        *[("top_k", value) for value in (-2, 1.0)],
        *[("top_p", value) for value in (0.0, -0.1, 1.01, NAN)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, NAN)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, NAN)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, INF)],
        *[("logprobs", value) for value in (-1, 21, True)],
        *[("prompt_logprobs", value) for value in (-1, 21, True, 1.0)],
        *[("seed", value) for value in (2**63, -(2**63) - 1, 0.5)],
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: NAN}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 0.0)),
        ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [str(at) for at in range(MAX_STOP_STRINGS + 1)]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1.5]),
    ],
)
def test_a_bad_value_is_refused_and_the_field_is_named(field: str, value: Any):
    with pytest.raises(InvalidRequestError) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.param == field
    assert isinstance(refusal.value, HeadwayError)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", value) for value in (1, 128)],
        *[("max_tokens", value) for value in (None, 0, 1, 10**9)],
        *[("temperature", value) for value in (0, 0.0, 2, 100.0)],
        *[("top_p", value) for value in (1e-9, 1)],
        *[("logprobs", value) for value in (None, 0, 20)],
        *[("seed", value) for value in (None, 2**63 - 1, -(2**63))],
        ("logit_bias", {0: -100, 5: 100.0}),
    ],
)
def test_the_bounds_themselves_are_accepted(field: str, value: Any):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_stops_are_tuples_whatever_they_came_as():
    bare: dict[str, Any] = {"stop": "end"}
    from_json: dict[str, Any] = {"stop": ["a", "b"], "stop_token_ids": [1, 2]}
    assert SamplingParams(**bare).stop == ("end",)
    assert SamplingParams(**from_json).stop == ("a", "b")
    assert SamplingParams(**from_json).stop_token_ids == (1, 2)


def test_the_older_spelling_of_no_top_k_means_no_top_k():
    assert SamplingParams(top_k=-1).top_k == 0


def test_zero_temperature_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=0.01).is_greedy


def test_params_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_resolving_bounds_the_output_by_the_room_left():
    assert SamplingParams(max_tokens=None).resolved((), 7).max_tokens == 7
    assert SamplingParams(max_tokens=9).resolved((), 7).max_tokens == 7
    assert SamplingParams(max_tokens=5).resolved((), 7).max_tokens == 5


def test_resolving_adds_end_of_sequence_once_unless_it_is_ignored():
    params = SamplingParams(stop_token_ids=(2, 5))
    assert params.resolved((2, 3), 7).stop_token_ids == (2, 3, 5)
    ignoring = SamplingParams(stop_token_ids=(5,), ignore_eos=True)
    assert ignoring.resolved((2, 3), 7).stop_token_ids == (5,)


def test_resolving_twice_changes_nothing():
    once = SamplingParams(max_tokens=None, stop_token_ids=(5,)).resolved((2,), 7)
    assert once.resolved((2,), 7) == once
    ignoring = SamplingParams(ignore_eos=True).resolved((2,), 7)
    assert ignoring.resolved((2,), 7) == ignoring


def test_min_tokens_beyond_the_room_left_is_refused():
    with pytest.raises(InvalidRequestError, match=r"min_tokens \(5\).*4 tokens left"):
        SamplingParams(max_tokens=None, min_tokens=5).resolved((), 4)
