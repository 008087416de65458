"""What a request asked for, and its terms, are in its account; what it said is not."""

from __future__ import annotations

import msgspec

from headway.core.events import Admitted, Adopted, Arrived, Event, Finished, Forked
from headway.core.request import FinishReason
from headway.core.terms import Targets, Terms
from headway.observe.ledger.usage import row_of
from headway.observe.trace.account import RequestAccount
from headway.observe.trace.explain import paragraph
from headway.observe.trace.names import part_name, prompt_name
from tests.observe.stories import STOP, Story, tokens
from tests.observe.test_metrics import step

TERMS = Terms(
    tenant="a",
    tier="gold",
    weight=2.5,
    is_spot=True,
    max_kv_share=0.5,
    cache_group="secret-group",
    targets=Targets(0.5, 0.05, 20.0),
    cache_salt="secret-salt",
)


def lives(*ends: Event) -> RequestAccount:
    return Story(
        [Arrived("r-1", 10.0, 20, TERMS, max_tokens=300, n=2, priority=-3)],
        [Admitted("r-1", 10.5, 0.5, 8, 20, False), Forked("r-1#1", 10.5, "r-1"), step(10.5)],
        [tokens("r-1"), tokens("r-1#1"), step(11.0)],
        list(ends),
    ).only


ENDS = Finished("r-1", 12.0, STOP, 1), Finished("r-1#1", 12.0, STOP, 1)


def check(found: RequestAccount) -> None:
    assert (found.max_tokens, found.n, found.priority) == (300, 2, -3)
    assert (found.weight, found.max_kv_share, found.is_spot) == (2.5, 0.5, True)
    assert (found.target_ttft_s, found.target_tpot_s, found.deadline_s) == (0.5, 0.05, 20.0)


def test_a_row_has_what_was_asked_for_and_the_terms() -> None:
    found = lives(*ENDS)
    check(found)
    row = row_of(found, 1, None)
    check(msgspec.json.decode(row.account, type=RequestAccount))
    assert "secret" not in row.account


def test_a_request_that_was_taken_over_has_them_too() -> None:
    adopted = Adopted("r-1", 12.0, 10.0, 20, 7, TERMS, max_tokens=300, n=2, priority=-3)
    check(Story([adopted], [Finished("r-1", 13.0, STOP, 8)]).only)


def test_the_time_of_an_abort_is_known() -> None:
    gone = FinishReason.ABORT
    found = lives(Finished("r-1", 13.5, gone, 1), Finished("r-1#1", 13.5, gone, 1))
    assert (found.finish_reason, found.duration_s) == ("abort", 3.5)


def test_prompts_of_different_room_have_the_largest() -> None:
    found = Story(
        [Arrived("r-1", 0.0, 20, max_tokens=80), Arrived("r-1-1", 0.0, 5, max_tokens=95)],
        [Finished("r-1", 1.0, STOP, 0), Finished("r-1-1", 1.0, STOP, 0)],
    ).only
    assert found.max_tokens == 95


def test_a_row_of_an_older_release_is_read_and_explained() -> None:
    old = b'{"id":"r-1","state":"finished","arrived_at":1000.0,"duration_s":3.0,"tenant":"a",'
    old += b'"num_prompt_tokens":20,"num_output_tokens":3,"finish_reason":"stop"}'
    found = msgspec.json.decode(old, type=RequestAccount)
    assert (found.max_tokens, found.n, found.priority, found.weight) == (0, 1, 0, 1.0)
    assert found.deadline_s is None and not found.is_spot
    assert paragraph(found).endswith("It ended by itself after 3.0 s with 3 output tokens.")


def test_a_part_names_its_prompt() -> None:
    for part, prompt in (
        ("cmpl-1", ""),
        ("cmpl-1#1", ""),
        ("cmpl-1-2", "prompt 3"),
        ("cmpl-1-2#12", "prompt 3"),
    ):
        assert prompt_name(part_name(part)) == prompt
