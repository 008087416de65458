"""What smaller numbers cost: the real SmolLM2 on a fixed text, against fp32 in plain torch.

The reference computes in fp32 on the dequantized weights of the file. Run with `-s` to see the
share of places where each form would choose the reference's token.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.live.loading import FP32, Form, load
from benchmarks.live.perplexity import Quality, Text, perplexity, read_text
from headway.executors.cpu.kernels import best_isa
from headway.text import Tokenizer

pytestmark = pytest.mark.model

NUM_TOKENS = 1000
"""Of 22,742, which --full takes: enough to tell the tolerances below from noise."""

needs_kernels = pytest.mark.skipif(best_isa() is None, reason="the compiled kernels were not built")


@pytest.fixture(scope="module")
def text(model_path: Path, is_full: bool) -> Text:
    text = read_text(Tokenizer.from_path(model_path))
    return text if is_full else replace(text, token_ids=text.token_ids[:NUM_TOKENS])


@pytest.fixture(scope="module")
def reference(model_path: Path, text: Text) -> Quality:
    quality = perplexity(load(model_path, FP32), text.token_ids, bos_token_id=text.bos_token_id)
    print(f"\nfp32: perplexity {quality.perplexity:.4f} over {quality.num_scored} tokens")
    return quality


@pytest.mark.parametrize(
    ("form", "tolerance"),
    [
        # int4 below computes the same, bit for bit: tests/executors/cpu/test_packing.py
        pytest.param(Form("bf16"), 0.005, marks=pytest.mark.full),
        # tests/executors/cpu/test_compiled.py judges attention over an int8 cache.
        pytest.param(Form("bf16", "int8"), 0.005, marks=[needs_kernels, pytest.mark.full]),
        pytest.param(Form("int8", "auto", "bf16"), 0.01, marks=[needs_kernels, pytest.mark.full]),
        # tests/parity/test_default_path.py judges int4, the default here, by its logits.
        pytest.param(Form("int4", "auto", "bf16"), 0.02, marks=[needs_kernels, pytest.mark.full]),
        pytest.param(Form("int4", "auto", "int8"), 0.02, marks=[needs_kernels, pytest.mark.full]),
    ],
)
def test_perplexity_is_close_to_that_of_fp32(
    model_path: Path, text: Text, reference: Quality, form: Form, tolerance: float
) -> None:
    model = load(model_path, form)
    quality = perplexity(model, text.token_ids, bos_token_id=text.bos_token_id)
    ratio = quality.ratio_to(reference)
    print(
        f"\n{form}: perplexity {quality.perplexity:.4f}, {ratio:.5f} times fp32's, "
        f"{quality.share_same_greedy(reference):.2%} of the greedy tokens the same"
    )
    # Far better than the reference would be as wrong as far worse.
    assert abs(ratio - 1.0) <= tolerance
