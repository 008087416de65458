"""Rows from accounts: what is billed, and what is not."""

from __future__ import annotations

from decimal import Decimal

import msgspec
import pytest

from headway.cli.observe.usage import cost_of
from headway.core.events import Admitted, Arrived, EngineLost, Event, Finished, Resent
from headway.core.request import FinishReason
from headway.observe.ledger.usage import MAX_COST_E12, cost_e12, row_of
from headway.observe.trace.account import RequestAccount
from headway.tenancy import values
from tests.observe.stories import A, Story, tokens
from tests.observe.test_metrics import step
from tests.support.rows import DAY, Price, make_row, totals

ABORT, ERROR = FinishReason.ABORT, FinishReason.ERROR


def test_a_row_has_what_the_account_has() -> None:
    row = make_row(7)
    assert (row.request_id, row.tenant, row.tier, row.client_id) == (
        "cmpl-7", "b", "gold", "client-7",
    )  # fmt: skip
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 4, 7)
    assert (row.queue_s, row.kv_block_s, row.speculative_tokens) == (0.5, 3.0, 0)
    assert (row.arrived_at, row.finished_at, row.day) == (DAY, DAY + 2.0, "2027-01-15")
    assert msgspec.json.decode(row.account, type=RequestAccount).num_output_tokens == 7


def test_a_request_counts_on_the_day_it_ended() -> None:
    midnight = 1_800_057_600.0
    assert make_row(1, arrived_at=midnight - 1.0, duration_s=2.0).day == "2027-01-16"


def test_costs_are_exact() -> None:
    assert make_row(1_000_000).cost_e12 == 6 * 100_000 + 4 * 25_000 + 300_000_000_000
    many = [make_row(number, num_output_tokens=1) for number in range(1000)]
    assert sum(row.cost_e12 for row in many) == 1000 * (600_000 + 100_000 + 300_000)
    assert (
        row_of(msgspec.json.decode(make_row(3).account, type=RequestAccount), 1, None).cost_e12 == 0
    )


def test_a_cost_that_no_database_holds_is_the_most_it_does() -> None:
    price = values.Price(1e9, 1e9, 1e9)
    account = msgspec.json.decode(make_row(10_000).account, type=RequestAccount)
    assert cost_e12(account, price) == MAX_COST_E12


def billed(*batches: list[Event]) -> Decimal:
    return Decimal(cost_e12(Story(*batches).only, Price())).scaleb(-6)


def test_what_was_recomputed_is_not_billed() -> None:
    """The same answer costs the same, whatever happened to the engine."""
    smooth = billed(
        [Arrived("r-1", 0.0, 100, A), Admitted("r-1", 0.0, 0.0, 20, 100, False)],
        [tokens("r-1", 10), step(1.0), Finished("r-1", 2.0, FinishReason.STOP, 10)],
    )
    rough = billed(
        [Arrived("r-1", 0.0, 100, A), Admitted("r-1", 0.0, 0.0, 20, 100, False)],
        [tokens("r-1", 4), step(1.0)],
        [EngineLost(1.0)],
        [Resent("r-1", 2.0), Admitted("r-1", 2.0, 2.0, 96, 104, False)],
        [tokens("r-1", 6), step(3.0), Finished("r-1", 4.0, FinishReason.STOP, 10)],
    )
    assert smooth == rough == Decimal("8") + Decimal("0.5") + Decimal("3")


@pytest.mark.parametrize(
    ("is_admitted", "num_output", "end", "cost"),
    [
        (False, 0, ABORT, "0"),
        (True, 0, ABORT, "10"),
        (True, 0, ERROR, "0"),
        (True, 2, ERROR, "10.6"),
        (False, 0, FinishReason.TIMEOUT, "0"),
    ],
)
def test_what_is_billed_of_a_request_that_was_cut_short(
    is_admitted: bool, num_output: int, end: FinishReason, cost: str
) -> None:
    batches: list[list[Event]] = [[Arrived("r-1", 0.0, 100, A)]]
    if is_admitted:
        batches.append([Admitted("r-1", 0.0, 0.0, 0, 100, False)])
    if num_output:
        batches.append([tokens("r-1", num_output), step(1.0)])
    assert billed(*batches, [Finished("r-1", 2.0, end, num_output)]) == Decimal(cost)


def test_totals_are_shown_to_the_last_digit(sqlite_url: str) -> None:
    from headway.observe.ledger.databases import make_store

    store = make_store(sqlite_url)
    store.write([make_row(number, num_output_tokens=1) for number in range(3)])
    store.close()
    (total,) = totals(sqlite_url)
    assert cost_of(total) == "0.000003"
