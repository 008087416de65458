"""A row of the ledger: usage and cost of a request, from its account.

Output tokens are the tokens in the response, as in its `usage` field. Tokens recomputed after a
preemption or in another engine are counted and never billed. Money is an integer in units of 1e-12
of the price unit, so that sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Protocol

import msgspec

from headway.observe.trace.account import RequestAccount

COST_UNITS = 10**12
MILLION = 10**6
MAX_COST_E12 = 2**63 - 1
"""Largest cost that a database column holds; a row beyond would block all later rows."""


class TokenPrice(Protocol):
    """Prices per million tokens."""

    @property
    def prompt(self) -> float: ...

    @property
    def cached_prompt(self) -> float: ...

    @property
    def output(self) -> float: ...


PriceOf = Callable[[str], TokenPrice | None]
"""Returns the price of a tier by name; None if the tier has no price."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request in the ledger; the fields are the columns.

    `revision` grows if a request continues after it was written; the highest revision counts.
    """

    request_id: str
    revision: int
    client_id: str
    tenant: str
    tier: str
    arrived_at: float
    finished_at: float
    day: str
    """UTC day on which the request ended."""
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    recomputed_tokens: int
    speculative_tokens: int
    kv_block_s: float
    queue_s: float
    cost_e12: int
    account: str
    """The account as JSON."""


def row_of(account: RequestAccount, revision: int, price: TokenPrice | None) -> Row:
    """Return the row of a finished request."""
    finished_at = account.arrived_at + account.duration_s
    return Row(
        request_id=account.id,
        revision=revision,
        client_id=account.client_id,
        tenant=account.tenant,
        tier=account.tier,
        arrived_at=account.arrived_at,
        finished_at=finished_at,
        day=datetime.fromtimestamp(finished_at, UTC).strftime("%Y-%m-%d"),
        finish_reason=account.finish_reason,
        prompt_tokens=account.num_prompt_tokens,
        cached_tokens=account.num_cached_tokens,
        output_tokens=account.num_output_tokens,
        recomputed_tokens=account.num_recomputed_tokens,
        speculative_tokens=0,
        kv_block_s=account.kv_block_s,
        queue_s=account.queue_s,
        cost_e12=cost_e12(account, price),
        account=msgspec.json.encode(account).decode(),
    )


def cost_e12(account: RequestAccount, price: TokenPrice | None) -> int:
    """Return the cost: billed prompt tokens, cached tokens at their price, output."""
    return tokens_cost_e12(
        account.num_billed_prompt_tokens,
        account.num_billed_cached_tokens,
        account.num_output_tokens,
        price,
    )


def tokens_cost_e12(
    num_prompt: int, num_cached: int, num_output: int, price: TokenPrice | None
) -> int:
    """Return the cost of billed tokens; the cached ones are part of the prompt."""
    if price is None:
        return 0
    cost = (
        (num_prompt - num_cached) * _exact(price.prompt)
        + num_cached * _exact(price.cached_prompt)
        + num_output * _exact(price.output)
    )
    return min(round(cost * (COST_UNITS // MILLION)), MAX_COST_E12)


def _exact(price: float) -> Decimal:
    # By way of text, so that 0.1 is exactly 0.1.
    return Decimal(str(price))
