"""Recordings as loads: the same outputs and the same prefix hits under other settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.cli.capacity.recording import Recorded
from headway.core.terms import Terms
from headway.errors import ConfigError
from headway.record.reader import CUT_SHORT
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.settings import parse_term_changes
from headway.sim.prediction.setup import Setup
from headway.sim.recording.items import RecordedItem
from headway.sim.recording.load import load_of
from headway.sim.recording.observed import ObservedEngine, read_observed
from headway.workload import Listed
from tests.record.support import Recorder, harness_class, recorded
from tests.sim.support import make_profile
from tests.support.harness import make_request

TENANT = Terms(tenant="b", cache_group="b")


def record_conversation(folder: Path) -> ObservedEngine:
    """Two turns of a conversation, a prompt with two samples, and a request of another tenant."""
    engine_class = harness_class(recorder := Recorder(folder))
    with recorded(engine_class()) as engine:
        first = engine.add("first", list(range(100, 121)), max_tokens=12)
        engine.run()
        engine.clock.advance_to(5.0)
        engine.add("second", [*first.token_ids, *range(7)], max_tokens=9)
        engine.run()
        engine.clock.advance_to(8.0)
        engine.add("two", list(range(40, 50)), max_tokens=3, n=2)
        engine.add("other", list(range(100, 121)), max_tokens=4, terms=TENANT)
        engine.run()
    return read_observed(recorder.path)


def make_setup(observed: ObservedEngine) -> Setup:
    setup = Setup.of(make_profile())
    spec = replace(
        setup.spec, scheduler=observed.header.scheduler, capacity=observed.header.capacity
    )
    return replace(setup, spec=spec)


def test_outputs_arrivals_and_tenants_are_the_recorded_ones(tmp_path: Path):
    load = load_of(record_conversation(tmp_path))
    items = [one for one in load.workload.requests if isinstance(one, RecordedItem)]
    assert load.num_left_out == 0
    assert [(len(one.prompt_token_ids), one.num_output_tokens, one.tenant) for one in items] == [
        (21, 12, None),
        (40, 9, None),
        (10, 3, None),
        (21, 4, "b"),
        (10, 3, None),
    ]
    assert [one.at for one in items] == [0.0, 5.0, 8.0, 8.0, 8.0]


def test_a_step_has_the_requests_that_came_and_ended_with_it(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class()) as engine:
        engine.add("first", list(range(100, 110)), max_tokens=4)
        engine.step()
        engine.add("second", list(range(200, 210)), max_tokens=2)
        engine.run()
    steps = read_observed(recorder.path).steps
    assert [one.num_added for one in steps] == [1, 0, 0, 0]
    assert [one.num_ended for one in steps] == [0, 0, 1, 1]


def test_a_pause_after_an_abort_belongs_to_no_step(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class()) as engine:
        engine.add("first", list(range(100, 110)), max_tokens=40)
        engine.step()
        engine.core.abort("first")
        engine.core.begin_step()
        engine.clock.advance_to(60.0)
        engine.add("second", list(range(200, 210)), max_tokens=2)
        engine.run()
    observed = read_observed(recorder.path)
    assert max(one.overhead_s for one in observed.steps) < 1.0
    assert observed.requests["second"].is_added_idle


@pytest.mark.parametrize("num_engines", [1, 2])
def test_prompts_that_repeat_an_output_hit_the_cache_as_they_did(tmp_path: Path, num_engines: int):
    observed = record_conversation(tmp_path)
    setup = replace(make_setup(observed), num_engines=num_engines)
    served = serve_load(setup, load_of(observed).workload, Limits(5)).requests
    # 21 + 12 tokens were known, the last of them was not computed: 8 blocks of 4 are full.
    assert [one.num_cached_tokens for one in served[:2]] == [0, 32]
    other = next(one for one in served if one.tenant == "b")
    assert other.num_cached_tokens == 0  # another cache group
    assert all(one.finished_at is not None for one in served)


def test_terms_of_a_recorded_tenant_can_be_changed(tmp_path: Path):
    observed = record_conversation(tmp_path)
    changes = parse_term_changes(["b.ttft_s=0.0001"])
    setup = replace(make_setup(observed), term_changes=changes)
    served = serve_load(setup, load_of(observed).workload, Limits(5)).requests
    assert [one.is_refused for one in served if one.tenant == "b"] == [True]


def test_in_a_closed_loop_a_turn_follows_the_answer_before_it(tmp_path: Path):
    observed = record_conversation(tmp_path)
    load = load_of(observed, is_closed_loop=True)
    assert load.num_following == 1
    turn = load.workload.requests[1]
    assert isinstance(turn, RecordedItem)
    answered_at = observed.requests["first"].finished_at or 0.0
    assert (turn.after, turn.think_s) == (0, 5.0 - answered_at)
    served = serve_load(make_setup(observed), load.workload, Limits(5)).requests
    assert len(served) == 5
    first, second = (
        next(one for one in served if one.num_prompt_tokens == length) for length in (21, 40)
    )
    # Both times are of the engine; the answer takes 3 ms to the client and a request 2 ms back.
    waited_s = second.scheduled_at - (first.finished_at or 0.0)
    assert waited_s == pytest.approx(turn.think_s - 0.003 - 0.002)
    assert second.num_cached_tokens == 32


def test_a_turn_after_a_refused_one_counts_as_refused():
    setup = Setup.of(make_profile())
    capacity = replace(setup.spec.capacity, num_blocks=8)
    setup = replace(setup, spec=replace(setup.spec, capacity=capacity))

    def item(number: int, at: float, num_prompt: int = 20, **fields: Any) -> RecordedItem:
        prompt, output = (number,) * num_prompt, (7,) * 5
        return RecordedItem(prompt, 5, at, None, output, 5, number=number, **fields)

    items = [
        item(1, 1.0),
        item(2, 10.0, num_prompt=9 * capacity.block_size),
        item(3, 12.0, after=2, think_s=1.0),
        item(4, 13.0, after=3, think_s=1.0),
    ]
    served = serve_load(setup, Listed(tuple(items)), Limits(4)).requests
    assert [one.refusal_reason for one in served] == ["", *["never_fits"] * 3]


def test_a_recording_without_outputs_is_refused(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class()) as engine:
        engine.add("first", list(range(21)), max_tokens=12)
    with pytest.raises(ConfigError, match="no request that ended"):
        load_of(read_observed(recorder.path))


def test_what_a_recording_lacks_is_said(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class()) as engine:
        engine.add("first", list(range(100, 121)), max_tokens=12)
        engine.run()
        engine.add("second", list(range(100, 121)), max_tokens=12)
        resent = make_request("third", list(range(300, 321)), max_tokens=12)
        engine.core.add(resent, is_resent=True)
        engine.step()
    about = (
        "1 recorded requests, 1 left out that have no output or did not end, "
        "1 left out that another engine had before"
    )
    assert Recorded(recorder.path).load(is_closed_loop=False)[1] == about
    recorder.path.write_bytes(recorder.path.read_bytes()[:-1])  # as after a kill
    cut = f"{about}; the recording is incomplete: {CUT_SHORT}"
    assert Recorded(recorder.path).load(is_closed_loop=False)[1] == cut


def test_requests_that_were_refused_are_served_with_drawn_outputs(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    small = Terms(tenant="b", cache_group="b", max_kv_share=0.01)
    with recorded(engine_class()) as engine:
        engine.add("first", list(range(100, 121)), max_tokens=12)
        engine.add("large", list(range(200, 230)), max_tokens=9, terms=small)
        engine.run()
    observed = read_observed(recorder.path)
    assert [one.id for one in observed.refused] == ["large"]
    load = load_of(observed)
    assert (load.num_drawn, load.num_left_out) == (1, 0)
    assert [one.num_output_tokens for one in load.workload.requests] == [12, 9]
    setup = make_setup(observed)
    served = serve_load(setup, load.workload, Limits(2)).requests
    assert [one.is_refused for one in served] == [False, True]
    larger = replace(setup, term_changes=parse_term_changes(["b.max_kv_share=1.0"]))
    served = serve_load(larger, load.workload, Limits(2)).requests
    assert [one.is_refused for one in served] == [False, False]
