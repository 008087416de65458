"""What a client gets after a cursor does not depend on how its stream was cut into events."""

from __future__ import annotations

import random

import pytest

from headway.core.events import Finished, TokensEmitted
from headway.core.params import MAX_SAMPLES, SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.engine.client import streams
from headway.engine.client.outputs import REPLAY_SCORED_TOKENS, SampleDelta
from headway.engine.client.streams import RequestStream
from headway.engine.client.transcript import START, Cursor, Position, Transcript
from headway.engine.process.messages import AddRequest, Handover, SampleRecord
from headway.errors import ReaderReplacedError
from headway.text import Tokenizer

PIECES = ["a", "b", "ab", " ", "é", "你", "😀", "stop", "x"]


def make_stream(tokenizer: Tokenizer, **params: object) -> RequestStream:
    options = {"max_tokens": 10_000, "logprobs": 0, **params}
    command = AddRequest("a", [65], SamplingParams(**options), 7, 0.0, note=b"note")  # pyright: ignore
    return RequestStream(command, tokenizer)


def feed(stream: RequestStream, token_ids: list[int], draw: random.Random) -> None:
    """Give a stream tokens of its only sample in random pieces, as an engine would."""
    assert stream.transcript is not None
    sample = stream.samples["a"]
    at = 0
    while at < len(token_ids) and not sample.is_finished:
        end = at + draw.randint(1, 4)
        ids = tuple(token_ids[at:end])
        scores = tuple(TokenLogprobs(-float(token_id), 1) for token_id in ids)
        event = TokensEmitted("a", ids, scores)
        stream.transcript.emit(0, event)
        stream.put(sample.push(event))
        at = end


def end(stream: RequestStream) -> None:
    sample = stream.samples["a"]
    if not sample.is_finished:
        assert stream.transcript is not None
        stream.transcript.finish(0, FinishReason.LENGTH)
        stream.put(sample.finish(Finished("a", 0.0, FinishReason.LENGTH, sample.num_tokens)))


async def read(stream: RequestStream) -> list[SampleDelta]:
    """Return all deltas there are."""
    deltas: list[SampleDelta] = []
    while stream._unread or stream._replay:
        deltas += await stream.take(stream.num_readers)
    return deltas


