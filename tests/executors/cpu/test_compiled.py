"""The compiled kernels: close to fp32 torch, and to the last bit independent of company."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from headway.core.params import SamplingParams
from headway.core.plan import Sample
from headway.executors.cpu import kernels
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.cpu.sampling import Samplings
from headway.executors.load import ModelOptions, load_model
from headway.executors.sampling import SampleRow
from headway.executors.spec import LinearScaling, Llama3Scaling, ModelSpec
from headway.executors.step_model import Span, StepModel
from headway.executors.weights.names import EMBEDDING, HEAD, model_shapes
from tests.support.tiny import MemoryCheckpoint, tiny_spec

BEST = kernels.best_isa()
if BEST is None:
    pytest.skip("the compiled kernels are not built", allow_module_level=True)

ISAS = kernels.ISA[: kernels.ISA.index(BEST) + 1]
TOKENS = [(7 * i + i * i // 3) % 47 for i in range(70)]
LAST = len(TOKENS) - 1
TABLE = [*range(5)]
every_isa = pytest.mark.parametrize("isa", ISAS)
every_kv_dtype = pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])


def spec_of(**changes: Any) -> ModelSpec:
    small = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 48}
    return tiny_spec(**{**small, "max_model_len": 256, **changes})


# More inputs than are opened at a time, and groups of heads that do not divide a tile.
WIDE = spec_of(
    hidden_size=608, intermediate_size=64, num_heads=6, windows=(20, None), tie_embeddings=True
)


def weights_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Random weights of bf16 that keep the size of what passes through them."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, shape in model_shapes(spec).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1.0 + 0.3 * values
        elif name.endswith("bias"):
            values *= 0.3
        elif name != EMBEDDING:
            values *= 1.3 / math.sqrt(shape[-1])
        weights[name] = values.bfloat16().float()
    return weights


@dataclass
class Case:
    """A model that only waits for an instruction set and the like."""

    spec: ModelSpec
    weights: dict[str, torch.Tensor]

    def load(self, isa: str | None, dtype: str = "bf16", **options: Any) -> StepModel:
        sizes = {"num_blocks": 64, "block_size": 16, "max_model_len": 256, **options}
        checkpoint = MemoryCheckpoint(self.spec, self.weights)
        return load_model(checkpoint, ModelOptions(dtype=dtype, kernels=isa, **sizes))

    def compiled(self, isa: str, dtype: str = "bf16", **options: Any) -> CompiledModel:
        """Whatever is read from its store without having been written is NaN."""
        model = self.load(isa, dtype, **options)
        assert isinstance(model, CompiledModel)
        poison(model, range(model.num_blocks))
        return model


def case_of(spec: ModelSpec) -> Case:
    return Case(spec, weights_of(spec))


def poison(
    model: CompiledModel, block_ids: Sequence[int], byte: int = 0xFF, part: float = 1.0
) -> None:
    """Fill blocks in all layers; bytes of ones are NaN in every format that has one.

    The first half of each head's part of a block is its keys.
    """
    num_heads = model.spec.num_kv_heads
    size = model._library.hw_block_bytes(model._model) // num_heads
    for layer in range(model.spec.num_layers):
        for block_id in block_ids:
            at = (layer * model.num_blocks + block_id) * num_heads
            for head in range(num_heads):
                ctypes.memset(model._model.kv + (at + head) * size, byte, int(size * part))


@dataclass(frozen=True)
class Scores:
    """Best token and its logit of each row."""

    best: list[float]
    best_ids: list[int]


def scores_of(
    model: CompiledModel, spans: Sequence[Span], rows: Sequence[int] | None = None
) -> tuple[Scores, torch.Tensor]:
    """Return scores and logits of `rows`; by default of every token."""
    if rows is None:
        rows = range(sum(len(span.token_ids) for span in spans))
    logits = torch.empty((len(rows), model.spec.vocab_size))
    none = Samplings((), model.spec.vocab_size)
    best_ids, best = model._step(spans, rows, none, logits.data_ptr())
    return Scores(best.tolist(), best_ids.tolist()), logits


def logits_of(model: StepModel, *spans: Span) -> torch.Tensor:
    places = range(sum(len(span.token_ids) for span in spans))
    return torch.from_numpy(model.logits(spans, places))


def in_chunks(
    model: StepModel, sizes: Sequence[int], table: Sequence[int] = TABLE, start: int = 0
) -> torch.Tensor:
    """The logits of TOKENS from `start` on; the last size is repeated as often as needed."""
    parts = []
    while start < len(TOKENS):
        size, sizes = sizes[0], sizes[1:] or sizes
        parts.append(logits_of(model, Span(TOKENS[start : start + size], start, table)))
        start += size
    return torch.cat(parts)


# ------------------------------------------------------------------- close to fp32

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 32)
BIASES = {"has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True}
ODD = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 96}
SPECS = {
    "llama": spec_of(vocab_size=64),
    "tied, groups of 3, wide": WIDE,
    "groups of 8, large heads, head norms": spec_of(
        num_heads=8, num_kv_heads=1, head_dim=128, has_qk_norm=True, windows=(None, 17)
    ),
    "no groups, biases, llama3 rope": spec_of(
        num_heads=3, num_kv_heads=3, head_dim=64, rope_scaling=LLAMA3, **BIASES
    ),
    "odd heads, linear rope, windows": spec_of(
        **ODD, intermediate_size=608, rope_scaling=LinearScaling(4.0), windows=(5, 33)
    ),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """A value rounded to bf16 is off by up to 2^-9 of itself. A logit is made from a few such
    roundings in a row, each averaged over many inputs: it is off by a few times that, measured by
    the size of a usual logit. A wrong key among twenty is off by ten times as much."""
    error = (actual - expected).abs() / expected.abs().median()
    assert error.mean() < factor * 2.0**-6
    assert error.mean(-1).max() < factor * 2.0**-5
    is_same = actual.argmax(-1) == expected.argmax(-1)
    assert is_same.float().mean() > 0.9


@pytest.fixture(params=SPECS, scope="module", name="shaped")
def make_shaped(request) -> tuple[Case, torch.Tensor]:
    case = case_of(SPECS[request.param])
    return case, mixed_steps(case.load(None, "fp32"))


def mixed_steps(model: StepModel) -> torch.Tensor:
    """Long and short chunks beside decodes: 50, 54 and 2 rows."""
    tables = [[9, 2, 7, 4, 1], [3, 8, 5], [6, 0]]
    long, short = Span(TOKENS[50:], 50, tables[0]), Span(TOKENS[5:6], 0, tables[2])
    steps = (
        (Span(TOKENS[:50], 0, tables[0]),),
        (Span(TOKENS[:33], 0, tables[1]), long, short),
        (Span([1], 1, tables[2]), Span([2], 33, tables[1])),
    )
    return torch.cat([logits_of(model, *spans) for spans in steps])


# int8 keys and values are off by up to 2^-8 of the largest among them.
FACTORS = {"bf16": 1.0, "int8": 2.0}


@every_isa
@every_kv_dtype
def test_every_architecture_is_close(shaped, isa, kv_dtype):
    case, expected = shaped
    actual = mixed_steps(case.compiled(isa, kv_dtype=kv_dtype))
    assert_close(actual, expected, FACTORS[kv_dtype])


@every_isa
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_int8_activations_are_close(shaped, isa, dtype):
    """A step of int8 is 3.4 times as large as the rounding of bf16 (benchmarks/live/agreement)."""
    case, _ = shaped
    exact = mixed_steps(case.compiled(isa, dtype))
    assert_close(mixed_steps(case.compiled(isa, dtype, activation_dtype="int8")), exact, 4.0)


@every_isa
@pytest.mark.parametrize("gain", [128, 1024])
def test_gates_far_below_zero_are_closed(isa, gain):
    case = case_of(spec_of())
    for layer in range(2):
        case.weights[f"model.layers.{layer}.mlp.gate_proj.weight"] *= gain
    expected = in_chunks(case.load(None, "fp32"), [64])
    assert_close(in_chunks(case.compiled(isa), [64]), expected, 2.0)


# -------------------------------------------------------------- to the last bit

OTHERS = [Span([i % 47], 0, [5 + i]) for i in range(64)]
KV_DTYPES = ("bf16", "int8")
PRODUCTS = [(dtype, "bf16") for dtype in kernels.FORMATS] + [("int8", "int8"), ("int4", "int8")]
"""Data types of weights and activations."""


def marks_of(*numbers: int) -> tuple[pytest.MarkDecorator, ...]:
    """Every pair of an instruction set, a product and a form of the KV cache is always run; all
    three together only with --full."""
    return () if sum(numbers) % 2 == 0 else (pytest.mark.full,)


FORMS = [
    pytest.param(
        (isa, dtype, kv_dtype, activation_dtype),
        marks=marks_of(i, p, k),
        id=f"{isa}-{dtype}-{activation_dtype}-{kv_dtype}",
    )
    for i, isa in enumerate(ISAS)
    for p, (dtype, activation_dtype) in enumerate(PRODUCTS)
    for k, kv_dtype in enumerate(KV_DTYPES)
]


def every_form_with(name: str, values: Sequence[Any]) -> pytest.MarkDecorator:
    """Forms and values in pairs. Without --full a form gets every third value, and a value every
    third form."""
    pairs = [
        pytest.param(
            form.values[0],
            value,
            marks=(*form.marks, *(() if (number + at) % 3 == 0 else (pytest.mark.full,))),
            id=f"{form.id}-{value}",
        )
        for number, form in enumerate(FORMS)
        for at, value in enumerate(values)
    ]
    return pytest.mark.parametrize(("subject", name), pairs, indirect=["subject"])


every_form = pytest.mark.parametrize("subject", FORMS, indirect=True)


@dataclass
class Subject:
    """A model in one form; the logits of TOKENS computed at once, and those of OTHERS, alone."""

    case: Case
    isa: str
    dtype: str
    kv_dtype: str
    activation_dtype: str

    def load(self, **options: Any) -> CompiledModel:
        dtypes = {"kv_dtype": self.kv_dtype, "activation_dtype": self.activation_dtype}
        return self.case.compiled(self.isa, self.dtype, num_blocks=80, **dtypes, **options)

    def __post_init__(self) -> None:
        self.model = self.load()
        self.expected = in_chunks(self.model, [len(TOKENS)])
        self.alone = [logits_of(self.model, other) for other in OTHERS]


@pytest.fixture(scope="module", name="subject")
def make_subject(request) -> Subject:
    return Subject(case_of(WIDE), *request.param)


CUTS = [[1], [7], [16], [33], [5, 32, 1, 2, 17], [69, 1], [31, 33, 6], [48], [49], [64], [65]]


@every_form_with("sizes", CUTS)
def test_chunks_change_nothing(subject, sizes):
    assert torch.equal(in_chunks(subject.model, sizes), subject.expected)


@every_form_with("num_others", [1, 15, 16, 31, 32, 40, 47, 48, 63, 64])
def test_company_changes_nothing(subject, num_others):
    in_chunks(model := subject.model, [37])
    others, alone = OTHERS[:num_others], subject.alone[:num_others]
    for own in (Span(TOKENS[37:LAST], 37, TABLE), Span(TOKENS[LAST:], LAST, TABLE)):
        expected, middle = subject.expected[own.start : own.end], num_others // 2
        assert torch.equal(logits_of(model, own, *others), torch.cat([expected, *alone]))
        spans = [*others[:middle], own, *others[middle:]][::-1]
        parts = [*alone[:middle], expected, *alone[middle:]][::-1]
        assert torch.equal(logits_of(model, *spans), torch.cat(parts))


@every_form
def test_the_place_of_blocks_changes_nothing(subject):
    model = subject.load()
    assert torch.equal(in_chunks(model, [33], [77, 3, 50, 0, 21]), subject.expected)
    # And what those blocks held before does not matter either.
    assert torch.equal(in_chunks(model, [70], [0, 77, 21, 3, 50]), subject.expected)
    poison(model, TABLE, 0x7F)
    assert torch.equal(in_chunks(model, [11]), subject.expected)


@every_form_with("block_size", [32, 48, 256])
def test_the_size_of_blocks_changes_nothing(subject, block_size):
    model = subject.load(block_size=block_size)
    assert torch.equal(in_chunks(model, [33], [4, 2, 3]), subject.expected)
    assert torch.equal(in_chunks(model, [9], [3, 2, 4]), subject.expected)


@every_form_with("num_threads", [2, 3])
def test_the_number_of_threads_changes_nothing(subject, num_threads):
    model = subject.load(num_threads=num_threads)
    assert torch.equal(in_chunks(model, [70]), subject.expected)
    assert torch.equal(in_chunks(model, [7]), subject.expected)


@every_form_with("block_size", [16, 48])
def test_copied_blocks_continue_like_their_source(subject, block_size):
    model = subject.load(block_size=block_size)
    logits_of(model, Span(TOKENS[:50], 0, TABLE))
    num_used, copies = -(-50 // block_size), [7, 11, 5, 9, 3]
    # NaN into a block that is copied in the same call: it is read before that.
    model.copy([33, *TABLE[:num_used]], [TABLE[num_used - 1], *copies[:num_used]])
    assert torch.equal(in_chunks(model, [20], copies, 50), subject.expected[50:])


# ------------------------------------------------------------- what is not finite


@every_form
def test_a_poisoned_request_fails_alone(subject):
    model = subject.load()
    tables = [[*range(at, at + 5)] for at in (5, 10, 15)]
    spans = [Span(TOKENS[40:end], 40, t) for end, t in zip((41, 47, 63), tables, strict=True)]

    def run(sick_blocks: Sequence[int]) -> tuple[Scores, torch.Tensor]:
        logits_of(model, *(Span(TOKENS[:40], 0, table) for table in tables))
        poison(model, sick_blocks)
        return scores_of(model, spans)

    healthy, expected = run([])
    assert all(map(math.isfinite, healthy.best))
    for sick_blocks in (tables[1][:1], tables[1]):
        sick, logits = run(sick_blocks)
        assert [row for row in range(31) if math.isnan(sick.best[row])] == [*range(1, 8)]
        others = [0, *range(8, 31)]
        assert torch.equal(logits[others], expected[others])
        assert [sick.best[row] for row in others] == [healthy.best[row] for row in others]


@every_isa
@every_kv_dtype
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_fails_its_request_alone(isa, kv_dtype, value):
    case = case_of(spec_of(windows=(None, 20)))
    expected = in_chunks(case.compiled(isa, kv_dtype=kv_dtype), [70])
    case.weights[EMBEDDING][47] = value
    model = case.compiled(isa, kv_dtype=kv_dtype)
    scores, logits = scores_of(model, [Span([5, 47, 3], 0, [6]), Span(TOKENS, 0, TABLE)])
    assert [*map(math.isnan, scores.best[1:])] == [True] * 2 + [False] * 70
    assert torch.equal(logits[3:], expected)
    assert math.isnan(scores_of(model, [Span([1], 3, [6])])[0].best[0])
    assert torch.equal(in_chunks(model, [70], [6, 0, 7, 8, 9]), expected)


@every_isa
@pytest.mark.parametrize("value", [3e38, -3e38, torch.nan])
def test_one_score_that_is_not_finite_is_enough(isa, value):
    case = case_of(spec_of())
    case.weights[HEAD][9] = value
    scores, logits = scores_of(case.compiled(isa), [Span(TOKENS, 0, TABLE)])
    is_finite = logits.isfinite().all(-1)
    assert not is_finite.all()
    assert is_finite.tolist() == [*map(math.isfinite, scores.best)]


@every_isa
@every_kv_dtype
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_one_weight_that_is_not_a_number_is_noticed(isa, kv_dtype, name):
    case = case_of(spec_of())
    case.weights[f"model.layers.1.self_attn.{name}.weight"][0, 0] = torch.nan
    scores, _ = scores_of(case.compiled(isa, kv_dtype=kv_dtype), [Span(TOKENS, 0, TABLE)])
    assert all(map(math.isnan, scores.best))


@every_form
def test_keys_that_are_not_numbers_are_noticed(subject):
    model = subject.load()
    logits_of(model, Span(TOKENS[:40], 0, TABLE))
    poison(model, TABLE[1:2], part=0.5)
    scores, _ = scores_of(model, [Span(TOKENS[40:45], 40, TABLE)])
    assert all(map(math.isnan, scores.best))


# ------------------------------------------------------------------- rows and scores


@every_isa
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_best_is_the_first_of_the_largest(isa, num_threads):
    case = case_of(spec_of(vocab_size=208))
    head = case.weights[HEAD]
    head[16:], head[32:48] = head[:16].repeat(12, 1), head[:16].flip(0)
    model = case.compiled(isa, num_threads=num_threads)
    scores, logits = scores_of(model, [Span(TOKENS, 0, TABLE)])
    rows = logits.tolist()
    assert [*scores.best] == [max(row) for row in rows]
    assert [*scores.best_ids] == [row.index(max(row)) for row in rows]
    assert all(row.count(max(row)) >= 13 for row in rows)
    greedy = SampleRow(SamplingParams(temperature=0.0), 0, 0, 0, 0)
    outcomes = model.sample([Span(TOKENS, 0, TABLE)], range(len(TOKENS)), [greedy] * len(TOKENS))
    assert outcomes == [Sample((token_id,)) for token_id in scores.best_ids]


@every_form
def test_any_rows_in_any_order(subject):
    spans = [Span(TOKENS, 0, TABLE)]
    for rows in ([69], [0], [69, 3, 3, 40, 0, 69], [*range(69, -1, -1)]):
        assert torch.equal(scores_of(subject.model, spans, rows)[1], subject.expected[rows])
    assert subject.model.sample(spans, [], []) == []


@every_isa
def test_more_rows_than_tokens(isa):
    scores, _ = scores_of(case_of(WIDE).compiled(isa), [Span([1], 0, [0])], [0] * 400)
    assert len(set(scores.best)) == 1
