"""The sums of the waiting line are those of what is in it, whatever came and went."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from headway.core.terms import Terms
from headway.engine.client.waiting_streams import QueueTotals, WaitingStreams

TENANTS = ("", "alice", "bob")


def stream(name: str, rng: random.Random) -> Any:
    command = SimpleNamespace(
        token_ids=[1] * rng.randint(1, 9), terms=Terms(tenant=rng.choice(TENANTS))
    )
    return SimpleNamespace(request_id=name, command=command)


def sums_of(streams: list[Any]) -> QueueTotals:
    return QueueTotals(len(streams), sum(len(one.command.token_ids) for one in streams))


def test_the_sums_are_right_at_all_times() -> None:
    rng, line, inside = random.Random(3), WaitingStreams(), list[Any]()
    for number in range(2000):
        if inside and rng.random() < 0.55:
            gone = inside.pop(rng.randrange(len(inside)))
            assert line.pop(gone.request_id) is gone
            assert line.pop(gone.request_id) is None
        else:
            inside.append(stream(str(number), rng))
            line.add(inside[-1])
        assert list(line) == inside
        assert len(line) == len(inside)
        assert line.totals.total == sums_of(inside)
        for tenant in TENANTS:
            own = [one for one in inside if one.command.terms.tenant == tenant]
            assert line.totals.of(tenant) == sums_of(own)
        # Nobody is remembered who has nothing there.
        assert line.totals.tenants == {one.command.terms.tenant for one in inside}