def text_of(deltas: list[SampleDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("seed", range(40))
async def test_the_text_after_n_tokens_is_the_same_however_it_was_cut(
    tokenizer: Tokenizer, seed: int
) -> None:
    """Stop strings, parts of characters and a minimum of tokens hold back text."""
    draw = random.Random(seed)
    text = "".join(draw.choices(PIECES, k=30)) + "!"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    options = {"stop": ("stop", "!x"), "min_tokens": draw.choice((0, 5))} if seed % 2 else {}
    first, second = (make_stream(tokenizer, **options) for _ in range(2))
    num_before = draw.randrange(1, len(token_ids))
    # One stream is cut where its reader happened to be, the other is replayed in one piece.
    feed(first, token_ids[:num_before], draw)
    before = await read(first)
    num_read = sum(len(delta.token_ids) for delta in before)
    feed(first, token_ids[num_before:], draw)
    end(first)
    rest = await read(first) if first._unread else []
    feed(second, token_ids, draw)
    end(second)
    ended = bool(before[-1].finish_reason)
    second.rewind(Cursor((Position(num_read, ended),)), tokenizer)
    replayed = await read(second)
    assert text_of(replayed) == text_of(rest)
    assert [one.finish_reason for one in replayed if one.finish_reason] == [
        one.finish_reason for one in rest if one.finish_reason
    ]
    if not options:  # tokens after a stop string, in one event with it, are not the same
        scores = [score for delta in rest for score in delta.logprobs or ()]
        assert [score for delta in replayed for score in delta.logprobs or ()] == scores
        assert [one for delta in replayed for one in delta.skipped_ids] == token_ids[:num_read]


async def test_a_long_replay_comes_in_pieces(tokenizer: Tokenizer) -> None:
    """Other streams have their turn between two pieces."""
    stream, draw = make_stream(tokenizer), random.Random(1)
    feed(stream, [97] * 200, draw)
    stream.rewind(Cursor((Position(10),)), tokenizer)
    feed(stream, [98] * 3, draw)
    pieces = []
    while stream._unread or stream._replay:
        pieces.append(await stream.take(stream.num_readers))
    assert max(len(one.token_ids) for piece in pieces for one in piece) <= REPLAY_SCORED_TOKENS
    assert text_of([one for piece in pieces for one in piece]) == "a" * 190 + "b" * 3


async def test_a_stream_with_very_much_output_is_not_resumable(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_SIZE", 20)
    stream = make_stream(tokenizer)
    event = TokensEmitted("a", (97,) * 10, None)
    stream.record(0, event)
    assert stream.is_resumable
    stream.record(0, event)
    stream.record(0, event)
    assert not stream.is_resumable and stream.transcript is None


async def test_a_cursor_beyond_the_output_waits_for_it(tokenizer: Tokenizer) -> None:
    """An engine that has fallen behind computes again what the client has: none of it is sent."""
    stream, draw = make_stream(tokenizer), random.Random(1)
    token_ids = tokenizer.encode("abcdefgh", add_special_tokens=False)
    feed(stream, token_ids[:2], draw)
    stream.rewind(Cursor((Position(5),)), tokenizer)
    feed(stream, token_ids[2:], draw)
    deltas = await read(stream)
    assert text_of(deltas) == "fgh"
    assert [one for delta in deltas for one in delta.token_ids] == token_ids[5:]


async def test_only_the_newest_reader_gets_output(tokenizer: Tokenizer) -> None:
    stream = make_stream(tokenizer)
    reader = stream.num_readers
    stream.rewind(Cursor(), tokenizer)
    feed(stream, tokenizer.encode("ab", add_special_tokens=False), random.Random(1))
    with pytest.raises(ReaderReplacedError):
        await stream.take(reader)
    assert text_of(await read(stream)) == "ab"


def test_an_adopted_stream_ends_at_its_stop_string(tokenizer: Tokenizer) -> None:
    """The engine knows no text: it went on while no frontend read."""
    token_ids = tokenizer.encode("abstopcd", add_special_tokens=False)
    params = SamplingParams(max_tokens=50, stop=("stop",))
    command = AddRequest("a", [65], params, 7, 0.0, note=b"note", attempt=3)
    handover = Handover("a", command, [SampleRecord(0, list(token_ids))], num_cached_tokens=0)
    stream = RequestStream.adopt(handover, tokenizer, 0.0)
    assert not stream.unfinished_ids
    num_to_stop = len(tokenizer.encode("abstop", add_special_tokens=False))
    assert stream.num_output_tokens == num_to_stop


def test_an_adopted_stream_is_sent_again_whole(tokenizer: Tokenizer) -> None:
    """With the output of finished samples, so that yet another frontend could continue it."""
    params = SamplingParams(max_tokens=50, n=2)
    command = AddRequest("a", [65], params, 7, 0.0, note=b"note", attempt=3)
    records = [SampleRecord(0, [97, 98], None, FinishReason.STOP), SampleRecord(1, [99])]
    handover = Handover("a", command, records, num_cached_tokens=0, is_running=False)
    stream = RequestStream.adopt(handover, tokenizer, 0.0)
    (again,) = stream.commands(1.0)
    assert (again.id, again.attempt, again.note) == ("a#1", 4, b"note")
    assert again.token_ids == [65, 99] and again.past is not None
    assert again.past.num_samples == 2
    kept = {one.index: (one.token_ids, one.reason) for one in again.past.samples}
    assert kept == {1: ([99], None), 0: ([97, 98], FinishReason.STOP)}


@pytest.mark.parametrize("text", ["", "0", "12e", "3,,7e", "1," * 5])
def test_a_cursor_is_its_text(text: str) -> None:
    cursor = Cursor.parse(text)
    assert cursor is not None and str(cursor) == text


@pytest.mark.parametrize(
    "text", ["e", "-1", "1.5", "1e2", "x", "1 ", " 1", "٣", "1" * 10, "1," * MAX_SAMPLES]
)
def test_any_other_text_is_no_cursor(text: str) -> None:
    assert Cursor.parse(text) is None


def test_a_cursor_without_a_sample_is_at_its_start() -> None:
    assert Cursor().of(7) == START and Cursor((Position(3),)).of(0).num_tokens == 3


def test_a_prompt_that_ends_before_its_fork_ends_with_all() -> None:
    transcript = Transcript(3)
    transcript.finish(0, FinishReason.LENGTH)
    assert transcript.is_finished
