"""A request that moves between frontends: one account, one row, each token billed once."""

from __future__ import annotations

import pytest

from headway.core.events import Admitted, Adopted, Arrived, EngineLost, Event, Finished, Resent
from headway.core.request import FinishReason
from headway.observe.ledger.databases import make_store
from headway.observe.ledger.usage import Row, row_of
from headway.observe.requests.table import RequestTable, account
from tests.observe.stories import STOP, A, Story, entries, tokens
from tests.observe.test_metrics import step
from tests.support.rows import Price, numbers_in

BEFORE: list[list[Event]] = [
    [Arrived("r-1", 10.0, 20, A)],
    [Admitted("r-1", 11.0, 1.0, 8, 20, False), tokens("r-1", 5), step(12.0)],
]
ADOPTED = Adopted("r-1", 112.0, 110.0, 20, 7, A, num_cached_tokens=8, attempt=1)
AFTER: list[list[Event]] = [
    [ADOPTED],
    [tokens("r-1", 3), Finished("r-1", 113.0, STOP, 10, kv_block_s=7.5), step(113.0)],
]


def rows_of(batches: list[list[Event]]) -> list[Row]:
    table, price = RequestTable(), Price()
    ended = [one for batch in batches for one in table.consume(batch).ended]
    return [row_of(account(one, 1e9, 1000.0), one.revision, price) for one in ended]


@pytest.mark.parametrize("is_first_late", [False, True])
def test_each_token_is_billed_once_by_whichever_frontend_writes_last(
    any_url: str, is_first_late: bool
) -> None:
    """A frontend that lives has ended its part; one that was killed wrote nothing."""
    ended = [[Finished("r-1", 12.5, FinishReason.ABORT, 5), step(12.5)]]
    first, second = rows_of(BEFORE + ended), rows_of(AFTER)
    assert [one.output_tokens for one in (*first, *second)] == [5, 10]
    assert not rows_of(BEFORE)
    store = make_store(any_url)
    for rows in (second, first) if is_first_late else (first, second):
        store.write(rows)
    assert numbers_in(any_url) == (1, 10)
    found = store.find("r-1", "a")
    assert found is not None and found.finish_reason == "stop"
    assert (found.num_billed_prompt_tokens, found.num_billed_cached_tokens) == (20, 8)
    store.close()


def test_the_row_of_an_adopted_request_is_that_of_an_undisturbed_one() -> None:
    whole: list[list[Event]] = [
        *BEFORE,
        [tokens("r-1", 5), Finished("r-1", 13.0, STOP, 10, kv_block_s=7.5), step(13.0)],
    ]
    (expected,), (found,) = rows_of(whole), rows_of(AFTER)
    for name in ("prompt_tokens", "cached_tokens", "output_tokens", "cost_e12", "kv_block_s"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.recomputed_tokens == 0


def test_a_frontend_that_takes_its_request_back_writes_the_last_row() -> None:
    back = Adopted("r-1", 14.0, 10.0, 20, 9, A, num_cached_tokens=8, attempt=2)
    ended = [Finished("r-1", 12.5, FinishReason.ABORT, 5), step(12.5)]
    end = [tokens("r-1"), Finished("r-1", 15.0, STOP, 10), step(15.0)]
    first, last = rows_of([*BEFORE, ended, [back], end])
    assert (first.revision, last.revision) == (1, 3)
    assert last.output_tokens == 10


def test_the_timeline_says_where_it_came_from() -> None:
    found = Story(*AFTER).only
    (entry,) = entries(found, "adopted")
    assert (entry.num_tokens, found.num_output_tokens) == (7, 10)
    assert found.duration_s == 3.0 and found.first_token_s is None


def test_samples_that_had_ended_before_are_counted_too() -> None:
    fork = Adopted("r-1#1", 112.0, 110.0, 20, 4, A, num_cached_tokens=8, attempt=1, is_fork=True)
    story = Story(
        [ADOPTED, fork, Finished("r-1", 112.0, FinishReason.LENGTH, 7)],
        [tokens("r-1#1"), Finished("r-1#1", 113.0, STOP, 5), step(113.0)],
    )
    found = story.only
    assert found.num_output_tokens == 12 and found.num_billed_prompt_tokens == 20
    assert found.num_parts == 2


def test_a_request_whose_engine_is_gone_waits_for_another() -> None:
    story = Story(
        [ADOPTED, EngineLost(112.0, ("r-1",))],
        [Resent("r-1", 112.5)],
        [Admitted("r-1", 113.0, 0.5, 16, 27, False), tokens("r-1", 3), step(113.5)],
        [Finished("r-1", 114.0, STOP, 10), step(114.0)],
    )
    found = story.only
    assert found.num_engines_lost == 1
    assert found.queue_s == pytest.approx(1.0)
    assert found.num_recomputed_tokens == 20 + 7 - 1 - 16
