"""Measures the quality loss of each data type against fp32 in plain torch.

    python -m benchmarks.live.quality MODEL [--max-tokens N] [--json FILE]
    python -m benchmarks.live.quality MODEL --prompts 64 [--json FILE]

A form is a data type of weights, KV cache and activations. fp32 has the dequantized weights of the
same file: the figures show the loss of the form, not of the quantization in the file. The first
command measures the perplexity of the fixed text of the quality tests, and the share of positions
where the likeliest token equals that of fp32. The second compares greedy tokens and logits of
prompts with fp32's, teacher-forced and free-running (benchmarks/live/agreement.py). MODEL is a GGUF
file, a folder or a Hugging Face id. A form that the model or the machine does not support is listed
with the reason.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.live.agreement import Agreement, compare, english_prompts, make_cases
from benchmarks.live.loading import FP32, Form, load
from benchmarks.live.perplexity import Quality, Text, perplexity, read_text
from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter
from headway.errors import ConfigError, HeadwayError
from headway.executors.source import locate
from headway.text import Tokenizer

PROMPTS = Path(__file__).parents[1] / "LICENSE"
FORMS = (
    FP32,
    Form("bf16"),
    Form("bf16", "int8"),
    *(
        Form(dtype, "bf16", activations)
        for dtype in ("int8", "int4")
        for activations in ("bf16", "int8")
    ),
    Form("int4", "int8", "bf16"),
)
HEADER = (
    f"{'dtype':5s} {'KV':5s} {'input':5s} {'perplexity':>10s} {'to fp32':>8s} {'same greedy':>11s} "
    f"{'s':>6s}"
)


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one form."""

    form: Form
    perplexity: float
    ratio: float
    same_greedy: float
    elapsed_s: float

    def __str__(self) -> str:
        return (
            f"{self.form} {self.perplexity:10.4f} {self.ratio:8.5f} "
            f"{self.same_greedy:11.2%} {self.elapsed_s:6.1f}"
        )


@dataclass(frozen=True, slots=True)
class Missing:
    """A form that is not supported, with the reason."""

    form: Form
    reason: str

    def __str__(self) -> str:
        return f"{self.form} {self.reason}"


def measure(model: str, text: Text) -> Iterator[Row | Missing]:
    reference: Quality | None = None
    for form in FORMS:
        try:
            loaded = load(model, form)
        except ConfigError as error:
            yield Missing(form, str(error))
            continue
        started_at = time.perf_counter()
        quality = perplexity(loaded, text.token_ids, bos_token_id=text.bos_token_id)
        elapsed_s = time.perf_counter() - started_at
        # The first form is fp32, which is always supported.
        reference = reference or quality
        ratio, same = quality.ratio_to(reference), quality.share_same_greedy(reference)
        yield Row(form, quality.perplexity, ratio, same, elapsed_s)


def measure_agreement(model: str, num_prompts: int) -> Iterator[Agreement]:
    """Yield the comparison of each form with a KV cache of bf16 with fp32."""
    oracle = load(model, FP32)
    token_ids = Tokenizer.from_path(locate(model).path).encode(PROMPTS.read_text(encoding="utf-8"))
    cases = make_cases(oracle, list(english_prompts(token_ids, num_prompts)))
    for form in reversed([form for form in FORMS[1:] if form.kv_dtype != "int8"]):
        try:
            loaded = load(model, form)
        except ConfigError as error:
            print(f"{form} {error}")
            continue
        yield compare(loaded, form, cases)


def print_agreement(model: str, num_prompts: int, path: Path | None) -> None:
    results: list[dict[str, object]] = []
    meter = StealMeter()
    for found in measure_agreement(model, num_prompts):
        print(
            f"{found.form} {found.num_same} of {found.num_tokens} positions the same "
            f"({found.share_same:.2%}); free-running {found.num_whole} of {num_prompts} prompts "
            f"whole, {found.share_prefix:.1%} of the tokens before the first that differs; logits "
            f"off by {found.rms_error:.2%} of their spread (rounding allows {found.limit:.2%}), at "
            f"most {found.max_error:.1%}",
            flush=True,
        )
        results.append(asdict(found))
    write_record({"num_prompts": num_prompts, "forms": results}, meter, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--max-tokens", type=int, help="use only the first tokens of the text; default: all"
    )
    parser.add_argument(
        "--prompts", type=int, help="compare tokens and logits of this many prompts"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    if args.prompts:
        print_agreement(args.model, args.prompts, args.json)
        return
    try:
        text = read_text(Tokenizer.from_path(locate(args.model).path), args.max_tokens)
    except HeadwayError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{len(text.token_ids)} tokens, BOS {text.bos_token_id}\n{HEADER}")
    rows: list[Row | Missing] = []
    meter = StealMeter()
    for row in measure(args.model, text):
        print(row, flush=True)
        rows.append(row)
    result = {"num_tokens": len(text.token_ids), "rows": [asdict(row) for row in rows]}
    write_record(result, meter, args.json)


if __name__ == "__main__":
    main()
