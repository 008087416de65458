"""Rows, and what the tests of the ledger's storage share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.observe.ledger.databases import make_store
from headway.observe.ledger.spool import Spool
from headway.observe.ledger.store import TimeRange, Totals
from headway.observe.ledger.usage import Row, row_of
from headway.observe.ledger.writer import LedgerWriter, Retention
from headway.observe.trace.account import RequestAccount

DAY = 1_800_000_000.0
"""2027-01-15 08:00 UTC."""


class Price:
    prompt = 0.1
    cached_prompt = 0.025
    output = 0.3


def make_row(number: int, revision: int = 1, **fields: Any) -> Row:
    known = {
        "id": f"cmpl-{number:x}",
        "state": "finished",
        "arrived_at": DAY,
        "duration_s": 2.0,
        "tenant": "ab"[number % 2],
        "tier": "gold",
        "client_id": f"client-{number}",
        "finish_reason": "stop",
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_billed_prompt_tokens": 10,
        "num_billed_cached_tokens": 4,
        "num_output_tokens": number,
        "queue_s": 0.5,
        "kv_block_s": 3.0,
    }
    return row_of(RequestAccount(**(known | fields)), revision, Price())


def make_writer(url: str, folder: Path, **options: Any) -> LedgerWriter:
    max_bytes = options.pop("max_bytes", 2**20)
    retention = options.pop("retention", Retention())
    return LedgerWriter(make_store(url), Spool(folder, max_bytes), retention, **options)


def totals(url: str, *by: str, span: TimeRange | None = None) -> list[Totals]:
    store = make_store(url, is_reader=True)
    try:
        return store.totals(by, span or TimeRange())
    finally:
        store.close()


def numbers_in(url: str) -> tuple[int, int]:
    """Requests and output tokens in the ledger."""
    (total,) = totals(url)
    return total.requests, total.output_tokens


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not come to be")
        time.sleep(0.02)
