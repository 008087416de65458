"""Random rows of logits with random sampling settings, for the two samplers."""

from __future__ import annotations

import ctypes
import math
import random
from dataclasses import dataclass

import numpy as np
import torch

from headway.core.params import SamplingParams
from headway.core.plan import Failure, Sample
from headway.executors.cpu import kernels
from headway.executors.cpu.sampling import Samplings
from headway.executors.sampling import SampleRow, TokenCounts, has_penalties, make_mask
from headway.executors.torch.sampler import Scores, sample

VOCABULARIES = (16, 48, 64, 80, 1008, 49152, 128256, 151936)


@dataclass(frozen=True, slots=True)
class SamplingCase:
    """A row of logits and how to sample it."""

    logits: torch.Tensor
    row: SampleRow


def make_case(seed: int, vocab_size: int) -> SamplingCase:
    """Return a case determined by its arguments."""
    source = random.Random(f"{seed}/{vocab_size}")
    generator = torch.Generator().manual_seed(source.getrandbits(40))
    logits = _logits(source, generator, vocab_size)
    params = _params(source, vocab_size)
    counts = None
    if has_penalties(params):
        # Twice the likeliest tokens: penalties should change the best one.
        likely = logits.topk(min(4, vocab_size)).indices.tolist()
        prompt = [source.randrange(vocab_size) for _ in range(source.randrange(200))]
        outputs = [source.randrange(vocab_size) for _ in range(source.randrange(200))] + likely * 2
        counts = TokenCounts()
        counts.add(prompt + outputs, len(prompt))
    num_outputs = source.choice((0, 5, 50))
    position = source.randrange(10_000)
    seed = source.getrandbits(63)
    bad_ids = tuple(source.randrange(vocab_size) for _ in range(source.choice((0, 0, 0, 3))))
    mask = _mask(source, logits) if source.random() < 0.5 else None
    return SamplingCase(
        logits, SampleRow(params, seed, 0, position, num_outputs, counts, bad_ids, mask)
    )


def _mask(source: random.Random, logits: torch.Tensor) -> np.ndarray:
    vocab_size = len(logits)
    count = source.choice((1, 2, vocab_size // 2, vocab_size - 1, vocab_size))
    allowed = source.sample(range(vocab_size), count)
    # Often the best token is among those that are not allowed.
    best = int(logits.argmax())
    return make_mask([one for one in allowed if one != best] or [best], vocab_size)


def _logits(source: random.Random, generator: torch.Generator, vocab_size: int) -> torch.Tensor:
    logits = torch.randn(vocab_size, generator=generator) * source.choice(
        (0.0, 0.1, 1.0, 3.0, 20.0)
    )
    kind = source.choice(("plain", "plain", "ties", "peak", "impossible", "far"))
    if kind == "ties":  # as few different values as a coarse grid has
        logits = (logits * 2).round() / 2
    elif kind == "peak":
        logits[source.randrange(vocab_size)] += 30.0
    elif kind == "impossible":
        logits[torch.rand(vocab_size, generator=generator) < 0.5] = -torch.inf
        logits[source.randrange(vocab_size)] = 1.0
    elif kind == "far":
        logits += source.choice((-1e4, 1e4, 3e5))
    return logits


def _params(source: random.Random, vocab_size: int) -> SamplingParams:
    def maybe(chance: float, *values: float) -> float | None:
        return source.choice(values) if source.random() < chance else None

    fields = {
        "temperature": source.choice((0.0, 1e-4, 0.3, 0.7, 0.8, 1.0, 1.0, 1.5, 10.0, 100.0)),
        "top_k": maybe(0.4, 1, 2, 5, 40, 50, 700, 1000, 3000, vocab_size - 1, vocab_size),
        "top_p": maybe(0.5, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-9),
        "min_p": maybe(0.3, 1e-12, 1e-3, 0.05, 0.5, 1.0),
        "repetition_penalty": maybe(0.2, 0.5, 1.1, 2.0),
        "presence_penalty": maybe(0.2, -2.0, 0.3, 1.5),
        "frequency_penalty": maybe(0.2, -0.7, 0.1, 2.0),
        "logprobs": maybe(0.3, 0, 1, 5, 20),
        "min_tokens": maybe(0.3, 1, 10),
        "max_tokens": 99,
    }
    biases = {source.randrange(vocab_size): source.uniform(-100, 100) for _ in range(9)}
    stops = [source.randrange(vocab_size + 9) for _ in range(5)]
    return SamplingParams(
        **{name: value for name, value in fields.items() if value is not None},
        logit_bias=biases if source.random() < 0.2 else {},
        stop_token_ids=tuple(stops) if source.random() < 0.5 else (),
    )


def by_reference(case: SamplingCase) -> Sample | Failure:
    """Return the outcome of the torch sampler."""
    best, best_id = case.logits.max(dim=-1)
    scores = Scores([best.item()], [int(best_id)], case.logits.view(1, -1))
    return sample(scores, [case.row])[0]


def by_kernels(case: SamplingCase, isa: str) -> Sample | Failure:
    """Return the outcome of the compiled sampler, which must not change the logits."""
    library = kernels.load_kernels()
    assert library is not None
    logits = case.logits.clone()
    samplings = Samplings([case.row], len(logits))
    chosen, best = ctypes.c_int32(), ctypes.c_float()
    status = library.hw_sample(
        kernels.ISA.index(isa),
        samplings.structs,
        None if case.row.mask is None else case.row.mask.ctypes.data,
        logits.data_ptr(),
        len(logits),
        chosen,
        best,
        samplings.logprobs,
    )
    assert status == kernels.STATUSES["DONE"]
    assert torch.equal(logits, case.logits), "the logits were changed"
    if not math.isfinite(best.value):
        return Failure(f"the model's scores are not finite ({best.value})")
    return Sample((chosen.value,), samplings.logprobs_of(0))


def difference(case: SamplingCase, isa: str) -> str | None:
    """Return how the outcomes of the two samplers differ, if they do."""
    expected, found = by_reference(case), by_kernels(case, isa)
    if isinstance(expected, Failure) or isinstance(found, Failure):
        return None if expected == found else f"{found} is not {expected}"
    if expected.token_ids != found.token_ids:
        return f"token {found.token_ids[0]} is not {expected.token_ids[0]}"
    if expected.logprobs is None or found.logprobs is None:
        return None if expected.logprobs == found.logprobs else "log-probabilities are missing"
    (old,), (new,) = expected.logprobs, found.logprobs
    if old.rank != new.rank or not _is_close(old.logprob, new.logprob):
        return f"{new} is not {old}"
    if len(old.top_ids) != len(new.top_ids):
        return f"{len(new.top_ids)} likeliest tokens are not {len(old.top_ids)}"
    tops = zip(old.top_logprobs, new.top_logprobs, strict=True)
    if not all(_is_close(one, other) for one, other in tops):
        return f"{new.top_logprobs} is not {old.top_logprobs}"
    values = [case.logits[token_id].item() for token_id in new.top_ids]
    in_order = sorted(zip(values, new.top_ids, strict=True), key=lambda pair: (-pair[0], pair[1]))
    if [token_id for _, token_id in in_order] != [*new.top_ids]:
        return "the likeliest tokens are not in order"
    return None


def _is_close(one: float, other: float) -> bool:
    # Log-probabilities of the reference are fp32 sums of large numbers.
    return one == other or abs(one - other) <= 1e-4 + 1e-6 * abs(one)
