"""The trace file: what is in it, and that its slices nest and add up."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from typing import Any

import pytest

from headway.core.events import Admitted, Finished
from headway.observe.trace.account import RequestAccount
from headway.observe.trace.chrome import BEFORE_S, STEPS, ChromeTrace
from headway.observe.trace.export import VERSION, TraceHead, TraceStep
from tests.observe.stories import STOP, Story, causes, tokens
from tests.observe.test_metrics import step
from tests.observe.test_pieces import preempted_life
from tests.observe.test_requests import a_life

HEAD = TraceHead(VERSION, "0.2.0", "tiny", 1100.0, 100.0)
Slice = dict[str, Any]


def write(*accounts: RequestAccount, steps: dict[str, list[TraceStep]] | None = None) -> Any:
    file = io.BytesIO()
    trace = ChromeTrace(file, HEAD)
    for engine, of_engine in (steps or {}).items():
        trace.add_steps(engine, of_engine)
    for account in accounts:
        trace.add_request(account)
    trace.close(is_complete=True)
    return json.loads(file.getvalue())


def tracks_of(trace: Any) -> dict[tuple[str, str], list[Slice]]:
    """Slices by the names of their group and track, after a check that they nest."""
    names: dict[tuple[str, int], str] = {}
    slices: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"].endswith("_name"):
            number = event["tid"] or event["pid"]
            names[event["name"], number] = event["args"]["name"]
        elif event["ph"] == "X":
            assert isinstance(event["ts"], int) and isinstance(event["dur"], int)
            assert event["ts"] >= 0 and event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
    for found in slices.values():
        check_nesting(found)
    return {
        (names["process_name", pid], names["thread_name", tid]): found
        for (pid, tid), found in slices.items()
    }


def check_nesting(slices: list[Slice]) -> None:
    open_ends: list[int] = []
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while open_ends and open_ends[-1] <= one["ts"]:
            open_ends.pop()
        end = one["ts"] + one["dur"]
        assert not open_ends or end <= open_ends[-1], one
        open_ends.append(end)


def test_a_request_is_a_track_of_its_tenant() -> None:
    tracks = tracks_of(write(Story(*a_life()).only))
    assert list(tracks) == [("tenant a", "r-1")]
    whole, *pieces = tracks["tenant a", "r-1"]
    assert whole["name"] == "request"
    assert whole["dur"] == 3_000_000
    assert whole["ts"] == (1010 - 1000 + BEFORE_S) * 1_000_000
    about = whole["args"]
    assert (about["tenant"], about["tier"], about["finish_reason"]) == ("a", "gold", "stop")
    assert (about["num_prompt_tokens"], about["num_output_tokens"]) == (20, 3)
    assert about["queue_s"] == pytest.approx(1.8)
    assert [(one["name"], one["dur"]) for one in pieces] == [
        ("queue", 1_800_000),
        ("kv_blocks", 1_500_000),
        ("tenant_share", 300_000),
        ("prefill", 200_000),
        ("decode", 1_000_000),
    ]
    assert pieces[1]["args"] == {"seconds": 1.5, "held_by": "b"}


def test_a_preemption_is_a_slice_that_names_who_and_why() -> None:
    story = preempted_life()
    story.tell(Admitted("r-1", 2.5, 0.5, 48, 111, True, causes(kv_blocks=0.5), "b"))
    story.tell(tokens("r-1"), Finished("r-1", 3.0, STOP, 12), step(3.0))
    (found,) = tracks_of(write(story.only)).values()
    (preempted,) = [one for one in found if one["name"] == "preempted"]
    assert (preempted["cat"], preempted["dur"]) == ("queue", 500_000)
    assert preempted["args"] == {
        "seconds": 0.5,
        "by": "r-2",
        "by_tenant": "b",
        "cause": "kv_blocks",
        "method": "recompute",
        "tokens_lost": 110,
    }


def test_steps_are_a_track_of_each_engine() -> None:
    first = TraceStep(1, 1050.0, 0.25, 0.2, 3, 40, 3, 1, 12)
    # Measured longer than the time since the step before: it must not begin within that step.
    second = TraceStep(2, 1050.1, 0.25, 0.0, 3, 3, 3, 1, 12)
    tracks = tracks_of(write(steps={"e1": [first, second], "e2": [first]}))
    assert list(tracks) == [(STEPS, "e1"), (STEPS, "e2")]
    one, two = tracks[STEPS, "e1"]
    assert (one["dur"], two["dur"]) == (250_000, 100_000)
    assert one["args"] == {
        "step": 1,
        "seconds": 0.25,
        "rows": 3,
        "tokens": 40,
        "running": 3,
        "waiting": 1,
        "kv_blocks": 12,
        "predicted_seconds": 0.2,
    }
    assert "predicted_seconds" not in two["args"]
    assert two["args"]["seconds"] == 0.25


def test_a_file_without_events_and_a_request_without_pieces_are_whole() -> None:
    empty = write()
    assert empty["traceEvents"] == []
    assert (empty["otherData"]["model"], empty["otherData"]["is_complete"]) == ("tiny", True)
    gone = RequestAccount(id="r-1", state="finished", arrived_at=1050.0, duration_s=0.0)
    ((key, (only,)),) = tracks_of(write(gone)).items()
    assert key == ("requests", "r-1")
    assert only["dur"] == 0


def test_names_that_clients_choose_are_only_text() -> None:
    name = '"},{"ph":"X"\n\u2028'
    account = RequestAccount(
        id="r-1", state="finished", arrived_at=1050.0, duration_s=1.0, tenant=name, client_id=name
    )
    ((key, (only,)),) = tracks_of(write(account)).items()
    assert key == (f"tenant {name}", "r-1")
    assert only["args"]["client_id"] == name


def test_a_request_older_than_a_day_does_not_leave_the_file() -> None:
    old = RequestAccount(id="r-1", state="running", arrived_at=1050.0 - 2 * 86_400, duration_s=9.0)
    ((only,),) = tracks_of(write(old)).values()
    assert (only["ts"], only["dur"]) == (0, 0)
