from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from headway.text import Tokenizer
from headway.text.loaded import LoadedTokenizer

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    chunks, start = [], 0
    for size in [*sizes, len(ids)]:
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def check(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(skip)
    deltas = [detokenizer.push(chunk) for chunk in cut(ids, sizes)]
    whole = tokenizer.decode(ids, skip)
    assert "".join(deltas) + detokenizer.finish() == whole
    if "\ufffd" not in whole:
        assert not any("\ufffd" in delta for delta in deltas)
    return whole


IDS = st.lists(st.integers(0, 300), max_size=30)
SIZES = st.lists(st.integers(0, 4), max_size=10)


@SHARED
@given(ids=IDS, sizes=SIZES, skip=st.booleans())
def test_byte_level_deltas_add_up_and_match_the_library(byte_level, ids, sizes, skip):
    whole = check(byte_level, ids, sizes, skip)
    assert whole == byte_level._backend.decode(ids, skip_special_tokens=skip)


@SHARED
@given(ids=IDS, sizes=SIZES, skip=st.booleans())
def test_sentencepiece_deltas_add_up(spm, ids, sizes, skip):
    whole = check(spm, ids, sizes, skip)
    if "\ufffd" not in whole:
        assert whole == spm._backend.decode(ids, skip_special_tokens=skip)


@SHARED
@given(text=st.text(max_size=20).filter(lambda text: "▁" not in text), sizes=SIZES)
def test_text_survives_the_round_trip(byte_level, spm, text, sizes):
    for tokenizer in (byte_level, spm):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert check(tokenizer, ids, sizes, skip=False) == text


@pytest.mark.model
@SHARED
@given(data=st.data(), skip=st.booleans())
def test_real_vocabulary(smollm, data, skip):
    ids = data.draw(st.lists(st.integers(0, smollm.vocab_size - 1), max_size=40))
    whole = check(smollm, ids, data.draw(SIZES), skip)
    assert whole == smollm._backend.decode(ids, skip_special_tokens=skip)


def test_half_a_character_waits_and_becomes_a_mark_only_at_the_end(byte_level):
    first, *rest = [ord(c) for c in "你".encode().decode("latin-1")]
    detokenizer = byte_level.detokenizer()
    assert detokenizer.push([first]) == ""
    assert detokenizer.push(rest) == "你"
    assert detokenizer.push([first, ord("a")]) == "\ufffda"
    assert detokenizer.push([first]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_the_start_space_is_kept_when_text_came_before(spm):
    ids = spm.encode("hi", add_special_tokens=False)
    assert spm.decode(ids) == "hi"
    assert spm.detokenizer(after=[1]).push(ids) == " hi"


@pytest.mark.timing
def test_a_run_of_stray_bytes_costs_linear_time(byte_level):
    detokenizer = byte_level.detokenizer()
    started_at = time.perf_counter()
    for _ in range(20_000):
        detokenizer.push([0xE4])
    assert time.perf_counter() - started_at < 2


def other_tokenizer(decoder: decoders.Decoder | None) -> Tokenizer:
    words = ["▁the", "▁", "cat", "##s", "▁cat", "s", ".", "do", "not", "\ufffd", "▁▁"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, "."))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<s>")])
    return Tokenizer(LoadedTokenizer(backend, None, (), {}, None, longest_token=1))


OTHER_DECODERS = {
    "metaspace": other_tokenizer(decoders.Metaspace()),
    "wordpiece": other_tokenizer(decoders.WordPiece(cleanup=False)),
    "none": other_tokenizer(None),
}


@pytest.mark.parametrize("name", OTHER_DECODERS)
@SHARED
@given(ids=st.lists(st.integers(0, 12), max_size=20), sizes=SIZES, skip=st.booleans())
def test_other_decoders(name, ids, sizes, skip):
    tokenizer = OTHER_DECODERS[name]
    detokenizer = tokenizer.detokenizer(skip)
    deltas = [detokenizer.push(chunk) for chunk in cut(ids, sizes)]
    whole = tokenizer._backend.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas) + detokenizer.finish() == whole


def test_other_decoders_continue_a_prompt():
    tokenizer = OTHER_DECODERS["metaspace"]
    detokenizer = tokenizer.detokenizer(after=[0])
    assert detokenizer.push([4, 5]) + detokenizer.finish() == " cats"
    assert tokenizer.decode([4, 5]) == "cats"


def test_a_decoder_that_takes_text_back_waits_for_the_end():
    tokenizer = other_tokenizer(decoders.WordPiece(cleanup=True))
    detokenizer = tokenizer.detokenizer()
    sent = detokenizer.push([7, 8]) + detokenizer.push([2, 3]) + detokenizer.finish()
    assert sent.startswith("do")
    assert sent.endswith("cats")
