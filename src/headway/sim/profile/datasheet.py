"""Profiles computed from datasheets, for GPUs that nobody has measured here.

A step reads the weights once and multiplies every row by them, whichever takes longer; decodes read
their context, and prefill attends to what came before. Datasheets state peaks, so each part has a
share of its peak that is reached. Those shares were fitted to published measurements of dense
models (benchmarks/sim/datasheets.py), which also give the error to expect.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import sqrt

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.slo.steptime import StepShape
from headway.errors import ConfigError
from headway.sim.profile.machine import Delays, MachineProfile, StepFit

PREFIX = "datasheet:"
FORM = f"{PREFIX}GPU/MODEL or {PREFIX}2xGPU/MODEL/FORMAT, such as {PREFIX}h100/llama-3.1-8b/fp8"
BLOCK_SIZE = 16
MAX_MODEL_LEN = 131_072
MEMORY_SHARE = 0.9
RESERVED_BYTES = 1.5e9
"""Memory of a GPU besides weights and KV cache."""
KV_BYTES = 2
"""Bytes of a number in the KV cache."""
START_S = 60.0
"""Assumed time to start an engine."""
UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a datasheet says of a GPU."""

    tflops: float
    """Dense bf16 with sums in fp32."""
    tb_per_s: float
    """Memory bandwidth."""
    memory_gib: float
    link_gb_per_s: float
    """To other GPUs of the engine, in one direction."""
    fast_formats: tuple[str, ...]
    """Formats that it multiplies without expanding them to bf16."""


GPUS = {
    "a100": Gpu(312, 2.04, 80, 300, ("int8",)),
    "h100": Gpu(989, 3.35, 80, 450, ("fp8", "int8")),
    "h200": Gpu(989, 4.8, 141, 450, ("fp8", "int8")),
    "b200": Gpu(2250, 8.0, 180, 900, ("fp8", "fp4", "int8")),
    "gb200": Gpu(2500, 8.0, 186, 900, ("fp8", "fp4", "int8")),
    "l4": Gpu(121, 0.30, 24, 32, ("fp8", "int8")),
    "l40s": Gpu(362, 0.864, 48, 32, ("fp8", "int8")),
    "rtx-4090": Gpu(165, 1.008, 24, 32, ("fp8", "int8")),
    "rtx-pro-6000": Gpu(503, 1.79, 96, 64, ("fp8", "fp4", "int8")),
    "mi300x": Gpu(1307, 5.3, 192, 448, ("fp8", "int8")),
}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored."""

    bits: float
    """With their scales."""
    speedup: float
    """Of products against bf16, on a GPU that multiplies the format."""


FORMATS = {
    "bf16": WeightFormat(16, 1),
    "fp8": WeightFormat(8, 2),
    "int8": WeightFormat(8, 2),
    "fp4": WeightFormat(4.5, 4),
    "int4": WeightFormat(4.5, 1),
}


@dataclass(frozen=True, slots=True)
class DenseModel:
    """Sizes of a dense transformer."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int = 8
    head_size: int = 128

    @property
    def width(self) -> int:
        """Numbers that a layer passes to the next, per token."""
        return self.num_heads * self.head_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * KV_BYTES

    @staticmethod
    def of_size(num_params: float) -> DenseModel:
        """Return a model of the usual shape."""
        num_layers = max(8, round(32 * (num_params / 8e9) ** 0.42))
        num_heads = max(8, round(sqrt(num_params / (12 * num_layers)) / 128))
        return DenseModel(num_params, num_layers, num_heads)


MODELS = {
    "llama-3.2-1b": DenseModel(1.24e9, 16, 32, head_size=64),
    "llama-3.2-3b": DenseModel(3.21e9, 28, 24),
    "llama-3.1-8b": DenseModel(8.03e9, 32, 32),
    "llama-3.1-70b": DenseModel(70.6e9, 80, 64),
    "mistral-7b": DenseModel(7.25e9, 32, 32),
    "qwen3-8b": DenseModel(8.19e9, 36, 32),
    "qwen3-14b": DenseModel(14.8e9, 40, 40),
    "qwen3-32b": DenseModel(32.8e9, 64, 64),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)b")
