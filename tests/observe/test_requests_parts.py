"""Accounts of requests with several parts; who finds them; what is kept of them, and shown."""

from __future__ import annotations

import pytest

from headway.core.events import (
    Admitted,
    Arrived,
    EngineLost,
    Finished,
    Forked,
    Preempted,
    Resent,
)
from headway.core.request import FinishReason
from headway.observe.requests.table import RequestTable
from headway.observe.trace.account import for_tenant
from headway.observe.trace.explain import paragraph, timeline
from headway.observe.trace.names import part_name, prompt_id, split_id
from tests.observe.stories import STOP, A, B, Story, causes, tokens
from tests.observe.test_metrics import step


def test_prompts_and_samples_are_parts_of_one_request() -> None:
    story = Story(
        [Arrived("cmpl-1f", 0.0, 10, A), Arrived("cmpl-1f-1", 0.5, 20, A)],
        [Admitted("cmpl-1f", 1.0, 1.0, 4, 10, False, causes(kv_blocks=1.0), "b")],
        [Forked("cmpl-1f#1", 2.0, "cmpl-1f"), tokens("cmpl-1f"), tokens("cmpl-1f#1"), step(2.0)],
        [Finished("cmpl-1f", 3.0, STOP, 1, kv_block_s=1.0)],
        [Admitted("cmpl-1f-1", 4.0, 3.5, 0, 20, False, causes(kv_blocks=3.5), "a")],
        [tokens("cmpl-1f-1", 3), tokens("cmpl-1f#1"), step(4.5)],
        [Finished("cmpl-1f#1", 5.0, STOP, 2, kv_block_s=2.0)],
    )
    assert story.now("cmpl-1f", 5.0).state == "running"
    story.tell(Finished("cmpl-1f-1", 6.0, FinishReason.LENGTH, 3, kv_block_s=4.0))
    found = story.only
    assert found.num_parts == 3
    assert (found.num_prompt_tokens, found.num_cached_tokens) == (30, 4)
    assert (found.num_output_tokens, found.kv_block_s) == (6, 7.0)
    assert (found.queue_s, found.finish_reason) == (pytest.approx(4.5), "length")
    assert found.causes[0].held_by == "a", "who held it for longest"
    assert {entry.part for entry in found.timeline} == {"", "sample 2", "prompt 2"}
    assert "in all its parts together" in paragraph(found)


def test_a_prompt_that_comes_after_the_others_have_ended_is_added() -> None:
    story = Story(
        [Arrived("cmpl-1f", 0.0, 10), Finished("cmpl-1f", 0.1, STOP, 0)],
        [Arrived("cmpl-1f-1", 0.2, 20), Admitted("cmpl-1f-1", 0.3, 0.1, 0, 20, False)],
        [tokens("cmpl-1f-1"), step(0.5)],
        [Finished("cmpl-1f-1", 1.0, STOP, 1)],
    )
    first, last = story.ended
    assert (first.num_prompt_tokens, last.num_prompt_tokens) == (10, 30)
    request = story.table.find("cmpl-1f", None)
    assert request is not None and request.revision == 2


def test_a_sample_that_found_no_block_when_it_forked() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 10), Admitted("r-1", 0.0, 0.0, 0, 10, False)],
        [Forked("r-1#1", 1.0, "r-1"), tokens("r-1"), step(1.0)],
        [Admitted("r-1#1", 3.0, 2.0, 8, 10, False, causes(kv_blocks=2.0)), tokens("r-1#1")],
        [Finished("r-1", 4.0, STOP, 1), Finished("r-1#1", 4.0, STOP, 1)],
    )
    assert story.only.queue_s == pytest.approx(2.0)
    assert story.only.num_prompt_tokens == 10
    assert story.only.num_cached_tokens == 0, "the prompt was looked up once"


def test_samples_that_go_on_in_another_engine_recompute_their_prompt_each() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 10), Admitted("r-1", 0.0, 0.0, 0, 10, False)],
        [Forked("r-1#1", 1.0, "r-1"), tokens("r-1", 2), tokens("r-1#1", 3), step(1.0)],
        [EngineLost(2.0)],
        [Resent("r-1", 2.5), Resent("r-1#1", 2.5)],
        [Admitted("r-1", 3.0, 3.0, 0, 12, False), Admitted("r-1#1", 3.0, 3.0, 8, 13, False)],
        [Finished("r-1", 4.0, STOP, 2), Finished("r-1#1", 4.0, STOP, 3)],
    )
    assert story.only.num_recomputed_tokens == 11 + (12 - 8)
    assert story.only.num_output_tokens == 5


