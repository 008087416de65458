"""Measures step time by number of running requests and by context length.

python -m benchmarks.live.growth MODEL [--json out.json] [--plot out.png]

Runs decode steps of random tokens on the real model, without a scheduler. The roofline is the
larger of two times: reading weights, keys and values at the bandwidth measured in the same run, and
multiplying at the measured rate of matrix products.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from benchmarks.peers.roofline import (
    LARGE_BYTES,
    Format,
    best_bandwidth,
    best_rate,
    least,
    measure_bandwidths,
    measure_products,
)
from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter
from headway.config import load_config
from headway.core.params import SamplingParams
from headway.errors import HeadwayError
from headway.executors.hardware import probe_hardware
from headway.executors.load import facts_of, load_model, open_checkpoint, options_of
from headway.executors.sampling import SampleRow
from headway.executors.source import locate
from headway.executors.step_model import Span, StepModel
from headway.resolve import ModelFacts, Resolved, resolve, weight_bytes

RUNNING = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8191)
CONTEXT_OF_RUNNING = 256
RUNNING_OF_CONTEXT = 8
VOCABULARY_MARGIN = 100
BLOCK_SIZE = 16
GREEDY = SampleRow(SamplingParams(temperature=0.0), seed=0, index=0, position=0, num_outputs=0)


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes read and bf16 operations per second of this machine."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """Median, spread and roofline of one kind of step."""

    num_running: int
    context: int
    step_s: float
    least_s: float
    most_s: float
    read_s: float
    compute_s: float

    @property
    def share_of_roofline(self) -> float:
        return max(self.read_s, self.compute_s) / self.step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()

    config = load_config(
        {
            "model": args.model,
            "block_size": BLOCK_SIZE,
            "kv_cache_memory_bytes": "3G",
            "enable_prefix_caching": False,
        }
    )
    try:
        checkpoint = open_checkpoint(locate(args.model))
    except HeadwayError as error:
        raise SystemExit(f"error: {error}") from error
    facts = facts_of(checkpoint)
    resolved = resolve(config, facts, probe_hardware())
    meter = StealMeter()
    machine = measure_machine(resolved.num_threads)
    model = load_model(checkpoint, options_of(resolved))
    shapes = [(count, CONTEXT_OF_RUNNING) for count in RUNNING]
    shapes += [(RUNNING_OF_CONTEXT, context) for context in CONTEXTS]
    taken: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    for round_number in range(args.rounds):
        for shape in shapes:
            taken[shape].append(time_step(model, *shape))
        print(f"round {round_number + 1} of {args.rounds} done", flush=True)
    points = [point_of(shape, taken[shape], facts, resolved, machine) for shape in shapes]
    show(points, resolved, machine)
    by_running, by_context = points[: len(RUNNING)], points[len(RUNNING) :]
    document = {
        "resolved": asdict(resolved),
        "machine": asdict(machine),
        "by_running": [asdict(point) for point in by_running],
        "by_context": [asdict(point) for point in by_context],
    }
    write_record(document, meter, args.json)
    if args.plot:
        draw(args.plot, by_running, by_context)


def measure_machine(num_threads: int) -> Machine:
    """Return the best rates of torch; the kernels multiply bf16 for every weight type."""
    rate = best_rate(measure_products(num_threads), "bf16")
    if rate is None:
        raise SystemExit("torch cannot multiply packed bf16 here, so there is no roofline")
    return Machine(best_bandwidth(measure_bandwidths(num_threads), LARGE_BYTES), rate)


def write_blocks(model: StepModel, count: int) -> None:
    """Write blocks: a step would read memory that was never written from one page of zeros."""
    tokens = range(VOCABULARY_MARGIN, VOCABULARY_MARGIN + BLOCK_SIZE)
    model.sample([Span(tokens, 0, [0])], [], [])
    model.copy([0] * (count - 1), range(1, count))


def time_step(model: StepModel, num_running: int, context: int) -> float:
    """Return the median seconds of a decode step, after one to warm up."""
    draw_token = random.Random(0)
    highest = model.spec.vocab_size - VOCABULARY_MARGIN
    per_request = context // BLOCK_SIZE + 1
    if per_request * num_running > model.num_blocks:
        raise SystemExit(f"{num_running} requests of {context} tokens do not fit the KV cache")
    spans = [
        Span(
            [draw_token.randint(VOCABULARY_MARGIN, highest)],
            context,
            array("i", range(index * per_request, (index + 1) * per_request)),
        )
        for index in range(num_running)
    ]
    write_blocks(model, per_request * num_running)
    places, rows = range(num_running), [GREEDY] * num_running
    model.sample(spans, places, rows)
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 0.5 and len(times) < 30):
        started_at = time.perf_counter()
        model.sample(spans, places, rows)
        times.append(time.perf_counter() - started_at)
    return median(times)


def point_of(
    shape: tuple[int, int],
    times: Sequence[float],
    facts: ModelFacts,
    resolved: Resolved,
    machine: Machine,
) -> Point:
    num_running, context = shape
    num_values = facts.kv_values_per_token
    kv_bytes = resolved.kv_cache_bytes / (resolved.num_blocks * resolved.block_size * num_values)
    weight_bits = 8 * weight_bytes(facts, resolved.dtype) / facts.num_parameters
    form = Format(resolved.dtype, weight_bits, kv_bytes, "bf16")
    rates = (machine.bytes_per_s, machine.bytes_per_s, machine.operations_per_s)
    roof = least(form, num_running, (facts.num_parameters, num_values * context), rates)
    return Point(
        num_running,
        context,
        median(times),
        min(times),
        max(times),
        roof.from_memory_s,
        roof.compute_s or 0.0,
    )


def show(points: Sequence[Point], resolved: Resolved, machine: Machine) -> None:
    print(
        f"{resolved.dtype} weights, {resolved.activation_dtype} activations, "
        f"{resolved.kv_dtype} KV, kernels {resolved.kernels}"
    )
    print(
        f"reads {machine.bytes_per_s / 1e9:.1f} GB/s, "
        f"multiplies {machine.operations_per_s / 1e12:.2f} TFLOP/s"
    )
    print("running  context   step ms      spread  read ms  compute ms  of roofline")
    for point in points:
        print(
            f"{point.num_running:7} {point.context:8} {point.step_s * 1e3:9.2f} "
            f"{point.least_s * 1e3:5.1f}-{point.most_s * 1e3:5.1f} {point.read_s * 1e3:8.2f} "
            f"{point.compute_s * 1e3:11.2f} {point.share_of_roofline:12.0%}"
        )


def draw(path: Path, by_running: Sequence[Point], by_context: Sequence[Point]) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for panel, points, name in (
        (panels[0], by_running, "num_running"),
        (panels[1], by_context, "context"),
    ):
        at = [getattr(point, name) for point in points]
        panel.fill_between(
            at,
            [point.least_s * 1e3 for point in points],
            [point.most_s * 1e3 for point in points],
            alpha=0.25,
        )
        panel.plot(at, [point.step_s * 1e3 for point in points], marker="o", label="step")
        panel.plot(at, [point.read_s * 1e3 for point in points], "--", label="reading alone")
        panel.plot(at, [point.compute_s * 1e3 for point in points], ":", label="multiplying alone")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_ylabel("ms per step")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    panels[0].set_xlabel(f"running requests, {CONTEXT_OF_RUNNING} tokens of context each")
    panels[1].set_xlabel(f"tokens of context, {RUNNING_OF_CONTEXT} running requests")
    figure.suptitle("Time of a decode step")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
