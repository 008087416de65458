from __future__ import annotations

from headway.text import OutputText, StopStrings, TextDelta, Tokenizer


def output(tokenizer: Tokenizer, *stops: str, include: bool = False) -> OutputText:
    return OutputText(tokenizer.detokenizer(), StopStrings(stops, include))


def test_text_flows_token_by_token(byte_level: Tokenizer):
    text = output(byte_level)
    ids = byte_level.encode("hi 你 hi")
    assert "".join(text.push([token_id]).text for token_id in ids) == "hi 你 hi"
    assert text.finish() == TextDelta("")


def test_stop_string_spans_tokens(byte_level: Tokenizer):
    text = output(byte_level, "i 你")
    deltas = [text.push([token_id]) for token_id in byte_level.encode("hi hi 你 hi")]
    assert "".join(delta.text for delta in deltas) == "hi h"
    assert deltas[-1].stop == "i 你"
    assert text.finish() == TextDelta("", "i 你")
    text.check()


def test_stop_string_inside_one_push(byte_level: Tokenizer):
    text = output(byte_level, "2", include=True)
    assert text.push(byte_level.encode("1234")) == TextDelta("12", "2")


def test_finish_releases_what_was_held(byte_level: Tokenizer):
    text = output(byte_level, "hi!")
    assert text.push(byte_level.encode("oh hi")) == TextDelta("oh ")
    assert text.push(byte_level.encode("你")[:1]) == TextDelta("")
    assert text.finish() == TextDelta("hi\ufffd")


def test_last_flush_can_complete_a_stop_string(byte_level: Tokenizer):
    text = output(byte_level, "\ufffd")
    assert text.push([0xF0]) == TextDelta("")
    assert text.finish() == TextDelta("", "\ufffd")