def test_it_is_found_by_both_ids_and_only_by_its_own_tenant() -> None:
    story = Story([Arrived("r-1", 0.0, 10, A), Arrived("r-2", 0.0, 10, B)])
    assert story.table.set_client_id("r-1", "mine") is None
    assert story.table.set_client_id("r-2", "mine") is None
    find = story.table.find

    def found(name: str, tenant: str | None) -> str | None:
        request = find(name, tenant)
        return None if request is None else request.id

    assert (found("r-1", "a"), found("r-1", "b"), found("r-1", None)) == ("r-1", None, "r-1")
    assert (found("mine", "a"), found("mine", "b")) == ("r-1", "r-2")
    assert found("mine", "") is None and found("mine", "c") is None
    assert found("mine", None) in ("r-1", "r-2")
    # A client may name its request as it likes, also like that of somebody else.
    assert story.table.set_client_id("r-2", "r-1") is None
    assert (found("r-1", "a"), found("r-1", "b"), found("r-1", None)) == ("r-1", "r-2", "r-1")


def test_what_is_kept_of_ended_requests_is_bounded() -> None:
    table = RequestTable(max_recent=3)
    for number in range(10):
        name = f"r-{number}"
        table.consume([Arrived(name, 0.0, 1)])
        table.set_client_id(name, f"client-{number}")
        table.consume([Finished(name, 1.0, STOP, 0)])
        table.check()
    assert len(table) == 0
    assert [table.find(f"client-{number}", None) is not None for number in range(10)] == [
        number >= 7 for number in range(10)
    ]


def test_a_timeline_is_bounded_and_its_sums_are_not_cut() -> None:
    story = Story([Arrived("r-1", 0.0, 10), Admitted("r-1", 0.0, 0.0, 0, 10, False)])
    for number in range(500):
        story.tell(Preempted("r-1", 2.0 * number, "r-2", 5))
        waited = causes(kv_blocks=1.0)
        story.tell(Admitted("r-1", 2.0 * number + 1.0, 1.0, 0, 10, True, waited, num_recomputed=5))
    story.tell(Finished("r-1", 1000.0, STOP, 0))
    found = story.only
    assert len(found.timeline) < 100
    assert len(found.timeline) + found.num_entries_left_out == 1 + 1 + 3 * 500 + 1
    assert (found.queue_s, found.num_preemptions) == (pytest.approx(500.0), 500)
    assert found.num_recomputed_tokens == 2500
    assert "more" in timeline(found)


def test_a_tenant_is_not_told_who_the_others_are() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 10, A), Arrived("r-2", 0.0, 10, B), Arrived("r-3", 0.0, 10, A)],
        [Admitted("r-1", 1.0, 1.0, 0, 10, False, causes(kv_blocks=1.0), "b")],
        [Preempted("r-1", 2.0, "r-2", 10)],
        [Admitted("r-1", 3.0, 1.0, 0, 10, True, causes(kv_blocks=1.0), "b")],
        [Preempted("r-1", 4.0, "r-3", 10)],
        [Admitted("r-1", 5.0, 1.0, 0, 10, True, causes(kv_blocks=1.0), "b")],
        [Finished("r-1", 6.0, STOP, 0)],
    )
    text = paragraph(for_tenant(story.only)) + timeline(for_tenant(story.only))
    assert "tenant b" not in text and "r-2" not in text
    assert "held mostly by another tenant" in text
    assert "by a request of another tenant" in text
    assert "by request r-3 of tenant a" in text


@pytest.mark.parametrize(
    ("name", "parts", "words"),
    [
        ("chatcmpl-0123456789", ("chatcmpl-0123456789", 0, 0), ""),
        ("cmpl-12-3", ("cmpl-12", 3, 0), "prompt 4"),
        ("cmpl-12-3#2", ("cmpl-12", 3, 2), "prompt 4, sample 3"),
        ("cmpl-12#2", ("cmpl-12", 0, 2), "sample 3"),
        ("x", ("x", 0, 0), ""),
    ],
)
def test_names(name: str, parts: tuple[str, int, int], words: str) -> None:
    assert split_id(name) == parts
    assert part_name(name) == words


def test_a_prompt_is_named_so_that_it_is_found_again() -> None:
    for place in range(12):
        assert split_id(prompt_id("cmpl-00ff", place)) == ("cmpl-00ff", place, 0)


def test_a_revision_that_is_given_is_the_least() -> None:
    """A request that runs again after a restart replaces its row of before."""
    story = Story([Arrived("r-1", 0.0, 10, A)])
    assert story.table.set_client_id("r-1", "mine", 1 << 40) is None
    changes = story.table.consume([Finished("r-1", 0.1, STOP, 0)])
    assert [one.revision for one in changes.ended] == [(1 << 40) + 1]
