"""Measures the products of the kernels against bare products of the same core, in turn.

python -m benchmarks.live.efficiency MODEL [--rows 1 8 32 128 512] [--rounds 20] [--json FILE]

The speed of a shared processor changes within 50 ms, so that milliseconds of two runs say little.
This process stays on one core with one thread and runs in turn: bare products in registers for
10 ms, a step, bare products again. A figure is the time of a part over the time that bare products
of the same kind would take for its multiply-adds, at the mean rate of before and after: 1 is the
limit of the core, less is better. Rows are streams that decode; 512 rows are a prompt.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol, cast

from benchmarks.live.sampling import CONTEXT, GREEDY, Steps, read_contexts, resolve_executor
from headway.bench.steal import StealMeter, steal_text
from headway.executors.source import locate
from headway.executors.spec import ModelSpec
from headway.executors.weights import open_checkpoint
from headway.resolve import Resolved

SOURCE = Path(__file__).with_name("bare_products.cpp")
BURST_S = 0.01
PROMPT_ROWS = 512
KINDS = {
    "avx2": "fp32 AVX2",
    "avx512": "fp32 AVX-512",
    "avx512_vnni": "fp32 AVX-512",
    "amx": "bf16 AMX",
}
"""The products of bf16 activations, by instruction set of the kernels."""

Burst = Callable[[], float]
"""Returns multiply-adds per second."""


class Profiled(Protocol):
    """An executor that tells the seconds of its parts."""

    def profile(self) -> dict[str, float]: ...


def kind_of(resolved: Resolved) -> str:
    """Return the kind of bare products that the kernels could use at best."""
    if resolved.activation_dtype == "int8" and resolved.kernels in ("avx512_vnni", "amx"):
        return "int8 VNNI"
    if resolved.kernels not in KINDS:
        raise SystemExit(f"error: there are no bare products for the kernels {resolved.kernels}")
    return KINDS[resolved.kernels]


def compile_burst(kind: str, folder: Path) -> Burst:
    """Compile the bare products with the system's compiler."""
    target = folder / "bare_products.so"
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run([*compiler, "-O2", "-fPIC", "-shared", SOURCE, "-o", target], check=True)
    function = ctypes.CDLL(str(target)).bare_products
    function.argtypes, function.restype = [ctypes.c_char_p, ctypes.c_double], ctypes.c_double
    return lambda: float(function(kind.encode(), BURST_S))


def multiply_adds(spec: ModelSpec, num_rows: int) -> dict[str, int]:
    """Return the multiply-adds of the linear layers and of the head."""
    table = spec.vocab_size * spec.hidden_size
    num_tables = 1 if spec.tie_embeddings else 2
    layers = spec.facts.num_parameters - num_tables * table
    num_sampled = 1 if num_rows == PROMPT_ROWS else num_rows
    return {"linear": num_rows * layers, "head": num_sampled * table}


def measure(
    model: str, spec: ModelSpec, num_rows: int, burst: Burst, num_rounds: int
) -> dict[str, list[float]]:
    """Return the figure of every part in every round, and the seconds of the step."""
    is_prompt = num_rows == PROMPT_ROWS
    num_streams = PROMPT_ROWS // CONTEXT if is_prompt else num_rows
    executor, _ = resolve_executor(model, num_streams, num_threads=1)
    steps = Steps(executor, read_contexts(model, num_streams))
    if not is_prompt:
        steps.write_blocks()
        steps.decode(GREEDY, is_first=True)
    run = steps.prefill if is_prompt else lambda: steps.decode(GREEDY)
    work = multiply_adds(spec, num_rows)
    found: dict[str, list[float]] = {"step": [], **{part: [] for part in work}}
    profiled = cast("Profiled", executor)
    for _ in range(num_rounds + 1):
        profiled.profile()
        before = burst()
        found["step"].append(run())
        rate = (before + burst()) / 2
        seconds = profiled.profile()
        for part, count in work.items():
            found[part].append(seconds[part] * rate / count)
    executor.close()
    return {part: figures[1:] for part, figures in found.items()}  # the first round warms up


def text_of(values: Sequence[float], form: str, scale: float = 1.0) -> str:
    low, _, high = quantiles(values, n=4)
    return f"{scale * median(values):{form}} ({scale * low:{form}} - {scale * high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, PROMPT_ROWS])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    executor, resolved = resolve_executor(args.model, 1, num_threads=1)
    executor.close()
    kind = kind_of(resolved)
    spec = open_checkpoint(locate(args.model)).spec
    report: dict[str, Any] = {"kind": kind, "dtype": resolved.dtype}
    with tempfile.TemporaryDirectory() as folder:
        burst = compile_burst(kind, Path(folder))
        print(f"weights {resolved.dtype}, activations {resolved.activation_dtype}; times {kind}")
        for num_rows in args.rows:
            print(f"{num_rows} rows", file=sys.stderr, flush=True)
            meter = StealMeter()
            found = measure(args.model, spec, num_rows, burst, args.rounds)
            report[f"{num_rows} rows"] = found
            print(
                f"{num_rows:4d} rows  linear {text_of(found['linear'], '.2f')}  "
                f"head {text_of(found['head'], '.2f')}  step "
                f"{text_of(found['step'], '.1f', 1000)} ms, {steal_text(meter.read())}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
