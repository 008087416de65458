from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.support.tiny_tokenizers import (
    SPM_WORDS,
    spm_parts,
    write_byte_level,
    write_gguf,
    write_spm,
)
from headway.errors import ModelLoadError
from headway.gguf_header import SkippedStrings, read_header
from headway.text import Tokenizer


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


# --- metadata ---


def test_metadata_is_read_as_the_format_library_reads_it(tmp_path):
    path = write_byte_level(
        tmp_path / "m.gguf", pre="smollm", scores=[0.5, -1.5], add_bos_token=True
    )
    fields = GGUFReader(path).fields
    ours = read_header(path).metadata
    expected = {k: f.contents() for k, f in fields.items() if not k.startswith("GGUF.")}
    assert ours == expected
    without = read_header(path, has_strings=False)
    assert without.metadata["tokenizer.ggml.tokens"] == SkippedStrings(
        len(expected["tokenizer.ggml.tokens"])
    )
    assert without.tensors == read_header(path).tensors
    assert without.metadata.keys() == ours.keys()


def test_a_truncated_header_is_refused(tmp_path):
    whole = write_byte_level(tmp_path / "m.gguf", pre="smollm").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 200, 7), len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match="not a readable GGUF"):
            read_header(path)
        with pytest.raises(ModelLoadError, match="not a readable GGUF"):
            read_header(path, has_strings=False)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 not a model",
        b"GGUF" + (1).to_bytes(4, "little") + bytes(40),
        b"GGUF" + (3).to_bytes(4, "big") + bytes(40),
        b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16 + bytes(8),
        # One key, an empty name, an array of 2**60 floats.
        b"GGUF\x03\0\0\0" + bytes(8) + b"\x01" + bytes(15) + b"\x09\0\0\0\x06\0\0\0" + b"\x10" * 8,
    ],
)
def test_what_is_not_gguf_is_refused(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        Tokenizer.from_gguf(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        Tokenizer.from_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadError, match=r"none\.gguf"):
        Tokenizer.from_path(tmp_path / "none.gguf")


# --- byte-level ---


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234"]),
        ("default", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_each_kind_cuts_numbers_its_own_way(tmp_path, pre, expected):
    path = write_byte_level(tmp_path / "m.gguf", pre=pre)
    assert texts(Tokenizer.from_gguf(path), "1234") == expected


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_each_kind_keeps_a_space_with_its_word(tmp_path, pre):
    tokenizer = Tokenizer.from_gguf(write_byte_level(tmp_path / "m.gguf", pre=pre))
    assert texts(tokenizer, "hi hi") == ["hi", " hi"]


def test_a_file_without_a_kind_is_cut_like_gpt2(tmp_path):
    assert texts(Tokenizer.from_gguf(write_byte_level(tmp_path / "m.gguf")), "1234") == ["1234"]


def test_llama3_takes_a_whole_word_without_merges(tmp_path):
    llama = Tokenizer.from_gguf(write_byte_level(tmp_path / "l.gguf", pre="llama3"))
    gpt2 = Tokenizer.from_gguf(write_byte_level(tmp_path / "g.gguf", pre="gpt-2"))
    assert texts(llama, "hello") == ["hello"]
    assert texts(gpt2, "hello") == list("hello")


def test_qwen2_composes_characters(tmp_path):
    tokenizer = Tokenizer.from_gguf(write_byte_level(tmp_path / "m.gguf", pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_an_unknown_kind_is_refused_by_name(tmp_path):
    with pytest.raises(ModelLoadError, match=r"'my-own'.*smollm"):
        Tokenizer.from_gguf(write_byte_level(tmp_path / "m.gguf", pre="my-own"))
    with pytest.raises(ModelLoadError, match=r"'bert'.*gpt2"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "b.gguf", "bert", ["a", "b"]))


def test_ending_ids_hold_eot(byte_level):
    eos_id = byte_level.encode("</s>")[0]
    assert byte_level.eos_token_ids == (eos_id, eos_id + 1)


def test_control_tokens_are_skipped_and_user_defined_ones_are_not(byte_level):
    ids = byte_level.encode("<s>hi<think>hi</s>")
    assert byte_level.decode(ids) == "hi<think>hi"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<s>hi<think>hi</s>"
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("pre", "keys", "num_added"),
    [
        ("gpt-2", {}, 0),
        ("gpt-2", {"add_bos_token": True}, 1),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, 2),
        ("llama-bpe", {}, 1),
        ("llama-bpe", {"add_bos_token": False}, 0),
    ],
)
def test_added_tokens_follow_the_file(tmp_path, pre, keys, num_added):
    tokenizer = Tokenizer.from_gguf(write_byte_level(tmp_path / "m.gguf", pre=pre, **keys))
    with_added, plain = tokenizer.encode("hi"), tokenizer.encode("hi", add_special_tokens=False)
    assert len(with_added) - len(plain) == num_added
    if num_added:
        assert with_added[0] == tokenizer.bos_token_id
    if num_added == 2:
        assert with_added[-1] == tokenizer.eos_token_ids[0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"eos_token_id": 999_999}, "eos_token_id is 999999"),
        ({"token_type": [1, 1]}, "differ in length"),
        ({"merges": ["q zz"]}, "cannot be built"),
        ({"merges": ["nospace"]}, "cannot be built"),
    ],
)
def test_a_contradictory_file_is_refused(tmp_path, keys, message):
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_gguf(write_byte_level(tmp_path / "m.gguf", pre="gpt-2", **keys))


