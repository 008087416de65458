"""Accounts cut into pieces: no gap, no overlap, and the sums are those of the account."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from headway.core.causes import PreemptionMethod
from headway.core.events import (
    Admitted,
    Adopted,
    Arrived,
    EngineLost,
    Event,
    Finished,
    Forked,
    Preempted,
    Resent,
)
from headway.core.request import FinishReason
from headway.observe.requests.parts import MAX_ENTRIES
from headway.observe.trace.account import RequestAccount
from headway.observe.trace.pieces import Piece, pieces_of
from tests.observe.stories import KV, STOP, A, B, Story, causes, tokens
from tests.observe.test_metrics import step
from tests.observe.test_requests import a_life


def by_kind(found: RequestAccount) -> list[tuple[str, str, float, float]]:
    return [(one.part, one.kind, one.start_s, one.end_s) for one in checked(found)]


def checked(found: RequestAccount) -> list[Piece]:
    """The pieces, after the checks that hold for every account."""
    pieces = pieces_of(found)
    waited = [one for one in pieces if one.kind == "queue"]
    open_s = sum(one.seconds or 0.0 for one in found.timeline if one.kind == "waiting")
    if not found.num_entries_left_out:
        waited_s = sum(one.end_s - one.start_s for one in waited)
        assert waited_s == pytest.approx(found.queue_s + open_s)
    for part in {one.part for one in pieces}:
        own = [one for one in pieces if one.part == part]
        for before, after in pairwise(own):
            assert after.start_s == pytest.approx(before.end_s), "no gap and no overlap"
        if found.num_parts == 1:
            assert (own[0].start_s, own[-1].end_s) == (0.0, pytest.approx(found.duration_s))
    return pieces


def test_a_plain_life() -> None:
    assert by_kind(Story(*a_life()).only) == [
        ("", "queue", 0.0, pytest.approx(1.8)),
        ("", "prefill", pytest.approx(1.8), 2.0),
        ("", "decode", 2.0, 3.0),
    ]


def preempted_life() -> Story:
    return Story(
        [Arrived("r-1", 0.0, 100, A), Arrived("r-2", 0.0, 4, B)],
        [Admitted("r-1", 0.0, 0.0, 0, 100, False), tokens("r-1", 11), step(1.0)],
        [Preempted("r-1", 2.0, "r-2", 110, PreemptionMethod.RECOMPUTE, KV)],
    )


def test_a_preemption_splits_the_decode_and_names_the_wait() -> None:
    story = preempted_life()
    assert by_kind(story.now("r-1", 2.25))[-1] == ("", "queue", 2.0, 2.25)
    story.tell(Admitted("r-1", 2.5, 0.5, 48, 111, True, causes(kv_blocks=0.5), "b"))
    story.tell(tokens("r-1"), Finished("r-1", 3.0, STOP, 12), step(3.0))
    pieces = checked(story.only)
    assert [one.kind for one in pieces] == ["prefill", "decode", "queue", "decode"]
    begun = pieces[2].interruption
    assert begun is not None
    assert (begun.kind, begun.by, begun.num_tokens) == ("preempted", "r-2", 110)
    assert [one.interruption for one in pieces if one.kind != "queue"] == [None] * 3


def test_an_engine_that_fails_under_a_waiting_request_is_no_new_wait() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 5, A)],
        [EngineLost(1.0)],
        [Resent("r-1", 2.0)],
        [Admitted("r-1", 3.0, 1.0, 0, 5, False, causes(kv_blocks=1.0))],
        [tokens("r-1"), step(3.5)],
        [EngineLost(4.0)],
        [Resent("r-1", 4.5)],
        [Admitted("r-1", 5.0, 0.5, 0, 6, True, causes(kv_blocks=0.5))],
        [tokens("r-1"), Finished("r-1", 6.0, STOP, 2), step(6.0)],
    )
    pieces = checked(story.only)
    waits = [one for one in pieces if one.kind == "queue"]
    assert [(one.start_s, one.end_s) for one in waits] == [(0.0, 3.0), (4.0, 5.0)]
    first, second = (one.interruption for one in waits)
    assert first is None
    assert second is not None and second.kind == "engine_lost"


def test_samples_have_pieces_of_their_own() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 5, A), Admitted("r-1", 1.0, 1.0, 0, 5, False, causes(kv_blocks=1.0))],
        [Forked("r-1#1", 2.0, "r-1"), tokens("r-1"), tokens("r-1#1"), step(2.0)],
        [Preempted("r-1#1", 3.0, "r-9", 6)],
        [Admitted("r-1#1", 4.0, 1.0, 0, 6, True, causes(kv_blocks=1.0))],
        [Finished("r-1", 5.0, STOP, 3), tokens("r-1#1"), Finished("r-1#1", 6.0, STOP, 3)],
    )
    assert by_kind(story.only) == [
        ("", "queue", 0.0, 1.0),
        ("", "prefill", 1.0, 2.0),
        ("", "decode", 2.0, 5.0),
        ("sample 2", "decode", 2.0, 3.0),
        ("sample 2", "queue", 3.0, 4.0),
        ("sample 2", "decode", 4.0, 6.0),
    ]


def test_a_request_of_another_frontend_was_elsewhere() -> None:
    story = Story(
        [Adopted("r-1", 112.0, 110.0, 20, 7, A, num_cached_tokens=8, attempt=1)],
        [tokens("r-1", 3), Finished("r-1", 113.0, STOP, 10), step(113.0)],
    )
    assert by_kind(story.only) == [("", "elsewhere", 0.0, 2.0), ("", "decode", 2.0, 3.0)]


def test_a_request_that_ends_in_the_queue_only_waited() -> None:
    ended = Finished("r-1", 2.0, FinishReason.ABORT, 0, causes=causes(tenant_share=2.0))
    story = Story([Arrived("r-1", 0.0, 5, A)], [ended])
    assert by_kind(story.only) == [("", "queue", 0.0, 2.0)]


def test_a_live_request_is_cut_up_to_now() -> None:
    story = Story([Arrived("r-1", 0.0, 5, A)])
    assert by_kind(story.now("r-1", 4.0)) == [("", "queue", 0.0, 4.0)]
    story.tell(Admitted("r-1", 5.0, 5.0, 0, 5, False, causes(kv_blocks=5.0)))
    assert by_kind(story.now("r-1", 6.0))[-1] == ("", "prefill", 5.0, 6.0)


def test_what_a_long_timeline_left_out_is_said() -> None:
    batches: list[list[Event]] = [
        [Arrived("r-1", 0.0, 5, A), Admitted("r-1", 0.0, 0.0, 0, 5, False)],
        [tokens("r-1"), step(0.5)],
    ]
    for number in range(1, MAX_ENTRIES):
        batches.append([Preempted("r-1", float(number), "r-2", 1)])
        waited = causes(kv_blocks=0.5)
        batches.append([Admitted("r-1", number + 0.5, 0.5, 0, 6, True, waited)])
    story = Story(*batches, [Finished("r-1", 200.0, STOP, 9)])
    assert story.only.num_entries_left_out
    pieces = checked(story.only)
    assert pieces[-1].kind == "left_out"
    assert "left_out" not in {one.kind for one in pieces[:-1]}


def test_random_lives_add_up() -> None:
    draw = random.Random(5)
    for _ in range(100):
        at = 0.0
        batches: list[list[Event]] = [[Arrived("r-1", at, 9, A)]]
        for turn in range(draw.randint(1, 6)):
            waited_s = draw.random()
            shares = causes(kv_blocks=0.7 * waited_s, tenant_share=0.3 * waited_s)
            at += waited_s
            batches.append([Admitted("r-1", at, waited_s, 0, 9, turn > 0, shares)])
            at += draw.random()
            batches.append([tokens("r-1"), step(at)])
            at += draw.random()
            batches.append([Preempted("r-1", at, "r-2", 3)])
        ended = Finished("r-1", at + 0.5, FinishReason.ABORT, 3, causes=causes(kv_blocks=0.5))
        found = Story(*batches, [ended]).only
        total = sum(one.end_s - one.start_s for one in checked(found))
        assert total == pytest.approx(found.duration_s)
