"""A slice of benchmarks.faults.background_clients, and proof that its checker finds faults."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.background_clients import Battery, Client, problems, requests, run, started


async def test_no_event_is_lost_with_a_client_or_an_engine(tmp_path: Path) -> None:
    with started(None, tmp_path) as server:
        battery = Battery(server, requests(16), seed=1)
        figures = await run(battery, 1, tmp_path / "ledger.db")
        assert "Traceback" not in server.log
        assert server.metric("headway_engine_restarts_total") == 1, server.log
    assert figures["problems"] == []
    assert figures["clients"] == 16 and figures["returns"] >= 16


def response(status: str, **fields: Any) -> dict[str, Any]:
    usage = {"output_tokens": 3} if status == "completed" else None
    times = {"created_at": 5, "completed_at": None}
    return {"id": "resp_0a", "status": status, "usage": usage, **times, **fields}


def recorded() -> Client:
    """A response of three tokens."""
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response("queued")},
        {"type": "response.in_progress", "response": response("in_progress")},
        *({"type": "response.output_text.delta", "delta": text} for text in ("a", "b", "c")),
        {"type": "response.output_text.done", "text": "abc"},
        {"type": "response.completed", "response": response("completed")},
    ]
    for number, event in enumerate(events):
        event["sequence_number"] = number
    return Client({}, events=events, num_done=1, response_id="resp_0a")


def lose(one: Client) -> None:
    del one.events[3]


def double(one: Client) -> None:
    one.events.insert(3, copy.deepcopy(one.events[3]))


def change(one: Client) -> None:
    one.events[3]["delta"] = "x"


def swap(one: Client) -> None:
    one.events[3:5] = one.events[4:2:-1]


def lose_quietly(one: Client) -> None:
    """Lose an event, and number the others as if it had never been."""
    del one.events[3]
    for number, event in enumerate(one.events):
        event["sequence_number"] = number


def lose_the_end(one: Client) -> None:
    del one.events[-1]


def end_twice(one: Client) -> None:
    one.events.append({**copy.deepcopy(one.events[-1]), "sequence_number": len(one.events)})


def lose_done(one: Client) -> None:
    one.num_done = 0


def differ_later(one: Client) -> None:
    one.final = {**one.events[-1]["response"], "status": "failed"}


@pytest.mark.parametrize(
    "fault",
    [
        lose,
        double,
        change,
        swap,
        lose_quietly,
        lose_the_end,
        end_twice,
        lose_done,
        differ_later,
    ],
)
def test_a_fault_is_found(fault: Callable[[Client], None]) -> None:
    one = recorded()
    fault(one)
    assert problems(one, recorded())


def test_what_differs_from_run_to_run_is_no_fault() -> None:
    one = recorded()
    assert problems(one, recorded()) == []
    for event in one.events:
        if "response" in event:
            event["response"] |= {"id": "resp_0b", "created_at": 6}
    one.events[2]["delta"] = "ab"  # two tokens in one event
    lose_quietly(one)
    assert problems(one, recorded()) == []


def test_a_client_without_any_event_is_a_problem() -> None:
    assert problems(Client({}, errors=["503"]), recorded())
