"""Measures the roofline of this machine: bandwidth, products, least step time.

A step reads every weight once and, for each row, its KV cache; and it computes two operations per
weight and row. The larger of both times is the least time of the step, for any program.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROWS = (1, 32, 128)
REPEATS = 7
MIN_SAMPLE_S = 0.1
LARGE_BYTES = 2 * 1024**3
SMALL_BYTES = 100 * 1024**2


@dataclass(frozen=True, slots=True)
class Format:
    """Bits per weight with scales, bytes per KV value, and kind of product."""

    name: str
    weight_bits: float
    kv_bytes: float
    product: str


FORMATS = (
    Format("bf16", 16.0, 2, "bf16"),
    Format("int8", 8.0, 1, "int8"),
    # Four bits, and a scale and a minimum of 16 bits for each 32 weights.
    Format("int4", 5.0, 1, "int8"),
)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes read per second from a working set."""

    num_threads: int
    working_set_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Product:
    """Operations per second of a matrix product with warm weights; two per multiply-add."""

    kind: str
    num_rows: int
    operations_per_s: float | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Least:
    """Least time of one step, with weights from memory and from the cache."""

    format: str
    num_rows: int
    weight_bytes: float
    kv_bytes: float
    operations: float
    from_memory_s: float
    from_cache_s: float
    compute_s: float | None

    @property
    def memory_step_s(self) -> float:
        return max(self.from_memory_s, self.compute_s or 0.0)

    @property
    def cache_step_s(self) -> float:
        return max(self.from_cache_s, self.compute_s or 0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """All measurements, and the least step times."""

    num_cores: int
    num_parameters: int
    kv_values_per_token: int
    context: int
    bandwidths: tuple[Bandwidth, ...]
    products: tuple[Product, ...]
    steps: tuple[Least, ...]


def measure(model: Path, context: int) -> Figures:
    """Measure the machine, which should be idle; takes about a minute."""
    from headway.build import model_facts
    from headway.config import load_config

    facts = model_facts(load_config({"model": str(model)}))
    cores = len(os.sched_getaffinity(0))
    bandwidths = measure_bandwidths(cores)
    products = measure_products(cores)
    best = {size: best_bandwidth(bandwidths, size) for size in (LARGE_BYTES, SMALL_BYTES)}
    steps = tuple(
        least(
            form,
            num_rows,
            (facts.num_parameters, facts.kv_values_per_token * context),
            (best[LARGE_BYTES], best[SMALL_BYTES], best_rate(products, form.product)),
        )
        for form in FORMATS
        for num_rows in ROWS
    )
    return Figures(
        cores,
        facts.num_parameters,
        facts.kv_values_per_token,
        context,
        tuple(bandwidths),
        tuple(products),
        steps,
    )


def least(
    form: Format,
    num_rows: int,
    sizes: tuple[int, int],
    rates: tuple[float, float, float | None],
) -> Least:
    """Return the least time of a step.

    `sizes` are weights and KV values per row; `rates` are memory bandwidth, cache bandwidth and
    operations/s. The KV cache is always read from memory, because it grows with the rows.
    """
    num_weights, kv_values = sizes
    memory, cache, operations_per_s = rates
    weight_bytes = num_weights * form.weight_bits / 8
    kv_bytes = float(num_rows * kv_values * form.kv_bytes)
    operations = 2.0 * num_weights * num_rows
    return Least(
        form.name,
        num_rows,
        weight_bytes,
        kv_bytes,
        operations,
        (weight_bytes + kv_bytes) / memory,
        weight_bytes / cache + kv_bytes / memory,
        None if operations_per_s is None else operations / operations_per_s,
    )


def measure_bandwidths(cores: int) -> list[Bandwidth]:
    """Return the best of several ways to read, by threads and working set."""
    import torch

    found: list[Bandwidth] = []
    for size in (LARGE_BYTES, SMALL_BYTES):
        data = torch.ones(size // 4, dtype=torch.float32)
        matrix = data.view(-1, 1024)
        vector = torch.ones(1024)
        readers: tuple[Callable[[], object], ...] = (
            data.sum,
            lambda data=data: torch.dot(data, data),
            lambda matrix=matrix, vector=vector: torch.mv(matrix, vector),
        )
        for num_threads in sorted({1, cores}):
            torch.set_num_threads(num_threads)
            rate = max(size / _least_seconds(reader) for reader in readers)
            found.append(Bandwidth(num_threads, size, rate))
    torch.set_num_threads(cores)
    return found


def measure_products(cores: int) -> list[Product]:
    """Measure bf16 and int8 products for few and many rows, with medium-sized weights."""
    import torch

    torch.set_num_threads(cores)
    made: list[Product] = []
    for num_rows in (32, 128, 2048):
        for kind, prepare in (("bf16", _bf16_product), ("int8", _int8_product)):
            try:
                call, operations = prepare(num_rows)
                rate = operations / _least_seconds(call)
                made.append(Product(kind, num_rows, rate))
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                made.append(Product(kind, num_rows, None, str(error).splitlines()[0][:100]))
    return made


def _bf16_product(num_rows: int) -> tuple[Callable[[], object], float]:
    """Return a bf16 product with packed weights, and its operations."""
    import torch

    inner, outer = 2048, 2048
    rows = torch.randn(num_rows, inner).bfloat16()
    weights = torch.randn(outer, inner).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weights, num_rows)

    def call() -> object:
        return torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")

    call()
    return call, 2.0 * num_rows * inner * outer


def _int8_product(num_rows: int) -> tuple[Callable[[], object], float]:
    """Return an int8 product with packed weights, and its operations."""
    import torch

    inner, outer = 2048, 2048
    rows = torch.randint(0, 255, (num_rows, inner), dtype=torch.uint8)
    weights = torch.randint(-127, 127, (outer, inner), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weights, [num_rows, inner])
    scales = torch.ones(outer)
    zeros = torch.zeros(outer, dtype=torch.int64)

    def call() -> object:
        return torch.ops.onednn.qlinear_pointwise(
            rows, 0.01, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )

    call()
    return call, 2.0 * num_rows * inner * outer


def _least_seconds(call: Callable[[], object]) -> float:
    """Return the fastest of several samples; other work can only add time."""
    call()
    started_at = time.perf_counter()
    call()
    once = max(1e-7, time.perf_counter() - started_at)
    num_calls = max(1, int(MIN_SAMPLE_S / once))
    samples: list[float] = []
    for _ in range(REPEATS):
        started_at = time.perf_counter()
        for _ in range(num_calls):
            call()
        samples.append((time.perf_counter() - started_at) / num_calls)
    return min(samples)


def best_bandwidth(bandwidths: Sequence[Bandwidth], size: int) -> float:
    return max(item.bytes_per_s for item in bandwidths if item.working_set_bytes == size)


def best_rate(products: Sequence[Product], kind: str) -> float | None:
    rates = [item.operations_per_s for item in products if item.kind == kind]
    return max((rate for rate in rates if rate is not None), default=None)


def as_plain(figures: Figures) -> dict[str, Any]:
    plain = asdict(figures)
    for step, made in zip(figures.steps, plain["steps"], strict=True):
        made["memory_step_s"], made["cache_step_s"] = step.memory_step_s, step.cache_step_s
    return plain


def as_text(figures: Figures) -> str:
    lines = [
        f"{figures.num_cores} cores; {figures.num_parameters / 1e6:.1f} M weights, "
        f"{figures.kv_values_per_token} KV values per token, {figures.context} tokens per row",
        "",
        "read bandwidth, GB/s",
    ]
    for item in figures.bandwidths:
        size = item.working_set_bytes / 1024**2
        rate = item.bytes_per_s / 1e9
        lines.append(f"  {size:6.0f} MiB, {item.num_threads} thread(s)  {rate:7.1f}")
    lines += ["", "matrix products with weights of 2048 x 2048, TFLOP/s or TOP/s"]
    for product in figures.products:
        known = product.operations_per_s
        text = f"{known / 1e12:7.2f}" if known is not None else f"no figure: {product.reason}"
        lines.append(f"  {product.kind}, {product.num_rows:4d} rows  {text}")
    lines += [
        "",
        "least time of a step, ms: reading alone, computing alone, and what bounds it",
        "                 weights     KV     read from   read from    compute   least, weights",
        "  format  rows      MB       MB      memory       cache                memory  cache",
    ]
    for step in figures.steps:
        compute = "?" if step.compute_s is None else f"{1e3 * step.compute_s:.1f}"
        lines.append(
            f"  {step.format:6s} {step.num_rows:5d} {step.weight_bytes / 1e6:8.0f} "
            f"{step.kv_bytes / 1e6:8.1f} {1e3 * step.from_memory_s:11.1f} "
            f"{1e3 * step.from_cache_s:11.1f} {compute:>10s} "
            f"{1e3 * step.memory_step_s:8.1f} {1e3 * step.cache_step_s:6.1f}"
        )
    return "\n".join(lines)
