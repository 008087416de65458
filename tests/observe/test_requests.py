"""Accounts from hand-made events: what is in them, and that their causes add up."""

from __future__ import annotations

import pytest

from headway.core.causes import PreemptionMethod, WaitCause
from headway.core.events import (
    Admitted,
    Arrived,
    EngineLost,
    Event,
    Finished,
    Preempted,
    Resent,
    Routed,
)
from headway.core.request import FinishReason
from headway.observe.trace.account import ENGINE_RESTART, UNRECORDED
from headway.observe.trace.explain import paragraph
from tests.observe.stories import (
    BUSY,
    KV,
    SHARE,
    STOP,
    A,
    B,
    Story,
    causes,
    entries,
    seconds_of,
    tokens,
)
from tests.observe.test_metrics import step


def a_life() -> list[list[Event]]:
    waited = causes(kv_blocks=1.5, tenant_share=0.3)
    return [
        [Arrived("r-1", 10.0, 20, A)],
        [Admitted("r-1", 11.8, 1.8, 8, 20, False, waited, "b"), tokens("r-1"), step(12.0)],
        [tokens("r-1", 2), Finished("r-1", 13.0, STOP, 3, kv_block_s=7.5), step(13.0)],
    ]


def test_a_plain_life() -> None:
    found = Story(*a_life()).only
    assert (found.id, found.tenant, found.tier, found.state) == ("r-1", "a", "gold", "finished")
    assert found.finish_reason == "stop"
    assert found.arrived_at == 1010.0
    assert (found.duration_s, found.first_token_s) == (3.0, 2.0)
    assert found.queue_s == pytest.approx(1.8)
    assert seconds_of(found) == {KV: 1.5, SHARE: 0.3}
    assert [share.held_by for share in found.causes] == ["b", ""]
    assert (found.num_prompt_tokens, found.num_cached_tokens) == (20, 8)
    assert (found.num_output_tokens, found.num_recomputed_tokens) == (3, 0)
    assert found.kv_block_s == 7.5
    assert [(entry.at_s, entry.kind) for entry in found.timeline] == [
        (0.0, "arrived"),
        (0.0, "waited"),
        (pytest.approx(1.8), "admitted"),
        (2.0, "first_token"),
        (3.0, "finished"),
    ]


def test_the_paragraph_of_a_wait_for_blocks_and_for_the_share() -> None:
    text = paragraph(Story(*a_life()).only)
    assert "of tenant a (tier gold)" in text and "20 prompt tokens, 8 of them cached" in text
    assert (
        "It waited 1.8 s: 1.5 s for KV blocks held mostly by tenant b, "
        "0.30 s because its tenant had used its share." in text
    )
    assert text.endswith("It ended by itself after 3.0 s with 3 output tokens.")


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("kv_blocks", "for KV blocks held mostly by tenant b"),
        ("running_limit", "for room in the running set, taken mostly by tenant b"),
        ("tenant_share", "because its tenant had used its share"),
        ("tier_order", "because requests of a higher tier went first"),
        ("deadline_order", "because requests with less time left went first"),
        ("token_budget", "because the token budget of each step was used up"),
        ("prefill_cap", "because of the cap on prompt tokens in a step"),
        ("executor_busy", "while the previous step was running"),
    ],
)
def test_every_cause_has_its_words(cause: str, words: str) -> None:
    waited = causes(**{cause: 2.0})
    story = Story(
        [Arrived("r-1", 0.0, 5, A), Admitted("r-1", 2.0, 2.0, 0, 5, False, waited, "b")],
        [Finished("r-1", 3.0, STOP, 0)],
    )
    assert f"It waited 2.0 s: 2.0 s {words}." in paragraph(story.only)


def test_every_cause_of_the_core_is_known_here() -> None:
    for cause in WaitCause:
        story = Story(
            [
                Arrived("r-1", 0.0, 5),
                Admitted("r-1", 1.0, 1.0, 0, 5, False, causes(**{cause: 1.0})),
            ],
            [Finished("r-1", 1.0, STOP, 0)],
        )
        assert f"1.0 s {cause}" not in paragraph(story.only)


