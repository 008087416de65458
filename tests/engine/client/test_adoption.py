"""Which engines are asked for a request of another frontend, and which answer counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.params import SamplingParams
from headway.core.terms import Terms
from headway.engine.client import adoption
from headway.engine.client.adoption import Adoptions, adoption_events
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import AddRequest, Handover, SampleRecord
from headway.errors import OverloadedError
from headway.text import Tokenizer

FOUND: Any = object()


class Link:
    """An engine that answers at once with what it has."""

    def __init__(self, adoptions: Adoptions, has: Any = None, **state: Any) -> None:
        self.is_up = self.is_connected = True
        self.num_asked = 0
        self._adoptions = adoptions
        self._has = has
        self.__dict__.update(state)

    async def adopt(self, request_id: str, _tenant: str) -> bool:
        self.num_asked += 1
        if self._has != "silent":
            self._adoptions.answer(request_id, self._has)
        return True


def replicas(*links: Link) -> Any:
    return [SimpleNamespace(link=link) for link in links]


async def test_the_first_stream_counts_or_none_from_all() -> None:
    adoptions = Adoptions()
    links = Link(adoptions), Link(adoptions, FOUND), Link(adoptions)
    assert await adoptions.ask("a", "t", replicas(*links)) is FOUND
    assert await adoptions.ask("a", "t", replicas(*links[::2])) is None
    assert await adoptions.ask("a", "t", []) is None
    assert not adoptions._questions


async def test_an_engine_that_starts_again_is_asked_when_it_is_up() -> None:
    adoptions = Adoptions()
    starting = Link(adoptions, FOUND, is_up=False)
    asking = asyncio.create_task(adoptions.ask("a", "t", replicas(starting, Link(adoptions))))
    await asyncio.sleep(0.02)
    assert not starting.num_asked and not asking.done()
    starting.is_up = True
    assert await asyncio.wait_for(asking, 2.0) is FOUND


async def test_an_engine_that_does_not_answer_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adoption, "ANSWER_S", 0.05)
    adoptions = Adoptions()
    assert await adoptions.ask("a", "t", replicas(Link(adoptions, "silent"))) is None
    lost = Link(adoptions, is_up=False, is_connected=False)
    assert await adoptions.ask("a", "t", replicas(lost)) is None and not lost.num_asked


async def test_questions_are_bounded_per_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "MAX_QUESTIONS_OF_TENANT", 3)
    adoptions = Adoptions()
    silent = replicas(Link(adoptions, "silent"))
    asking = [asyncio.create_task(adoptions.ask(str(i), "flood", silent)) for i in range(3)]
    await asyncio.sleep(0)
    for request_id in ("9", "1"):
        with pytest.raises(OverloadedError):
            await adoptions.ask(request_id, "flood", silent)
    assert await adoptions.ask("9", "other", replicas(Link(adoptions, FOUND))) is FOUND
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert not adoptions._questions


async def test_a_handover_of_another_tenant_is_not_wanted() -> None:
    adoptions = Adoptions()
    asking = asyncio.create_task(adoptions.ask("a", "t", replicas(Link(adoptions, "silent"))))
    await asyncio.sleep(0)
    for name, tenant, is_wanted in (("a", "t", True), ("a", "u", False), ("b", "t", False)):
        command = AddRequest(name, [1], SamplingParams(), 7, 5.0, terms=Terms(tenant))
        assert adoptions.is_wanted(Handover(name, command)) == is_wanted
    adoptions.answer("a", FOUND)
    assert await asking is FOUND


def test_the_account_of_an_adopted_request_has_what_it_asked_for(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=50, n=2)
    command = AddRequest("a", [65], params, 7, 0.0, priority=-3, note=b"note", attempt=3)
    records = [SampleRecord(0, [97, 98]), SampleRecord(1, [99])]
    handover = Handover("a", command, records, num_cached_tokens=0)
    found = adoption_events(RequestStream.adopt(handover, tokenizer, 0.0), handover, 0.0)
    assert [(one.max_tokens, one.n, one.priority) for one in found.adopted] == [(50, 2, -3)] * 2
