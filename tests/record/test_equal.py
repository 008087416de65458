"""A replay plans every step as the recorded engine did."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from headway.core.events import Admitted
from headway.core.params import SamplingParams
from headway.core.plan import Sample
from headway.core.request import FinishReason, Request
from headway.core.terms import Terms
from headway.executors.fake import FakeExecutor
from headway.record.entries import CLOSED, HASH_BYTES, AddEntry
from headway.record.kinds import ENGINE
from headway.record.reader import RecordingReader
from headway.record.replay import AdmissionDifference, PlanDifference
from tests.core.test_recorder import BLOCK_SIZE, Memory
from tests.properties.rig import Rig
from tests.properties.walk import Tally, Walker
from tests.record.support import Recorder, harness_class, recorded, replay, rig_class
from tests.support.harness import Harness, make_request

NUM_STEPS = 240
SEEDS = (1, 5, 6, 10)


def walk(recorder: Recorder, seed: int, num_steps: int = NUM_STEPS) -> Walker:
    walker = Walker(random.Random(f"record/{seed}"), rig_class(recorder))
    for _ in range(num_steps):
        walker.act()
    walker.rig.core.close()
    return walker


def check_walk(recorder: Recorder, seed: int) -> Rig:
    rig = walk(recorder, seed).rig
    found = replay(recorder.path)
    assert found.difference is None
    assert found.num_steps == rig.num_steps
    assert found.end == CLOSED
    return rig


def test_random_walks_with_all_that_makes_plans_differ(tmp_path: Path):
    tally, seen = Tally(), Counter[str]()
    for seed in SEEDS:
        rig = check_walk(Recorder(tmp_path / str(seed)), seed)
        tally.take(rig)
        seen.update(rig.ledger.counts)
        seen[rig.scheduler.config.scheduling_policy] += 1
    methods = ("trim", "checkpoint", "recompute", "saves", "loads")
    counts = {name: tally.counts[name] for name in (*methods, "aborts", "forks", "refusals")}
    assert all(counts.values()), counts
    assert seen["finished_stop"] and seen["finished_error"]
    assert all(seen[policy] for policy in ("fair", "deadline", "priority", "fcfs"))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 300))
def test_many_random_walks(tmp_path: Path, seed: int):
    check_walk(Recorder(tmp_path), seed)


def test_prefix_hits_in_prompts_and_in_outputs(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class()) as engine:
        first = engine.add("first", list(range(100, 121)), max_tokens=12)
        engine.run()
        # The second turn of a conversation: the output of the first is in its prompt.
        engine.add("second", [*first.token_ids, *range(7)], max_tokens=9)
        engine.run()
        engine.add("other", [*range(100, 110), *range(30)], max_tokens=3)
        engine.run()
    hits = {event.request_id: event.num_cached_tokens for event in engine.seen(Admitted)}
    assert hits == {"first": 0, "second": 32, "other": 8}
    assert replay(recorder.path).difference is None


@pytest.mark.parametrize("length", [7, 8, 9])
def test_samples_whose_parent_ends_with_its_first_token(tmp_path: Path, length: int):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class(num_blocks=6)) as engine:
        prompt = list(range(length))
        engine.add("short", prompt, max_tokens=1, n=3)
        engine.add("long", prompt, max_tokens=11, n=2)
        engine.run()
        engine.add("again", [*prompt, *engine.output("long#1")], max_tokens=2)
        engine.run()
    found = replay(recorder.path)
    assert found.difference is None
    assert found.num_steps


def test_scored_prompts_and_embeddings(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class()) as engine:
        engine.add("scored", 40, max_tokens=3, prompt_logprobs=2)
        engine.add("embedded", 21, max_tokens=0, is_embedding=True)
        engine.add("prompt", 9, max_tokens=0)
        engine.run()
    assert replay(recorder.path).difference is None


def test_samples_of_several_tokens(tmp_path: Path):
    class Guessing(FakeExecutor):
        """Returns up to three tokens per sample; the last of some is a stop token."""

        def submit(self, plan):
            ticket = super().submit(plan)
            result = self._results[plan.step_id]
            outcomes = [one and Sample((5, 6, 7)) for one in result.outcomes]
            object.__setattr__(result, "outcomes", tuple(outcomes))
            return ticket

    engine_class = harness_class(recorder := Recorder(tmp_path))
    base = Harness()
    with recorded(engine_class(executor=Guessing(base.capacity))) as engine:
        engine.add("a", 6, max_tokens=10)
        engine.add("b", 6, max_tokens=10, stop_token_ids=(6,), min_tokens=3)
        # The fake executor expects what it sampled: only what it is asked for matters here.
        while engine.core.has_work:
            engine.core.step()
    assert engine.finish("a").num_output_tokens == 10
    assert engine.finish("b").num_output_tokens == 5
    assert engine.finish("b").reason is FinishReason.STOP
    assert replay(recorder.path).difference is None


def test_requests_of_an_earlier_engine(tmp_path: Path):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class(max_num_seqs=2, max_wait_s=0.5)) as engine:
        engine.advance(10.0)
        for number in range(4):
            engine.add(f"new-{number}", 6)
        for number in range(4):
            request = make_request(f"resent#{number}" if number else "resent", 9, index=number)
            request.num_prompt_tokens = 6
            engine.core.add(request, is_resent=True, waited_s=0.3 * number)
            engine.advance(0.01)
        engine.run()
    assert replay(recorder.path).difference is None


@pytest.mark.parametrize("is_damaged", [False, True])
def test_blocks_of_an_earlier_engine(tmp_path: Path, is_damaged: bool):
    memory = Memory(32)
    before = _engine_on(memory, Harness)
    for name in "abc":
        before.add(name, [*range(9), ord(name)], max_tokens=20, n=2)
    before.steps(6)
    if is_damaged:
        memory.blocks[before.scheduler.kv.tables["b"].block_ids[2]][0] = -7
    recorder = Recorder(tmp_path)
    after = _engine_on(memory, harness_class(recorder))
    with recorded(after):
        live = dict(before.scheduler.requests)
        assert any(len(one.token_ids) % BLOCK_SIZE > 1 for one in live.values())
        for request in live.values():
            after.core.add(_sent_again(request), is_resent=True, waited_s=0.0)
        after.run()
    admitted = [event for event in after.seen(Admitted) if not event.is_resumed]
    hits = {event.request_id: event.num_cached_tokens for event in admitted}
    whole = {name: one.num_tokens - 1 for name, one in live.items()}
    tails = {name for name, number in hits.items() if number % BLOCK_SIZE}
    assert tails, "no last block was found again"
    assert (hits == whole) is not is_damaged
    found = replay(recorder.path)
    assert found.difference is None
    assert found.num_steps


def _engine_on(memory: Memory, engine_class: type[Harness]) -> Harness:
    base = Harness(len(memory.blocks), BLOCK_SIZE)
    executor = FakeExecutor(base.capacity)
    executor._blocks = memory.blocks
    return engine_class(len(memory.blocks), BLOCK_SIZE, executor=executor, recorder=memory)


def _sent_again(request: Request) -> Request:
    return Request(
        id=request.id,
        token_ids=list(request.token_ids),
        params=request.params,
        seed=request.seed,
        arrived_at=0.0,
        index=request.index,
        num_prompt_tokens=request.num_prompt_tokens,
    )


def _record_skips(recorder: Recorder) -> None:
    """One request runs, five do not fit beside it, and the last one would."""
    engine_class = harness_class(recorder)
    settings = {"scheduling_policy": "fcfs", "max_wait_s": 1000.0}
    with recorded(engine_class(num_blocks=16, max_num_batched_tokens=64, **settings)) as engine:
        engine.add("first", 24, max_tokens=8)
        engine.steps(2)
        for number in range(5):
            engine.add(f"large-{number}", 48, max_tokens=4)
        engine.add("small", 4, max_tokens=4)
        engine.run()


def test_a_changed_constant_is_found_at_the_first_step_that_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _record_skips(recorder := Recorder(tmp_path))
    assert replay(recorder.path).difference is None
    monkeypatch.setattr("headway.core.scheduler.MAX_SKIPS", 6)
    found = replay(recorder.path).difference
    assert isinstance(found, PlanDifference)
    assert found.step == 3
    assert found.recorded.decodes == found.replayed.decodes == ("first",)
    assert found.recorded.chunks == ()
    assert found.replayed.chunks == (("small", 0, 4),)


def test_a_refusal_that_is_none_now_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine_class = harness_class(recorder := Recorder(tmp_path))
    with recorded(engine_class(num_blocks=4)) as engine:
        engine.add("a", 4)
        engine.step()
        engine.add("large", 40)
        engine.run()
    assert replay(recorder.path).difference is None
    monkeypatch.setattr("headway.core.scheduler.refuse_if_never_fits", lambda *_: None)
    found = replay(recorder.path).difference
    assert isinstance(found, AdmissionDifference)
    assert (found.step, found.request_id, found.was_refused) == (1, "large", True)


def test_recording_changes_no_plan_and_no_event(tmp_path: Path):
    plain = Walker(random.Random("record/3"))
    for _ in range(NUM_STEPS):
        plain.act()
    walker = walk(Recorder(tmp_path), 3)
    assert plain.rig.ledger.counts == walker.rig.ledger.counts
    assert plain.rig.clock.now() == walker.rig.clock.now()


def test_no_token_and_no_text_is_recorded(tmp_path: Path):
    rng = random.Random(5)
    engine_class = harness_class(recorder := Recorder(tmp_path))
    tokens = [rng.randrange(2**24, 2**31) for _ in range(203)]
    stops = tuple(rng.randrange(2**24, 2**31) for _ in range(3))
    terms = Terms(tenant="acme", cache_group="acme", cache_salt="a secret of the client")
    params = SamplingParams(
        n=2, max_tokens=20, stop_token_ids=stops, stop=("a stop text",), bad_words=("a bad word",)
    )
    with recorded(engine_class()) as engine:
        engine.core.add(
            Request(id="a", token_ids=tokens, params=params, seed=11, arrived_at=0.0, terms=terms)
        )
        engine.run()
    content = recorder.path.read_bytes()
    for token_id in (*tokens, *stops, *engine.output("a#1")):
        for order in ("big", "little"):
            assert token_id < 2**16 or token_id.to_bytes(4, order) not in content
    assert b"acme" in content
    for text in (b"secret", b"stop text", b"bad word"):
        assert text not in content
    block_hashes = engine.scheduler.kv.pool._index._block_of
    assert len(block_hashes) >= 50
    assert not any(one[:8] in content for one in block_hashes)
    assert replay(recorder.path).difference is None


def test_hashes_of_two_recordings_cannot_be_compared(tmp_path: Path):
    hashes: list[bytes] = []
    for number, key in enumerate((b"one", b"two", b"one")):
        recorder = Recorder(tmp_path / str(number), key=key)
        with recorded(harness_class(recorder)()) as engine:
            engine.add("a", list(range(16)))
            engine.run()
        entries = RecordingReader.open(recorder.path, ENGINE).entries()
        hashes.append(next(entry.hashes for entry in entries if isinstance(entry, AddEntry)))
    assert len(hashes[0]) == 4 * HASH_BYTES
    assert hashes[0] == hashes[2]
    assert hashes[0] != hashes[1]
