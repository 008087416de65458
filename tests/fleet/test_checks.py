"""What an engine takes from a frontend: every field is checked, every frame bounded."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from benchmarks.faults.mutated_frames import mutate
from headway.clock import SystemClock
from headway.core.events import Finished, Forked, Stepped, TokensEmitted
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.core.terms import Targets, Terms
from headway.engine.process.messages import (
    AddRequest,
    EngineInfo,
    EventBatch,
    Handover,
    Past,
    SampleRecord,
)
from headway.errors import InvalidRequestError, WireError
from headway.fleet.engines.sessions import Sessions
from headway.fleet.network.checks import check_engine, check_handover, check_id, check_request
from headway.fleet.network.clocks import MAX_AGE_S, age_of, localize
from headway.fleet.network.wire import (
    Abort,
    Add,
    Adopt,
    Credit,
    EngineUp,
    HandedOver,
    Heartbeat,
    Hello,
    Reported,
    decode_engine_message,
    decode_frontend_message,
    encode,
    split_wire_id,
)

INFO = EngineInfo(Capacity(64, 16, 128), 8, 100)
GOOD = AddRequest("cmpl-1f", [1, 2, 3], SamplingParams(max_tokens=9), 7, 5.0)


def changed(**fields: Any) -> AddRequest:
    return msgspec.structs.replace(GOOD, **fields)


def with_terms(**fields: Any) -> AddRequest:
    return changed(terms=replace(Terms(), **fields))


RECORD = SampleRecord(1, [3])


def again(past: Past) -> AddRequest:
    """Return a sample that is sent again, with this past."""
    return changed(
        id="cmpl-1f#1", index=1, num_prompt_tokens=2, token_ids=[1, 2, 3], note=b"x", past=past
    )


BAD = {
    "empty prompt": changed(token_ids=[]),
    "unknown token": changed(token_ids=[1, 100]),
    "negative token": changed(token_ids=[-1]),
    "long prompt": changed(token_ids=[1] * 129),
    "unresolved": changed(params=SamplingParams(max_tokens=None)),
    "unknown stop token": changed(params=SamplingParams(max_tokens=9, stop_token_ids=(100,))),
    "unknown bias": changed(params=SamplingParams(max_tokens=9, logit_bias={100: 1.0})),
    "unknown allowed token": changed(params=SamplingParams(max_tokens=9, allowed_token_ids=(100,))),
    "unknown bad word": changed(
        params=SamplingParams(max_tokens=9, bad_words_token_ids=((1, 100),))
    ),
    "large seed": changed(seed=2**63),
    "large priority": changed(priority=2**40),
    "negative attempt": changed(attempt=-1),
    "no time": changed(arrived_at=math.nan),
    "no wait": changed(waited_s=math.inf),
    "negative wait": changed(waited_s=-1.0),
    "id with a colon": changed(id="1:cmpl"),
    "id with a line": changed(id="cmpl\n1"),
    "empty id": changed(id=""),
    "long id": changed(id="x" * 200),
    "sample without index": changed(id="cmpl#1"),
    "index without sample": changed(index=1, num_prompt_tokens=2),
    "large index": changed(id="cmpl#128", index=128, num_prompt_tokens=2),
    "prompt beyond the tokens": changed(num_prompt_tokens=4),
    "negative prompt": changed(num_prompt_tokens=-1),
    "complete output": changed(num_prompt_tokens=1, params=SamplingParams(max_tokens=2)),
    "fork of a resumed sample": changed(num_prompt_tokens=2, params=SamplingParams(n=2)),
    "no weight": with_terms(weight=0.0),
    "weight is not a number": with_terms(weight=math.nan),
    "infinite weight": with_terms(weight=math.inf),
    "large KV share": with_terms(max_kv_share=1.5),
    "long tenant": with_terms(tenant="t" * 1000),
    "negative target": with_terms(targets=Targets(ttft_s=-1.0)),
    "target is not a number": with_terms(targets=Targets(deadline_s=math.nan)),
    "long note": changed(note=b"x" * 5000),
    "past without output": changed(past=Past(1, [SampleRecord(0)])),
    "past of another sample": again(Past(2, [SampleRecord(0, [1])])),
    "past with other tokens": again(Past(2, [SampleRecord(1, [2])])),
    "past with unknown tokens": again(Past(2, [RECORD, SampleRecord(0, [10**6])])),
    "past with one sample twice": again(Past(2, [RECORD, RECORD])),
    "past beyond its samples": again(Past(2, [RECORD, SampleRecord(2, [1])])),
    "past with too many samples": again(Past(10**6, [RECORD])),
    "past with scores": again(Past(2, [SampleRecord(1, [3], [TokenLogprobs(-1.0, 1)])])),
    "past with too many cached tokens": again(Past(2, [RECORD], 3)),
    "past that is too long": again(Past(2, [RECORD, SampleRecord(0, [1] * 100)])),
}


def test_a_good_request_passes() -> None:
    check_request(GOOD, INFO)
    check_request(changed(id="cmpl-1f#2", index=2, num_prompt_tokens=2, attempt=3), INFO)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_request(BAD[name], INFO)


def test_a_good_past_passes() -> None:
    ended = SampleRecord(0, [1, 2], None, FinishReason.STOP)
    check_request(again(Past(2, [RECORD, ended])), INFO)


SCORED = changed(params=SamplingParams(max_tokens=9, logprobs=1), note=b"x")
SCORE = TokenLogprobs(-1.0, 1, (5,), (-1.0,))
BAD_HANDOVERS = {
    "another id": Handover("cmpl-2f", GOOD),
    "one sample": Handover("cmpl-1f", again(Past(2, [RECORD]))),
    "a bad request": Handover("cmpl-1f", BAD["large seed"]),
    "unknown tokens": Handover("cmpl-1f", GOOD, [SampleRecord(0, [-1])]),
    "a sample that is not there": Handover("cmpl-1f", GOOD, [SampleRecord(1, [1])]),
    "too many cached tokens": Handover("cmpl-1f", GOOD, num_cached_tokens=10**9),
    "scores that nobody asked for": Handover("cmpl-1f", GOOD, [SampleRecord(0, [1], [SCORE])]),
    "no scores": Handover("cmpl-1f", SCORED, [SampleRecord(0, [1])]),
    "too few scores": Handover("cmpl-1f", SCORED, [SampleRecord(0, [1, 2], [SCORE])]),
    "unknown tokens in scores": Handover(
        "cmpl-1f", SCORED, [SampleRecord(0, [1], [replace(SCORE, top_ids=(10**9,))])]
    ),
    "scores that do not match": Handover(
        "cmpl-1f", SCORED, [SampleRecord(0, [1], [replace(SCORE, top_logprobs=())])]
    ),
}


def test_a_good_handover_passes() -> None:
    check_handover(Handover("cmpl-1f"), INFO)
    check_handover(Handover("cmpl-1f", GOOD, [SampleRecord(0, [1, 2])], 1), INFO)
    check_handover(Handover("cmpl-1f", SCORED, [SampleRecord(0, [1], [SCORE])]), INFO)


@pytest.mark.parametrize("name", BAD_HANDOVERS)
def test_a_bad_handover_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_handover(BAD_HANDOVERS[name], INFO)


@pytest.mark.parametrize("name", ["a", "cmpl-1f-2#12", "A_b.c-9"])
def test_ids_of_samples(name: str) -> None:
    check_id(name)


@pytest.mark.parametrize("name", ["", "#1", "a#", "a#b", "a##1", "a b", "a:1", "ä", "a#1000"])
def test_what_is_no_id_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        check_id(name)


@pytest.mark.parametrize("name", ["", "a", "a:b", "-1:a", ":a", "1_0:a", "²:a", "9" * 20 + ":a"])
def test_what_is_no_wire_id_is_refused(name: str) -> None:
    with pytest.raises(WireError):
        split_wire_id(name)


MESSAGES = [
    encode(Hello(1, "test")),
    encode(Add(1, 5.5, GOOD)),
    encode(Abort(1, ["0:cmpl-1f"], FinishReason.STOP)),
    encode(Heartbeat(100)),
    encode(Add(1, 5.5, again(Past(2, [RECORD])))),
    encode(Adopt("cmpl-1f", "tenant")),
    encode(HandedOver(1.0, Handover("cmpl-1f", GOOD, [SampleRecord(0, [1, 2])], 1))),
    encode(EngineUp(1, "m", "t", 1, INFO)),
    encode(Reported(1.0, EventBatch(tokens=[TokensEmitted("0:a", (1,), None)]))),
]


def test_a_mutated_frame_is_a_message_or_a_wire_error() -> None:
    draw, num_refused = random.Random(3), 0
    for number in range(10_000):
        frame = mutate(MESSAGES[number % len(MESSAGES)], draw)
        decode = decode_engine_message if number % len(MESSAGES) > 5 else decode_frontend_message
        try:
            message = decode(frame)
        except WireError:
            num_refused += 1
            continue
        try:
            if isinstance(message, Add):
                check_request(message.request, INFO)
            elif isinstance(message, HandedOver):
                check_handover(message.handover, INFO)
        except InvalidRequestError:
            num_refused += 1
    assert num_refused > 5_000


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"])
def test_hostile_frames_are_wire_errors(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode_frontend_message(frame)


def test_an_abort_of_too_many_samples_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        decode_frontend_message(encode(Abort(1, ["0:a"] * 100_000)))


def test_a_wire_error_is_one_short_line() -> None:
    """It is written to the log of the other side."""
    with pytest.raises(WireError) as caught:
        decode_frontend_message(encode({"type": "x\nERROR forged" + "x" * 100_000}))
    assert len(str(caught.value)) <= 200 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "info",
    [
        replace(INFO, capacity=Capacity(64, 0, 128)),
        replace(INFO, capacity=Capacity(-1, 16, 128)),
        replace(INFO, max_num_seqs=0),
        replace(INFO, vocab_size=2**60),
    ],
)
def test_impossible_facts_of_an_engine_are_named(info: EngineInfo) -> None:
    assert check_engine(INFO, Credit()) == ""
    assert "impossible" in check_engine(info, Credit())


def test_times_become_ages_within_bounds() -> None:
    assert age_of(90.0, 100.0) == 10.0
    assert age_of(110.0, 100.0) == 0.0
    assert age_of(-1e30, 100.0) == MAX_AGE_S
    assert age_of(math.nan, 100.0) == 0.0
    step = Stepped(1, 990.0, 0.1, 3, 8, 1, 2, 1, 0, 1, 9)
    batch = EventBatch(finished=[Finished("a", 980.0, FinishReason.STOP, 3)], stepped=[step])
    moved = localize(batch, sent_at=991.0, now=50.0)
    assert moved.stepped[0].at == 49.0
    assert moved.finished[0].at == 39.0


def test_no_frontend_sees_the_requests_of_another() -> None:
    sessions, now = Sessions(Credit()), SystemClock().now()
    first, second = (sessions.open(name, "f", now) for name in (b"1", b"2"))
    for session in (first, second):
        session.live.add(changed(params=SamplingParams(max_tokens=9, n=2)))
    batch = EventBatch(
        forked=[Forked("2:0:cmpl-1f#1", 1.0, "2:0:cmpl-1f")],
        tokens=[TokensEmitted("1:0:cmpl-1f", (1,), None), TokensEmitted("7:0:x", (2,), None)],
        finished=[Finished("2:0:cmpl-1f", 1.0, FinishReason.STOP, 1)],
        stepped=[Stepped(1, 2.0, 0.1, 3, 8, 1, 2, 1, 0, 1, 9)],
    )
    parts = sessions.split(batch)
    assert parts[first].tokens == [TokensEmitted("0:cmpl-1f", (1,), None)]
    assert not parts[first].finished and not parts[second].tokens
    assert parts[second].forked == [Forked("0:cmpl-1f#1", 1.0, "0:cmpl-1f")]
    assert len(parts[first].stepped) == len(parts[second].stepped) == 1
    assert second.live.is_live(0, "cmpl-1f#1") and not second.live.is_live(0, "cmpl-1f")
    assert sorted(sessions.close(first)) == ["1:0:cmpl-1f", "1:0:cmpl-1f#1"]
    assert sessions.split(batch).keys() == {second}
