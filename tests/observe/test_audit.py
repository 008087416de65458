"""Accounts from hand-made events: what is in them, and that their causes add up."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.causes import CauseTime, PreemptionMethod, WaitCause
from headway.core.events import (
    Admitted,
    Arrived,
    EngineLost,
    Event,
    Finished,
    Forked,
    Preempted,
    Resent,
    TokensEmitted,
)
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.observe.account import ENGINE_RESTART, UNRECORDED, Account, Entry, for_tenant
from headway.observe.audit import Audit, account
from headway.observe.explain import paragraph, timeline
from headway.observe.names import part_name, prompt_id, split_id
from tests.observe.test_metrics import step

A, B = Terms(tenant="a", tier="gold"), Terms(tenant="b", tier="free")
KV, SHARE, BUSY = WaitCause.KV_BLOCKS, WaitCause.TENANT_SHARE, WaitCause.EXECUTOR_BUSY
STOP = FinishReason.STOP


def causes(**seconds: float) -> tuple[CauseTime, ...]:
    return tuple(CauseTime(WaitCause(name), value) for name, value in seconds.items())


def tokens(name: str, number: int = 1) -> TokensEmitted:
    return TokensEmitted(name, tuple(range(number)), None)


class Story:
    """Feeds batches of events and gives the accounts that come of them."""

    def __init__(self, *batches: list[Event]) -> None:
        self.audit = Audit()
        self.ended: list[Account] = []
        for batch in batches:
            self.tell(*batch)

    def tell(self, *events: Event) -> None:
        for request in self.audit.consume(events):
            self.ended.append(account(request, 1e9, 1000.0))
        self.audit.check()

    def now(self, name: str, at: float) -> Account:
        request = self.audit.find(name, None)
        assert request is not None
        return account(request, at, 1000.0)

    @property
    def only(self) -> Account:
        (found,) = self.ended
        assert sum(share.seconds for share in found.causes) == pytest.approx(found.queue_s)
        return found


def seconds_of(found: Account) -> dict[str, Any]:
    return {share.cause: pytest.approx(share.seconds) for share in found.causes}


def entries(found: Account, kind: str) -> list[Entry]:
    return [entry for entry in found.timeline if entry.kind == kind]


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
        ("running_limit", "for a seat, most of them taken by tenant b"),
        ("tenant_share", "because its tenant had used its share"),
        ("tier_order", "because requests of a higher tier went first"),
        ("deadline_order", "because requests with less time left went first"),
        ("token_budget", "because the tokens of each step were taken"),
        ("prefill_cap", "because of the cap on prompt tokens in a step"),
        ("executor_busy", "while the step before was still running"),
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


def test_a_preemption_and_what_it_cost() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 100, A), Arrived("r-2", 0.0, 4, B)],
        [Admitted("r-1", 0.0, 0.0, 0, 100, False), tokens("r-1", 11), step(1.0)],
        [Preempted("r-1", 2.0, "r-2", 110, PreemptionMethod.RECOMPUTE, KV)],
    )
    assert story.now("r-1", 2.5).state == "waiting"
    assert "did not run again" in paragraph(story.now("r-1", 2.5))
    waited = causes(kv_blocks=0.4)
    story.tell(Admitted("r-1", 2.4, 0.4, 48, 111, True, waited, "b"))
    story.tell(tokens("r-1"), Finished("r-1", 3.0, STOP, 12), step(3.0))
    found = story.only
    assert found.num_recomputed_tokens == 110 - 48
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


def test_trimmed_tokens_are_recomputed_only_as_far_as_they_are_missing() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 100), Admitted("r-1", 0.0, 0.0, 0, 100, False), tokens("r-1", 11)],
        [Preempted("r-1", 2.0, "r-2", 30, PreemptionMethod.TRIM)],
        [Admitted("r-1", 2.4, 0.4, 80, 111, True), Finished("r-1", 3.0, STOP, 11)],
    )
    assert story.only.num_recomputed_tokens == 30


def test_what_was_checkpointed_is_not_recomputed() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 100), Admitted("r-1", 0.0, 0.0, 0, 100, False), tokens("r-1", 11)],
        [Preempted("r-1", 2.0, "r-2", 110, PreemptionMethod.CHECKPOINT)],
        [Admitted("r-1", 2.4, 0.4, 110, 111, True), Finished("r-1", 3.0, STOP, 11)],
    )
    assert story.only.num_recomputed_tokens == 0


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
    told = causes(executor_busy=4.1, kv_blocks=0.4)
    story.tell(Resent("r-1", 4.0))
    story.tell(Admitted("r-1", 4.5, 4.5, 32, 105, False, told), tokens("r-1"), step(5.0))
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
    assert paragraph(story.only).endswith("Its client left after 3.0 s with 4 output tokens.")


def test_one_that_ends_while_it_waits() -> None:
    story = Story(
        [Arrived("r-1", 0.0, 10)],
        [Finished("r-1", 3.0, FinishReason.TIMEOUT, 0, causes=causes(tier_order=3.0))],
    )
    found = story.only
    assert seconds_of(found) == {WaitCause.TIER_ORDER: 3.0}
    assert found.first_token_s is None
    assert "refused after all after 3.0 s with 0 output tokens" in paragraph(found)


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
    request = story.audit.find("cmpl-1f", None)
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
    assert story.audit.name("r-1", "mine") is None
    assert story.audit.name("r-2", "mine") is None
    find = story.audit.find

    def found(name: str, tenant: str | None) -> str | None:
        request = find(name, tenant)
        return None if request is None else request.id

    assert (found("r-1", "a"), found("r-1", "b"), found("r-1", None)) == ("r-1", None, "r-1")
    assert (found("mine", "a"), found("mine", "b")) == ("r-1", "r-2")
    assert found("mine", "") is None and found("mine", "c") is None
    assert found("mine", None) in ("r-1", "r-2")
    # A client may name its request as it likes, also like that of somebody else.
    assert story.audit.name("r-2", "r-1") is None
    assert (found("r-1", "a"), found("r-1", "b"), found("r-1", None)) == ("r-1", "r-2", "r-1")


def test_what_is_kept_of_ended_requests_is_bounded() -> None:
    audit = Audit(max_recent=3)
    for number in range(10):
        name = f"r-{number}"
        audit.consume([Arrived(name, 0.0, 1)])
        audit.name(name, f"client-{number}")
        audit.consume([Finished(name, 1.0, STOP, 0)])
        audit.check()
    assert len(audit) == 0
    assert [audit.find(f"client-{number}", None) is not None for number in range(10)] == [
        number >= 7 for number in range(10)
    ]


def test_a_timeline_is_bounded_and_its_sums_are_not_cut() -> None:
    story = Story([Arrived("r-1", 0.0, 10), Admitted("r-1", 0.0, 0.0, 0, 10, False)])
    for number in range(500):
        story.tell(Preempted("r-1", 2.0 * number, "r-2", 5))
        waited = causes(kv_blocks=1.0)
        story.tell(Admitted("r-1", 2.0 * number + 1.0, 1.0, 0, 10, True, waited))
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
