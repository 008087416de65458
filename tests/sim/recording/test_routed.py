"""Recordings of a router as loads: the requests of all its engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headway.cli.capacity.recording import Recorded
from headway.clock import VirtualClock
from headway.core.terms import Targets, Terms
from headway.errors import ConfigError
from headway.fleet.router.frontends import FleetRouter
from headway.fleet.router.messages import (
    Arrive,
    End,
    EngineFound,
    EngineGone,
    FirstToken,
    RouterRequest,
    SendTo,
)
from headway.fleet.router.recorded import RecordedSharedRouter
from headway.record.router.recorded import RecordedRouter
from headway.routing import RULES, AllowedEngines, Reason, Router
from headway.routing.router import AllEngines
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.sim.recording.items import RecordedItem
from headway.sim.recording.load import load_of
from headway.sim.recording.routed import read_routed
from tests.record.router_support import RecordedRun
from tests.routing.support import COST, LIMITS, prompt, request, serve, step
from tests.sim.support import make_profile


def lengths_of(path: Path) -> list[tuple[float, int, int, str | None]]:
    """Return time, prompt and output tokens and tenant of each request."""
    items = load_of(read_routed(path)).workload.requests
    return [
        (one.at or 0.0, len(one.prompt_token_ids), one.num_output_tokens, one.tenant)
        for one in items
    ]


def answer(run: RecordedRun, at: float, tokens: list[int], num_output: int, tenant: str) -> None:
    one = request(tokens, tenant, group="all")
    one.arrived_at = at
    run.router.arrive(one, at)
    (sending,) = run.router.tick(at)
    serve(run.router, one.id, sending.num_cached)
    run.router.observe(sending.engine, step(16), at + 1.0)
    run.router.finished(one.id, [9] * num_output)


def test_requests_of_all_engines_with_their_prefixes(tmp_path: Path):
    run = RecordedRun(tmp_path)
    run.router.engine_joined("e0", LIMITS, COST)
    run.router.engine_joined("e1", LIMITS, COST)
    first = prompt(1, 2, 3)
    answer(run, 10.0, first, 20, "a")
    answer(run, 15.0, [*first, *[9] * 20, 4], 6, "a")
    answer(run, 16.0, prompt(7), 3, "b")
    run.close()
    assert lengths_of(run.path) == [(0.0, 48, 20, "a"), (5.0, 69, 6, "a"), (6.0, 16, 3, "b")]
    load = load_of(read_routed(run.path), is_closed_loop=True)
    assert load.num_following == 1
    setup = replace(Setup.of(make_profile()), num_engines=2)
    served = serve_load(setup, load.workload, Limits(3)).requests
    # The answer's last token is not computed: 48 + 19 tokens fill 4 blocks of 16.
    assert [one.num_cached_tokens for one in served] == [0, 64, 0]


def test_an_answer_goes_on_in_another_engine(tmp_path: Path):
    run = RecordedRun(tmp_path)
    router = run.router
    router.engine_joined("e0", LIMITS, COST)
    one = request(prompt(1, 2), name="r")
    router.arrive(one, 0.0)
    router.tick(0.0)
    router.engine_lost("e0", 1.0)
    router.engine_joined("e1", LIMITS, COST)
    again = replace(request([*one.token_ids, *[5] * 7], name="r"), num_prompt_tokens=32)
    router.arrive(again, 1.0, is_resent=True)
    router.tick(1.0)
    serve(router, "r")
    router.finished("r", [5] * 4)
    answer(run, 2.0, prompt(8), 1, "")
    run.close()
    assert lengths_of(run.path) == [(0.0, 32, 11, None), (2.0, 16, 1, None)]


def make_described(name: str, num_tokens: int) -> RouterRequest:
    tokens = prompt(*range(20))[:num_tokens]
    return RouterRequest(name, tokens, 64, 1, 0, 0.0, Terms(), False)


def test_an_answer_that_a_router_process_sees_in_two_engines(tmp_path: Path):
    """A router process is not told how much of a request is its prompt."""
    run = RecordedRun(tmp_path)

    def make_router(_rule: object, allowed: AllowedEngines) -> Router:
        run.router = RecordedRouter(RULES["ttft"](), allowed)
        run.router.record(run.recording)
        return run.router

    fleet = FleetRouter("ttft", VirtualClock(), make_router)
    frontend = fleet.join("f")
    fleet.handle(frontend, EngineFound("e0", 1000, 16, 8, True), 0.0)
    fleet.handle(frontend, Arrive(make_described("r", 32), False, None), 0.0)
    fleet.tick(0.0)
    fleet.handle(frontend, EngineGone("e0"), 1.0)
    fleet.handle(frontend, EngineFound("e1", 1000, 16, 8, True), 1.0)
    fleet.handle(frontend, Arrive(make_described("r", 52), True, None), 1.0)
    fleet.tick(1.0)
    fleet.handle(frontend, FirstToken("r"), 1.1)
    fleet.handle(frontend, End("r", [5] * 4), 1.2)
    run.close()
    assert lengths_of(run.path) == [(0.0, 32, 24, None)]


def test_a_request_that_another_process_decides_about_is_one(tmp_path: Path):
    """It waits here, is handed over, and is in an engine by the decision made there."""
    run = RecordedRun(tmp_path)
    router = run.router = RecordedSharedRouter(RULES["ttft"](), AllEngines())
    router.record(run.recording)
    limits = replace(LIMITS, max_num_seqs=1)
    router.engine_joined("e0", limits, COST)
    first, second = request(prompt(1), name="first"), request(prompt(2, 3), name="second")
    for one in (first, second):
        router.arrive(one, 0.0)
        router.tick(0.0)
    router.share(1.0)
    serve(router, "first")
    router.finished("first", [5] * 3)
    router.take([SendTo("second", "e0", Reason.LOAD, 1.0, 0, 0.0)])
    router.tick(2.0)
    serve(router, "second")
    router.finished("second", [5] * 6)
    run.close()
    load = load_of(read_routed(run.path))
    assert lengths_of(run.path) == [(0.0, 16, 3, None), (0.0, 32, 6, None)]
    assert load.num_left_out == 0


def test_samples_ids_that_come_again_and_requests_that_did_not_end(tmp_path: Path):
    run = RecordedRun(tmp_path)
    router = run.router
    for number in range(2):  # before any engine: their hashes come later
        router.arrive(request(prompt(1, 2), name=f"r{number}", n=2), 0.0)
    router.engine_joined("e0", LIMITS, COST)
    for sending in router.tick(0.1):
        serve(router, sending.request.id)
    router.finished("r0", [5] * 3)
    again = request(prompt(1, 2), name="r0")
    router.arrive(again, 1.0)
    router.tick(1.0)
    serve(router, "r0")
    router.finished("r0", [5] * 2)
    run.close()
    load = load_of(read_routed(run.path))
    assert [one.num_output_tokens for one in load.workload.requests] == [3, 3, 2]
    assert load.num_left_out == 1
    starts = {one.prompt_token_ids[:32] for one in load.workload.requests}
    assert len(starts) == 1


def test_a_refused_request_is_counted(tmp_path: Path):
    run = RecordedRun(tmp_path)
    run.router.engine_joined("e0", LIMITS, COST)
    run.router.arrive(request(4000, targets=Targets(ttft_s=0.001)), 0.0)
    answer(run, 1.0, prompt(8), 4, "")
    run.close()
    recorded = Recorded(run.path)
    text = "2 recorded requests (1 were refused then: their output lengths are drawn)"
    assert recorded.load(is_closed_loop=False)[1] == text
    with pytest.raises(ConfigError, match="no step times: name a profile"):
        recorded.profile()


def test_items_keep_terms(tmp_path: Path):
    run = RecordedRun(tmp_path)
    run.router.engine_joined("e0", LIMITS, COST)
    one = request(prompt(1), "a", weight=3.0, priority=-2)
    run.router.arrive(one, 0.0)
    run.router.tick(0.0)
    serve(run.router, one.id)
    run.router.finished(one.id, [5] * 3)
    run.close()
    (item,) = load_of(read_routed(run.path)).workload.requests
    assert isinstance(item, RecordedItem)
    assert (item.terms.weight, item.priority, item.max_tokens) == (3.0, -2, 32)
