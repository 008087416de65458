"""Recordings of a router: a fresh one decides the same."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from headway.core.request import Request
from headway.core.terms import Targets, Terms
from headway.errors import RecordingError
from headway.fleet.router.recorded import RecordedSharedRouter
from headway.record.entries import HASH_BYTES
from headway.record.kinds import ENGINE, ROUTER
from headway.record.reader import RecordingReader
from headway.record.router.entries import (
    NO_ENGINE,
    ArrivedEntry,
    DrainingEntry,
    EndedEntry,
    JoinedEntry,
    LostEntry,
    RouterEntry,
    TickEntry,
)
from headway.record.router.replay import (
    DecisionDifference,
    ReplayedRouter,
    RouterDifference,
    find_router_difference,
)
from headway.routing import RULES, Sending
from headway.routing.router import AllEngines
from tests.record.router_support import RecordedRun, replay
from tests.routing.support import COST, LIMITS, prompt, request, serve, step
from tests.routing.test_properties import RouterMachine


class SomeEngines:
    """Answers by chance."""

    restricts = True

    def __init__(self, draw: Random, share: float) -> None:
        self._draw = draw
        self._share = share

    def may_assign(self, request: Request, engine: str) -> bool:
        return self._draw.random() < self._share

    may_send = may_assign


class RecordedMachine(RouterMachine):
    """Drives a recorded router, and replays it at the end."""

    @initialize(rule=st.sampled_from(["ttft", "round-robin", "least-loaded", "cache-aware"]))
    def record(self, rule):
        self.folder = tempfile.TemporaryDirectory()
        self.run = RecordedRun(Path(self.folder.name), rule)
        self.router = self.run.router

    def teardown(self):
        if not hasattr(self, "run"):
            return
        super().teardown()
        replayed, difference = self.run.replay()
        assert difference is None, difference
        replayed.router.check()
        assert replayed.router.num_waiting == self.router.num_waiting
        self.folder.cleanup()


TestRecordedMachine = RecordedMachine.TestCase
TestRecordedMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def converse(run: RecordedRun) -> list[str]:
    """Have conversations of three turns, and an engine that is lost; return where requests went."""
    router, sent = run.router, list[str]()
    for number in range(4):
        router.engine_joined(f"e{number}", LIMITS, COST)
    contexts = {talk: prompt(*range(talk % 3, talk % 3 + 9)) for talk in range(12)}
    now = 0.0
    for turn in range(3):
        for talk, said in contexts.items():
            now += 0.02
            context = [*said, *[1000 * talk + turn] * (5 + talk)]
            one = request(context, f"t{talk % 2}", name=f"c{talk}.{turn}", group="all")
            router.arrive(one, now)
            for sending in router.tick(now):
                sent.append(f"{sending.request.id} to {sending.engine}")
                serve(router, sending.request.id, sending.num_cached)
                router.observe(sending.engine, step(64, num_running=1), now)
            output = [7 * talk + turn] * (3 + 5 * talk)
            router.finished(one.id, output)
            contexts[talk] = [*context, *output]
        if turn == 1:
            router.engine_lost("e1", now)
    return sent


@pytest.mark.parametrize("name", ["ttft", "cache-aware", "least-loaded", "round-robin"])
def test_conversations_find_their_prefixes_again(name: str, tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, name)
    sent = converse(run)
    replayed, difference = run.replay()
    assert difference is None, difference
    assert replayed.num_decisions == 2 * len(sent)


def without_hashes(entry: RouterEntry) -> RouterEntry:
    if isinstance(entry, ArrivedEntry):
        entry.hashes = b""
    return entry


def test_hashes_decide(tmp_path: Path) -> None:
    """Without them the replay is another one, so the tests above compare prefixes too."""
    run = RecordedRun(tmp_path)
    converse(run)
    run.replay()
    changed = find(run.path, without_hashes)
    assert isinstance(changed, DecisionDifference)
    assert "cached" in changed.recorded[0]


def find(path: Path, change: Callable[[RouterEntry], RouterEntry]) -> RouterDifference | None:
    reader = RecordingReader.open(path, ROUTER)
    entries = [change(entry) for entry in reader.entries()]
    return find_router_difference(iter(entries), ReplayedRouter(reader.header))


def test_an_altered_entry_is_found_where_it_is(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    converse(run)
    run.replay()

    def change(entry: RouterEntry) -> RouterEntry:
        if isinstance(entry, ArrivedEntry) and entry.id == "c5.1":
            entry.num_prompt_tokens -= 1  # of no importance to the router
            entry.engine = (entry.engine + 1) % 4
        return entry

    difference = find(run.path, change)
    assert isinstance(difference, DecisionDifference)
    assert difference.recorded[0].startswith("c5.1 waits for e")
    # Of each request before it, the assignment and the sending.
    assert difference.num_equal == 2 * (12 + 5)


def crowd(run: RecordedRun) -> None:
    """Have more requests than two engines take, and a third engine join."""
    router, sent, now = run.router, list[Sending](), 0.0
    router.engine_joined("e0", LIMITS, COST)
    router.engine_joined("e1", LIMITS, COST)
    for number in range(60):
        one = request(
            prompt(number % 5, *range(number, number + 20)), f"t{number % 3}", group="all"
        )
        router.arrive(one, now)
    router.engine_joined("e2", LIMITS, COST)
    for turn in range(400):
        now += 0.02
        sent += router.tick(now)
        if turn % 3 == 0 and sent:
            first = sent.pop(0)
            serve(router, first.request.id, first.num_cached)
            router.observe(first.engine, step(300, num_running=3), now)
            router.finished(first.request.id, [7] * (turn % 40 + 1))
    assert not router.num_waiting


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("router", "FIRST_OUTPUT", 16.0),
        ("router", "NUM_OTHERS", 0),
        ("router", "OUTPUT_FOLLOWING", 0.5),
    ],
)
def test_a_changed_constant_is_found(
    module: str, name: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RecordedRun(tmp_path)
    crowd(run)
    assert run.replay()[1] is None
    monkeypatch.setattr(f"headway.routing.{module}.{name}", value)
    assert isinstance(replay(run.path)[1], DecisionDifference)


def test_what_a_frontend_denies_is_replayed(tmp_path: Path) -> None:
    for seed in range(20):
        folder = tmp_path / str(seed)
        run = RecordedRun(folder, allowed=SomeEngines(Random(seed), 0.6))
        crowd(run)
        replayed, difference = run.replay()
        assert difference is None, difference
        replayed.router.check()


def test_engines_that_join_later(tmp_path: Path) -> None:
    """Requests that came before any engine have their prefixes; blocks may be multiples."""
    run = RecordedRun(tmp_path)
    shared = prompt(1, 2, 3, 4)
    for number in range(4):
        run.router.arrive(request([*shared, *prompt(number)], name=f"r{number}"), 0.0)
    run.router.engine_joined("e0", LIMITS, COST)
    run.router.engine_joined("e1", replace(LIMITS, block_size=32), COST)
    sent = [one for n in range(9) for one in run.router.tick(n / 10)]
    assert len(sent) == 4
    assert max(one.num_cached for one in sent) == 64
    assert run.replay()[1] is None


def test_blocks_that_are_no_multiples_end_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RecordedRun(tmp_path)
    run.router.engine_joined("e0", LIMITS, COST)
    run.router.engine_joined("e1", replace(LIMITS, block_size=24), COST)
    run.router.arrive(request(40), 1.0)
    run.router.tick(1.0)
    run.close()
    reader = RecordingReader.open(run.path, ROUTER)
    assert [type(entry) for entry in reader.entries()] == [JoinedEntry]
    assert "KV blocks of 24 tokens, the first one had 16" in reader.end
    assert "the recording ends" in caplog.text


def test_nothing_of_a_text_is_recorded(tmp_path: Path) -> None:
    """No token, no salt; two recordings of one text have no hash in common."""
    contents: list[bytes] = []
    for key in (b"one", b"two"):
        run = RecordedRun(tmp_path / key.decode(), key=key)
        run.router.engine_joined("e0", LIMITS, COST)
        terms = Terms(cache_group="all", cache_salt="a secret salt")
        one = replace_terms(request([4_242_424_242] * 64, name="r"), terms)
        run.router.arrive(one, 0.0)
        run.router.tick(0.0)
        run.router.finished("r", [4_242_424_243] * 40)
        run.close()
        contents.append(run.path.read_bytes())
    for content in contents:
        assert b"secret" not in content
        for token in (4_242_424_242, 4_242_424_243):
            assert token.to_bytes(4, "big") not in content
            assert token.to_bytes(4, "little") not in content
    hashes = [set(arrived_hashes(tmp_path / name / "router.0000.rec")) for name in ("one", "two")]
    assert all(len(one) == 4 for one in hashes)
    assert not hashes[0] & hashes[1]


def arrived_hashes(path: Path) -> list[bytes]:
    entries = RecordingReader.open(path, ROUTER).entries()
    (arrived,) = [entry for entry in entries if isinstance(entry, ArrivedEntry)]
    assert not arrived.terms.cache_salt
    starts = range(0, len(arrived.hashes), HASH_BYTES)
    return [arrived.hashes[start : start + HASH_BYTES] for start in starts]


def replace_terms(one: Request, terms: Terms) -> Request:
    one.terms = terms
    return one


def test_calls_about_requests_that_the_router_does_not_know(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    router = run.router
    router.engine_joined("e0", LIMITS, COST)
    router.admitted("nobody", 16)
    router.first_token("nobody")
    router.finished("nobody", [1])
    router.forget("nobody")
    router.reassign("nobody", 1.0)
    one = request(64, name="r")
    router.arrive(one, 1.0)
    router.forget("r")  # not sent yet: it ends
    router.restore(request(64, name="r"), "e0", 2.0)
    router.forget("r")
    router.tick(3.0)
    replayed, difference = run.replay()
    assert difference is None
    assert not replayed.router.num_waiting


def test_where_requests_go_after_a_loss_is_compared(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    for number in range(3):
        run.router.engine_joined(f"e{number}", LIMITS, COST)
    for number in range(40):
        run.router.arrive(request(200, name=f"r{number}"), 0.0)
    run.router.engine_lost("e0", 1.0)
    run.router.engine_draining("e1", 2.0)
    assert run.replay()[1] is None
    kinds: list[type[RouterEntry]] = [LostEntry, DrainingEntry]
    for kind in kinds:

        def change(entry: RouterEntry, kind: type[RouterEntry] = kind) -> RouterEntry:
            if isinstance(entry, kind) and isinstance(entry, LostEntry | DrainingEntry):
                (first, *rest) = entry.moved
                other = first._replace(engine=3 - first.engine if kind is LostEntry else NO_ENGINE)
                return msgspec.structs.replace(entry, moved=[other, *rest])
            return entry

        difference = find(run.path, change)
        assert isinstance(difference, DecisionDifference)
        assert " waits for " in difference.recorded[0]


def shared_run(folder: Path) -> tuple[RecordedRun, RecordedSharedRouter]:
    run = RecordedRun(folder)
    router = run.router = RecordedSharedRouter(RULES["ttft"](), AllEngines())
    router.record(run.recording)
    return run, router


@pytest.mark.parametrize("ttft_s", [None, 30.0])
def test_a_router_process_comes_and_goes(ttft_s: float | None, tmp_path: Path) -> None:
    """The same requests arrive again here, and age anew."""
    run, router = shared_run(tmp_path)
    limits = replace(LIMITS, max_num_seqs=1)
    router.engine_joined("e0", limits, COST)
    targets, sent = Targets(ttft_s=ttft_s), list[Sending]()
    for number in range(8):
        name, priority = f"r{number}", -number
        one = request(64, f"t{number % 2}", name=name, priority=priority, targets=targets)
        router.arrive(one, 0.1 * number)
        sent += router.tick(0.1 * number)
    router.share(1.0)
    router.tick(1.5)
    router.unshare(2.0)
    for turn in range(800):
        now = 2.0 + turn / 20
        sent += router.tick(now)
        if turn % 100 == 80:  # some before the requests have aged, some after
            first = sent.pop(0)
            serve(router, first.request.id)
            router.finished(first.request.id, [7] * 3)
    replayed, difference = run.replay()
    assert difference is None, difference
    assert replayed.router.num_waiting == router.num_waiting


def test_questions_between_calls_are_not_of_a_call(tmp_path: Path) -> None:
    run, router = shared_run(tmp_path)
    nobody = router.allowed
    router.engine_joined("e0", LIMITS, COST)
    router.share(0.0)
    router.tick(0.1)
    denying = SomeEngines(Random(1), 0.0)
    nobody._allowed = denying  # pyright: ignore
    for number in range(5):
        router.allowed.may_send(request(16, name=f"q{number}"), "e0")
    run.close()
    entries = list(RecordingReader.open(run.path, ROUTER).entries())
    assert [entry.denied for entry in entries if isinstance(entry, TickEntry)] == [[]]


def test_an_idle_router_has_written_all(tmp_path: Path) -> None:
    """So that a kill loses nothing, however long nothing has happened."""
    run = RecordedRun(tmp_path)
    run.router.engine_joined("e0", LIMITS, COST)
    for number in range(5):
        one = request(64, name=f"r{number}")
        run.router.arrive(one, 0.01 * number)
        run.router.tick(0.01 * number)
        serve(run.router, one.id)
        run.router.finished(one.id, [7] * 3)
    deadline = time.monotonic() + 10.0
    num_ended = 0
    while num_ended < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
        entries = RecordingReader.open(run.path, ROUTER).entries()
        num_ended = sum(isinstance(entry, EndedEntry) for entry in entries)
    assert num_ended == 5
    run.close()


def test_a_recording_of_another_process(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.close()
    with pytest.raises(RecordingError, match="router, not engine"):
        RecordingReader.open(run.path, ENGINE)
