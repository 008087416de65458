"""Compares a data type with fp32 on the same weights, by tokens and logits.

The oracle is plain torch in fp32 on the weights of the file, dequantized; it makes the tokens of
transformers (tests/parity/test_smollm2.py). A form is compared with it in two ways: given the
oracle's tokens (teacher-forced), position by position; and left to itself (free-running), by how
many tokens it makes before the first that differs.

The expected error follows from rounding alone. A number rounded to bf16, whose significand has 8
bits, is off by at most 2^-8 of itself, and by EPSILON in the root mean square. A product of rounded
inputs with rounded weights is then off by sqrt(EPSILON^2 + weight^2) of its own size, as errors of
its many terms are independent. In a layer, weights count five times (values, output; gate, up,
down) and roundings of activations seven (the inputs of values, gate, up and down, values,
probabilities, the output of attention). Layers pass an error on, at most undiminished, so that the
squares add up over layers; the head adds one product. Neither the errors nor the thresholds are
fitted to the kernels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.live.loading import Form
from benchmarks.live.perplexity import BLOCK_SIZE, WINDOW
from benchmarks.support.parity_runs import Schedule, Tokens, run
from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.params import SamplingParams
from headway.executors.executor import ModelExecutor
from headway.executors.step_model import Span, StepModel

EPSILON = 2.0**-8 / math.sqrt(3) * math.sqrt(0.75 / (2 * math.log(2)))
"""Uniform within half a unit of the last place, for significands spread evenly by logarithm."""
INT8_STEP = 2.5 / 127 / math.sqrt(12)
"""Of int8: uniform within a step, which is 1/127 of the largest number of a group; that of 32
normal ones is 2.5 times their root mean square."""
CONFIG = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512)


def expected_error(form: Form, num_layers: int) -> float:
    """Return the largest RMS error of a logit by rounding, over the logits' spread."""
    # int4 uses the blocks of the file as they are; every form rounds to bf16.
    weight = EPSILON**2 + (INT8_STEP**2 if form.dtype == "int8" else 0.0)
    # Probabilities and values are never quantized, the five inputs of products are.
    product_input = EPSILON**2 + (INT8_STEP**2 if form.activation_dtype == "int8" else 0.0)
    layer = 5 * weight + 5 * product_input + 2 * EPSILON**2
    return math.sqrt(num_layers * layer + weight + product_input)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with the tokens and logits of the oracle."""

    prompt: Tokens
    expected: Tokens
    logits: torch.Tensor
    """Logits of the oracle at each of these tokens."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison of a form with the oracle.

    Errors are in units of the spread (standard deviation) of the oracle's logits at the position.
    """

    form: Form
    num_tokens: int
    num_same: int
    """Positions whose likeliest token is the oracle's, given the oracle's tokens."""
    rms_error: float
    max_error: float
    limit: float
    """Bound of `rms_error`, by `expected_error`."""
    least_same: float
    """Share of equal positions expected with errors of that size, less three deviations."""
    max_excuse: float
    """Largest lead of the oracle's token over the form's, relative to such errors."""
    prefixes: tuple[tuple[int, int], ...]
    """Free-running, for each prompt: tokens before the first difference, and all tokens."""

    @property
    def share_same(self) -> float:
        return self.num_same / self.num_tokens

    @property
    def num_whole(self) -> int:
        """Prompts whose tokens all equal the oracle's."""
        return sum(length == total for length, total in self.prefixes)

    @property
    def share_prefix(self) -> float:
        """Share of the free-running tokens before the first difference."""
        return sum(length for length, _ in self.prefixes) / self.num_tokens

    @property
    def max_limit(self) -> float:
        """Expected largest of this many normal, independent errors of the allowed size.

        It does not apply to int8, whose weight errors are the same at every position.
        """
        return self.limit * _largest_of(self.num_tokens * 50_000)


def _largest_of(count: int) -> float:
    """Return the standard deviations that bound the largest of `count` normal errors."""
    return math.sqrt(2 * math.log(2 * count))


