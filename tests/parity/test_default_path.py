"""What the server computes by default against fp32 on the same weights: the real SmolLM2.

`python -m benchmarks.live.quality "$model" --prompts 64` takes all prompts; `-s` shows the figures.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.live.agreement import Agreement, Case, compare, english_prompts, make_cases
from benchmarks.live.loading import FP32, Form, load
from headway.executors.cpu.kernels import best_isa
from headway.text import Tokenizer

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(best_isa() is None, reason="the compiled kernels are not built"),
]

NUM_PROMPTS = 8
NUM_OUTPUTS = 16
# bf16 computes what int4 does here, bit for bit: tests/executors/cpu/test_packing.py
FORMS = [
    Form("int4", activation_dtype="bf16"),
    Form("int4", activation_dtype="int8"),
    pytest.param(Form("bf16"), marks=pytest.mark.full),
    pytest.param(Form("int8", activation_dtype="bf16"), marks=pytest.mark.full),
]
TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def cases(model_path: Path) -> list[Case]:
    token_ids = Tokenizer.from_path(model_path).encode(TEXT.read_text())
    prompts = [(prompt, NUM_OUTPUTS) for prompt, _ in english_prompts(token_ids, NUM_PROMPTS)]
    return make_cases(load(model_path, FP32), prompts)


@pytest.fixture(scope="module", params=FORMS)
def agreement(request: pytest.FixtureRequest, cases: list[Case], model_path: Path) -> Agreement:
    found = compare(load(model_path, request.param), request.param, cases)
    print(
        f"\n{request.param}: {found.share_same:.2%} of {found.num_tokens} positions the same "
        f"(at least {found.least_same:.2%}); free-running {found.num_whole} of {NUM_PROMPTS} "
        f"prompts whole, {found.share_prefix:.1%} of the tokens before the first that differs; "
        f"logits off by {found.rms_error:.3%} (at most {found.limit:.3%}), largest "
        f"{found.max_error:.2%} (at most {found.max_limit:.2%}); excuse {found.max_excuse:.2f}"
    )
    return found


def test_logits_are_off_by_no_more_than_rounding_gives(agreement: Agreement) -> None:
    assert 0 < agreement.rms_error <= agreement.limit


def test_no_logit_is_off_by_more_than_so_many_roundings_give(agreement: Agreement) -> None:
    if agreement.form.dtype == "int8":
        pytest.skip("int8 quantizes the file's weights anew: errors that are not independent")
    assert agreement.max_error <= agreement.max_limit


def test_the_likeliest_token_is_the_oracles(agreement: Agreement) -> None:
    assert agreement.share_same >= agreement.least_same


def test_another_token_is_chosen_only_where_rounding_can_turn_the_order(
    agreement: Agreement,
) -> None:
    assert agreement.max_excuse <= 1.0


def test_free_running_differs_only_after_a_position_that_rounding_can_turn(
    agreement: Agreement,
) -> None:
    """Up to its first difference a free run is the forced one: as many prompts come out whole as
    have no position where the forced run chose otherwise."""
    num_other = agreement.num_tokens - agreement.num_same
    assert len(agreement.prefixes) - agreement.num_whole <= num_other