def test_time_in_the_router_has_a_cause_of_its_own() -> None:
    waited = causes(executor_busy=1.6, kv_blocks=0.4)  # the engine counts from the arrival
    story = Story(
        [Arrived("r-1", 0.0, 5, A)],
        [Routed("r-1", 1.5, "tcp://e", "prefix", 1.5, 0)],
        [Admitted("r-1", 2.0, 2.0, 0, 5, False, waited, "b")],
        [Finished("r-1", 3.0, STOP, 0)],
    )
    assert seconds_of(story.only) == {"router": 1.5, "executor_busy": 0.1, "kv_blocks": 0.4}
    assert "1.5 s in the router, until an engine could begin it" in paragraph(story.only)


def test_a_preemption_and_what_it_cost() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 100, A), Arrived("r-2", 0.0, 4, B)],
        [Admitted("r-1", 0.0, 0.0, 0, 100, False), tokens("r-1", 11), step(1.0)],
        [Preempted("r-1", 2.0, "r-2", 110, PreemptionMethod.RECOMPUTE, KV)],
    )
    assert story.now("r-1", 2.5).state == "waiting"
    assert "did not run again" in paragraph(story.now("r-1", 2.5))
    waited = causes(kv_blocks=0.4)
    story.tell(Admitted("r-1", 2.4, 0.4, 48, 111, True, waited, "b", num_recomputed=62))
    story.tell(tokens("r-1"), Finished("r-1", 3.0, STOP, 12), step(3.0))
    found = story.only
    assert found.num_recomputed_tokens == 62
    assert (found.num_output_tokens, found.num_cached_tokens) == (12, 0)
    (preempted,) = entries(found, "preempted")
    assert (preempted.by, preempted.by_tenant, preempted.num_tokens) == ("r-2", "b", 110)
    assert preempted.seconds == pytest.approx(0.4)
    assert found.queue_s == pytest.approx(0.4)
    text = paragraph(found)
    assert (
        "It was preempted after 2.0 s by request r-2 of tenant b, which needed KV blocks; all 110 "
        "computed tokens were dropped, and it resumed 0.40 s later." in text
    )
    assert "62 tokens had to be computed again, which is not billed." in text


def test_an_engine_lost_after_a_preemption_counts_what_is_computed_again_once() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 100), Admitted("r-1", 0.0, 0.0, 0, 100, False), tokens("r-1", 11)],
        [Preempted("r-1", 2.0, "r-2", 110)],
        [EngineLost(3.0)],
        [Resent("r-1", 4.0), Admitted("r-1", 4.0, 4.0, 16, 111, False)],
        [Finished("r-1", 5.0, STOP, 11)],
    )
    assert story.only.num_recomputed_tokens == 110 - 16


def test_admitted_and_preempted_in_one_batch() -> None:
    """A batch has its preemptions before its admissions."""
    story = Story(
        [Arrived("r-1", 0.0, 10)],
        [Preempted("r-1", 1.0, "r-2", 0), Admitted("r-1", 1.0, 1.0, 0, 10, False), step(1.5)],
    )
    assert story.now("r-1", 2.0).state == "waiting"
    story.tell(Admitted("r-1", 3.0, 2.0, 0, 10, True), tokens("r-1"), step(3.5))
    assert story.now("r-1", 3.6).state == "running"
    story.tell(Finished("r-1", 4.0, STOP, 1))
    assert story.only.queue_s == pytest.approx(3.0)
    assert [entry.seconds for entry in entries(story.only, "preempted")] == [pytest.approx(2.0)]


def test_what_nobody_accounts_for_is_said_to_be_so() -> None:
    story = Story(
        [
            Arrived("r-1", 0.0, 10),
            Admitted("r-1", 2.0, 2.0, 0, 10, False, causes(kv_blocks=0.5)),
            Finished("r-1", 2.0, STOP, 0),
        ]
    )
    assert seconds_of(story.only) == {UNRECORDED: 1.5, KV: 0.5}