_GPUS = re.compile(r"(?:([1-9]\d?)x)?(.+)")


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares of the peaks that are reached, and times that no datasheet has."""

    compute: float = 0.76
    bandwidth: float = 0.86
    per_layer_s: float = 48e-6
    per_row_s: float = 23e-6
    all_reduce_s: float = 8.9e-6
    """One exchange between the GPUs of an engine; a layer has two."""


REACHED = Reached()
"""Fitted to one half of the measured settings."""
SPREAD = 0.27
"""Standard deviation of the logarithm of measured by predicted TPOT, in the other half."""
TPOT_ERRORS = {
    "h100": (0.10, 0.28),
    "h200": (0.11, 0.35),
    "b200": (0.08, 0.22),
    "gb200": (0.65, 0.85),
}
"""Median and 90th percentile of the error of TPOT in the other half."""
ALL_TPOT_ERRORS = (0.10, 0.29)


@dataclass(frozen=True, slots=True)
class Datasheet:
    """An engine of one or several GPUs with a model."""

    gpu_name: str
    num_gpus: int
    model_name: str
    model: DenseModel
    format_name: str

    @staticmethod
    def parse(name: str) -> Datasheet:
        """Return what a name such as `datasheet:2xh100/llama-3.1-8b/fp8` means."""
        parts = name.removeprefix(PREFIX).lower().split("/")
        if len(parts) not in (2, 3):
            raise ConfigError(f"{name!r} is not {FORM}")
        found = _GPUS.fullmatch(parts[0])
        num_gpus, gpu = (found[1] or "1", found[2]) if found is not None else ("1", "")
        if gpu not in GPUS:
            raise ConfigError(f"no datasheet of GPU {gpu!r}; there are: {', '.join(GPUS)}")
        format_name = parts[2] if len(parts) == 3 else "bf16"
        if format_name not in FORMATS:
            raise ConfigError(f"unknown format {format_name!r}; one of {', '.join(FORMATS)}")
        return Datasheet(gpu, int(num_gpus), parts[1], _model_of(parts[1]), format_name)

    @property
    def gpu(self) -> Gpu:
        return GPUS[self.gpu_name]

    @property
    def weight_bytes(self) -> float:
        return self.model.num_params * FORMATS[self.format_name].bits / 8

    @property
    def tflops(self) -> float:
        """Peak of all GPUs for products with the weights."""
        is_fast = self.format_name in self.gpu.fast_formats
        speedup = FORMATS[self.format_name].speedup if is_fast else 1.0
        return self.num_gpus * self.gpu.tflops * speedup

    @property
    def machine(self) -> str:
        many = f"{self.num_gpus} x " if self.num_gpus > 1 else ""
        return f"{many}{self.gpu_name} by its datasheet"

    def step_fit(self, reached: Reached = REACHED) -> StepFit:
        """Return the seconds of a step by its shape."""
        model, num_gpus = self.model, self.num_gpus
        bytes_per_s = 1e12 * num_gpus * self.gpu.tb_per_s * reached.bandwidth
        weights_s = self.weight_bytes / bytes_per_s
        row_s = 2 * model.num_params / (1e12 * self.tflops * reached.compute)
        constant_s = model.num_layers * reached.per_layer_s
        shared_s = 0.0
        if num_gpus > 1:
            constant_s += 2 * model.num_layers * reached.all_reduce_s
            moved = 2 * model.num_layers * model.width * 2 * 2 * (num_gpus - 1) / num_gpus
            shared_s = moved / (1e9 * self.gpu.link_gb_per_s)
        # Below the knee weights take longer to read than to multiply.
        knee = max(2, round(weights_s / row_s))
        knots = (1, knee, 2 * knee)
        attention_flops = 1e12 * num_gpus * self.gpu.tflops * reached.compute
        return StepFit(
            knots,
            (
                *[constant_s + max(weights_s, rows * row_s) + rows * shared_s for rows in knots],
                reached.per_row_s,
                model.kv_bytes / bytes_per_s,
                4 * model.num_layers * model.width / attention_flops,
            ),
        )

    def capacity(self) -> Capacity:
        """Return the KV cache that the weights leave room for."""
        memory = self.num_gpus * (MEMORY_SHARE * self.gpu.memory_gib * 2**30 - RESERVED_BYTES)
        num_blocks = int((memory - self.weight_bytes) / (BLOCK_SIZE * self.model.kv_bytes))
        if num_blocks * BLOCK_SIZE < 1024:
            raise ConfigError(
                f"{self.model_name} in {self.format_name} takes {self.weight_bytes / 1e9:.0f} GB; "
                f"{self.num_gpus} x {self.gpu_name} has {memory / 1e9:.0f} GB for weights and KV "
                "cache: name more GPUs (2xGPU) or a smaller format"
            )
        return Capacity(num_blocks, BLOCK_SIZE, min(MAX_MODEL_LEN, num_blocks * BLOCK_SIZE))

    def profile(self) -> MachineProfile:
        """Return the profile, labelled as what it is."""
        return MachineProfile(
            model=f"{self.model_name} in {self.format_name}",
            machine=self.machine,
            headway="",
            command="",
            date="",
            scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
            capacity=self.capacity(),
            enable_prefix_caching=True,
            fit=self.step_fit(),
            residuals=(),
            drift=SPREAD,
            overhead_s=0.0,
            overhead_per_row_s=0.0,
            delays=(Delays(1, (0.0,), (0.0,)),),
            start_s=START_S,
            largest=StepShape(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED),
            num_steps=0,
            steal=0.0,
            caveat=self.caveat,
        )

    @property
    def caveat(self) -> str:
        """What a reader of predictions has to know."""
        median, most = TPOT_ERRORS.get(self.gpu_name, ALL_TPOT_ERRORS)
        is_known = self.gpu_name in TPOT_ERRORS
        of = self.gpu_name if is_known else f"other GPUs (there are none of {self.gpu_name}),"
        return (
            f"datasheet, not measured: against published measurements of {of} TPOT was off by "
            f"{100 * median:.0f} % in the median and {100 * most:.0f} % at the 90th percentile; "
            "TTFT by more"
        )


def _model_of(name: str) -> DenseModel:
    if name in MODELS:
        return MODELS[name]
    size = _SIZE.fullmatch(name)
    if size is None or not 0.1 <= float(size[1]) <= 1000:
        raise ConfigError(
            f"no sizes of model {name!r}; a dense model by its parameters, such as 13B, or one of "
            f"{', '.join(MODELS)}"
        )
    return DenseModel.of_size(1e9 * float(size[1]))
