"""Hand-made events, and the accounts that come of them."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.causes import CauseTime, WaitCause
from headway.core.events import (
    Event,
    TokensEmitted,
)
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.observe.requests.table import RequestTable, account
from headway.observe.trace.account import Entry, RequestAccount

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
        self.table = RequestTable()
        self.ended: list[RequestAccount] = []
        for batch in batches:
            self.tell(*batch)

    def tell(self, *events: Event) -> None:
        for request in self.table.consume(events).ended:
            self.ended.append(account(request, 1e9, 1000.0))
        self.table.check()

    def now(self, name: str, at: float) -> RequestAccount:
        request = self.table.find(name, None)
        assert request is not None
        return account(request, at, 1000.0)

    @property
    def only(self) -> RequestAccount:
        (found,) = self.ended
        assert sum(share.seconds for share in found.causes) == pytest.approx(found.queue_s)
        return found


def seconds_of(found: RequestAccount) -> dict[str, Any]:
    return {share.cause: pytest.approx(share.seconds) for share in found.causes}


def entries(found: RequestAccount, kind: str) -> list[Entry]:
    return [entry for entry in found.timeline if entry.kind == kind]
