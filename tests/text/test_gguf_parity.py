"""The real model's tokenizer against an independent reading of the same file."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from headway.text import Tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog. It's what they'd do; we'll see, I've heard.",
    "IT'S WE'LL DON'T",
    "def f(x: int) -> str:\n    return f'{x!r}'  # done\n\n\nclass A:\n\tpass\n",
    "#include <stdio.h>\r\nint main(void) { return 0; }\r\n",
    "😀 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ❤️",
    "你好\uff0c世界。今日は良い天気ですね。안녕하세요 세계",
    "Привет, мир! Καλημέρα Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "e\u0301 n\u0303 Z\u0351\u036b\u0343a\u0328l\u0321g\u0334o\u0315",
    "0 1 12 123 1234 12345 3.14159 1e-9 0xFF 1,000,000",
    "a1b22c333 v2.0.1 2024-01-31T23:59:59Z",
    "  leading", "trailing  ", "a  b   c    d\t\te\n\n\nf \n g", "\u00a0\u2003\u3000x",
    " " * 50 + "x" + " " * 50,
    "\n" * 20,
    "...!!!???---___===###",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|> text <|im_end|><|im_end|> <|im_st art|> <repo_name>x<file_sep>y",
    "<| im_end |> <|IM_END|> |im_end|",
    "\x00\x01\x07\x7f\u200b\ufeff\ufffd",
    "supercalifragilisticexpialidocious" * 5,
]  # fmt: skip
# Numbers that a vocabulary holds together with the space before them.
OTHER_NUMBERS = ["½ cup, 1 ½, x², Ⅷ Ⅸ", "\u0663\u0664 \u0665", "①②③ 一二三"]
TEXT = st.text(max_size=60).filter(
    lambda text: not any(c.isnumeric() and not c.isascii() for c in text)
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_encodes_as_the_oracle_does(smollm: Tokenizer, oracle, text, add_special_tokens):
    expected = oracle.encode(text, add_special_tokens=add_special_tokens)
    assert smollm.encode(text, add_special_tokens) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=TEXT)
def test_encodes_any_text_as_the_oracle_does(smollm: Tokenizer, oracle, text):
    expected = oracle.encode(text, add_special_tokens=False)
    ids = smollm.encode(text, add_special_tokens=False)
    assert ids == expected
    for skip in (False, True):
        assert smollm.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", [text for text in TEXTS if not text.startswith("\x00")])
def test_round_trip(smollm: Tokenizer, text):
    assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def corrected_oracle(oracle):
    # The oracle cuts as GPT-2 does whatever `tokenizer.ggml.pre` says; `smollm` isolates digits.
    backend = copy.deepcopy(oracle.backend_tokenizer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return backend


@pytest.mark.parametrize("text", [*TEXTS, *OTHER_NUMBERS])
def test_encodes_numbers_as_the_corrected_oracle_does(smollm: Tokenizer, corrected_oracle, text):
    assert smollm.encode(text) == corrected_oracle.encode(text).ids


def test_digits_stand_alone(smollm: Tokenizer):
    ids = smollm.encode("in 2024")
    assert [smollm.token_text(token_id) for token_id in ids] == ["in", " ", "2", "0", "2", "4"]


def test_facts(smollm: Tokenizer):
    assert smollm.vocab_size == 49152
    assert smollm.bos_token_id == 1
    assert smollm.eos_token_ids == (2,)
    assert smollm.special_tokens["bos_token"] == "<|im_start|>"
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.chat_template is not None


def test_token_bytes_add_up_to_the_text(smollm: Tokenizer):
    text = "naïve 你好 👩‍👩‍👧 <|im_end|>"
    ids = smollm.encode(text)
    assert b"".join(smollm.token_bytes(token_id) for token_id in ids) == text.encode()
    assert any("\ufffd" in smollm.token_text(token_id) for token_id in ids)


@pytest.mark.timing
def test_loads_quickly(model_path: Path):
    started_at = time.perf_counter()
    Tokenizer.from_gguf(model_path)
    assert time.perf_counter() - started_at < 2


@pytest.mark.parametrize("unit", ["a", " ", "\n", "7", "你", "e\u0301", "hello ", "<|im_", "!"])
def test_encoding_costs_linear_time(smollm: Tokenizer, unit):
    def seconds(num_chars: int) -> float:
        text = unit * (num_chars // len(unit))
        started_at = time.perf_counter()
        smollm.encode(text)
        return time.perf_counter() - started_at

    # Linear work gives 8, quadratic work 64; a busy machine gets three tries.
    assert any(seconds(80_000) < 30 * max(seconds(10_000), 0.002) for _ in range(3))