def test_a_repeated_token_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="repeated"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", "gpt2", ["a", "b", "a"]))


def test_bos_wanted_but_not_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gpt2", ["a", "b"], add_bos_token=True)
    with pytest.raises(ModelLoadError, match="bos_token_id is not"):
        Tokenizer.from_gguf(path)


def test_token_bytes_are_the_true_bytes(byte_level):
    first = byte_level.encode("你")[0]
    assert byte_level.token_bytes(first) == b"\xe4\xbd"
    assert byte_level.token_text(first) == "\ufffd"
    assert byte_level.token_bytes(byte_level.vocab_size + 5) == b""
    assert byte_level.token_text(byte_level.encode("<think>")[0]) == "<think>"


# --- SentencePiece ---


def best_pair_first(text: str) -> list[str]:
    """Joins the neighbours whose union scores best, leftmost first, until none is known."""
    tokens, scores, types = spm_parts()
    known = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    pieces = list(text)
    while True:
        pairs = [(-known[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in known]
        if not pairs:
            return pieces
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="hitea ", min_size=1, max_size=20))
def test_merging_follows_the_scores(spm: Tokenizer, text):
    tokens = spm_parts()[0]
    ids = spm.encode(text, add_special_tokens=False)
    assert [tokens[i] for i in ids] == best_pair_first("▁" + text.replace(" ", "▁"))


def test_sentencepiece_adds_bos_and_a_space(spm: Tokenizer):
    tokens = spm_parts()[0]
    assert [tokens[i] for i in spm.encode("the hi")] == ["<s>", "▁the", "▁hi"]
    assert [tokens[i] for i in spm.encode("</s>hi")] == ["<s>", "</s>", "▁hi"]


def test_sentencepiece_without_bos_and_space(tmp_path):
    path = write_spm(tmp_path / "m.gguf", add_bos_token=False, add_space_prefix=False)
    tokenizer = Tokenizer.from_gguf(path)
    assert texts(tokenizer, "the hi") == ["the", " hi"]
    assert tokenizer.encode("hi")[0] != tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer.encode(" hi")) == " hi"


def test_unknown_characters_fall_back_to_bytes(spm: Tokenizer):
    ids = spm.encode("hi 你", add_special_tokens=False)
    assert b"".join(spm.token_bytes(i) for i in ids) == " hi 你".encode()
    assert spm.token_bytes(ids[-1]) == "你".encode()[-1:]
    assert spm.decode(ids) == "hi 你"


def test_sentencepiece_with_its_own_merges(tmp_path):
    path = write_spm(tmp_path / "m.gguf", merges=["h i", "▁ hi"])
    assert texts(Tokenizer.from_gguf(path), "hi the") == [" hi", " ", "t", "h", "e"]


def test_sentencepiece_without_scores_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="score"):
        Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", "llama", SPM_WORDS))


def test_a_long_text_keeps_no_other_thread_waiting(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(write_byte_level(tmp_path / "tokenizer.gguf", pre="gpt-2"))
    text, encoded = "0123456789 " * 50_000, list[int]()
    thread = threading.Thread(target=lambda: encoded.extend(tokenizer.encode(text)))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert encoded
    assert num_turns > 10, "the other thread had no turn while the text was encoded"