def english_prompts(token_ids: Sequence[int], num_prompts: int) -> Iterator[tuple[Tokens, int]]:
    """Yield prompts of 5 to 400 tokens of a text, each with 32 or 64 tokens to make."""
    draw = random.Random(7)
    # Spread evenly on a logarithmic scale: short prompts show as much and cost less.
    lengths = [5, 400, *(int(5 * 80 ** draw.random()) for _ in range(num_prompts - 2))]
    starts = [draw.randrange(len(token_ids) - length) for length in lengths]
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        yield [*token_ids[start : start + length]], 64 if index % 8 == 0 else 32


@torch.inference_mode()
def make_cases(oracle: StepModel, prompts: Sequence[tuple[Tokens, int]]) -> list[Case]:
    """Return tokens and logits of the oracle for each prompt."""
    made = _generate(oracle, [prompt for prompt, _ in prompts], [count for _, count in prompts])
    return [
        Case(prompt, tokens, _logits(oracle, prompt, tokens))
        for (prompt, _), tokens in zip(prompts, made, strict=True)
    ]


def _generate(model: StepModel, prompts: list[Tokens], counts: list[int]) -> list[Tokens]:
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in counts]
    executor = ModelExecutor(model, WINDOW, SystemClock())
    collected = run(executor, Schedule(CONFIG), prompts, params)
    return [collected.of(index) for index in range(len(prompts))]


@torch.inference_mode()
def compare(model: StepModel, form: Form, cases: Sequence[Case]) -> Agreement:
    """Compare a form with the oracle, teacher-forced and free-running."""
    limit = expected_error(form, model.spec.num_layers)
    num_tokens = sum(len(case.expected) for case in cases)
    num_same, squares, max_error, max_excuse, num_turned = 0, 0.0, 0.0, 0.0, 0.0
    # The lead of one logit over another has two errors.
    turned = math.sqrt(2) * limit * _largest_of(num_tokens)
    for case in cases:
        wanted, got = case.logits, _logits(model, case.prompt, case.expected)
        spread = wanted.std(dim=-1, keepdim=True)
        errors = (got - wanted) / spread
        squares += float(errors.square().mean(dim=-1).sum())
        max_error = max(max_error, float(errors.abs().max()))
        chosen = got.argmax(dim=-1, keepdim=True)
        best = wanted.topk(2, dim=-1)
        num_same += int((chosen == best.indices[:, :1]).sum())
        lead = (best.values[:, :1] - wanted.gather(1, chosen)) / spread
        max_excuse = max(max_excuse, float(lead.max()) / turned)
        margin = (best.values[:, 0] - best.values[:, 1]) / spread[:, 0]
        num_turned += float(torch.special.ndtr(-margin / (math.sqrt(2) * limit)).sum())
    share = num_turned / num_tokens
    deviation = math.sqrt(share * (1 - share) / num_tokens)
    made = _generate(model, [case.prompt for case in cases], [len(case.expected) for case in cases])
    return Agreement(
        form=form,
        num_tokens=num_tokens,
        num_same=num_same,
        rms_error=math.sqrt(squares / num_tokens),
        max_error=max_error,
        limit=limit,
        least_same=1.0 - share - 3 * deviation,
        max_excuse=max_excuse,
        prefixes=tuple(
            (_common_prefix(case.expected, tokens), len(case.expected))
            for case, tokens in zip(cases, made, strict=True)
        ),
    )


def _logits(model: StepModel, prompt: Tokens, expected: Tokens) -> torch.Tensor:
    """Return the logits at each of the oracle's tokens, given the tokens before."""
    tokens = prompt + expected[:-1]
    rows = range(len(prompt) - 1, len(tokens))
    span = Span(tokens, 0, range(-(-len(tokens) // BLOCK_SIZE)))
    return torch.from_numpy(model.logits([span], rows))


def _common_prefix(expected: Tokens, made: Tokens) -> int:
    for at, (one, other) in enumerate(zip(expected, made, strict=True)):
        if one != other:
            return at
    return len(expected)