def test_an_engine_is_lost_under_a_running_request() -> None:
    """The next engine counts the wait from the arrival; what is not its own is not believed."""
    story = Story(
        [Arrived("r-1", 0.0, 100, A), Admitted("r-1", 1.0, 1.0, 0, 100, False)],
        [tokens("r-1", 5), step(2.0)],
        [EngineLost(3.0)],
    )
    assert story.now("r-1", 3.5).state == "waiting"
    reported = causes(executor_busy=4.1, kv_blocks=0.4)
    story.tell(Resent("r-1", 4.0))
    story.tell(Admitted("r-1", 4.5, 4.5, 32, 105, False, reported), tokens("r-1"), step(5.0))
    story.tell(Finished("r-1", 6.0, STOP, 6))
    found = story.only
    assert seconds_of(found) == {ENGINE_RESTART: 1.0, UNRECORDED: 1.0, KV: 0.4, BUSY: 0.1}
    assert found.num_engines_lost == 1
    assert found.num_recomputed_tokens == 104 - 32
    assert found.num_output_tokens == 6
    assert found.num_cached_tokens == 0, "of the first admission, as the answer's usage says"
    (lost,) = entries(found, "engine_lost")
    assert lost.seconds == pytest.approx(1.5)
    text = paragraph(found)
    assert "1.0 s for a new engine after one failed" in text
    assert "After 3.0 s the engine failed under it, and it went on 1.5 s later." in text


def test_an_engine_is_lost_under_a_waiting_request() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 100)],
        [EngineLost(2.0)],
        [Resent("r-1", 2.5)],
        [EngineLost(3.0)],
        [Resent("r-1", 4.0)],
        [Admitted("r-1", 5.0, 5.0, 0, 100, False, causes(kv_blocks=5.0))],
        [tokens("r-1"), step(5.5)],
        [Finished("r-1", 6.0, STOP, 1)],
    )
    found = story.only
    assert seconds_of(found) == {UNRECORDED: 2.5, ENGINE_RESTART: 1.5, KV: 1.0}
    assert found.queue_s == pytest.approx(5.0)
    assert (found.num_engines_lost, found.num_recomputed_tokens) == (2, 0)


def test_a_request_that_came_while_there_was_no_engine() -> None:
    story = Story(
        [EngineLost(0.5)],
        [Arrived("r-1", 1.0, 10)],
        [Resent("r-1", 3.0)],
        [Admitted("r-1", 3.25, 2.25, 0, 10, False, causes(executor_busy=2.25))],
        [Finished("r-1", 4.0, STOP, 0)],
    )
    assert seconds_of(story.only) == {ENGINE_RESTART: 2.0, BUSY: 0.25}
    assert story.only.num_engines_lost == 0


def test_one_that_ends_while_there_is_no_engine() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 10), Admitted("r-1", 0.0, 0.0, 0, 10, False)],
        [tokens("r-1", 4), step(0.5)],
        [EngineLost(1.0)],
        [Finished("r-1", 3.0, FinishReason.ABORT, 4)],
    )
    assert seconds_of(story.only) == {ENGINE_RESTART: 2.0}
    assert (story.only.num_output_tokens, story.only.num_recomputed_tokens) == (4, 0)
    text = paragraph(story.only)
    assert text.endswith("Its client disconnected after 3.0 s with 4 output tokens.")


def test_one_that_ends_while_it_waits() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 10)],
        [Finished("r-1", 3.0, FinishReason.TIMEOUT, 0, causes=causes(tier_order=3.0))],
    )
    found = story.only
    assert seconds_of(found) == {WaitCause.TIER_ORDER: 3.0}
    assert found.first_token_s is None
    assert "refused after waiting after 3.0 s with 0 output tokens" in paragraph(found)
