"""Measures a Q4_K_M file: packing, memory, decode rate and logit error, beside llama.cpp.

    python -m benchmarks.live.kquants [--shape qwen3-0.6b] [--folder FOLDER] [--mixture Q4_K_M]
    python -m benchmarks.live.kquants --pack [--shape qwen3-1.7b]

Writes a random model of a published shape into FOLDER unless it is there. int8 is what such a
file became before its blocks were packed as they are. Errors are against plain torch in fp32 with
the dequantized weights of the same file, as a part of the logits' spread. --pack times packing
only, and adds a folder of bf16. llama.cpp runs if `python -m benchmarks.peers prepare` made its
environment.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from benchmarks.live.growth import BLOCK_SIZE, time_step
from benchmarks.peers.catalog import ROOT, default_cache, python_of
from benchmarks.support.random_gguf import SHAPES, write_random
from headway.config import load_config
from headway.executors.hardware import probe_hardware
from headway.executors.load import facts_of, load_model, open_checkpoint, options_of
from headway.executors.source import locate
from headway.executors.spec import spec_from_config
from headway.executors.step_model import Span, StepModel
from headway.executors.weights.names import model_shapes
from headway.resolve import resolve

RUNNING = (1, 4, 16)
CONTEXT = 256
NUM_TOKENS = 64
LLAMA_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and what loading it took."""

    model: StepModel
    load_s: float
    num_bytes: int


def write_folder(folder: Path, shape: str) -> Path:
    """Write a folder of random bf16 weights unless it is there."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = SHAPES[shape]
    values = np.random.default_rng(0).normal(size=2**22).astype(np.float32) / 50
    some = values.astype(ml_dtypes.bfloat16)
    weights = {
        name: np.resize(some, size) for name, size in model_shapes(spec_from_config(config)).items()
    }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(path: Path, dtype: str) -> Loaded:
    """Load a model with room for the largest step."""
    checkpoint = open_checkpoint(locate(str(path)))
    settings = {"dtype": dtype, "block_size": BLOCK_SIZE, "kv_cache_memory_bytes": "1G"}
    resolved = resolve(load_config(settings, environ={}), facts_of(checkpoint), probe_hardware())
    num_blocks = max(RUNNING) * (CONTEXT // BLOCK_SIZE + 1)
    options = replace(options_of(resolved), num_blocks=num_blocks, max_model_len=2 * CONTEXT)
    before, started_at = anonymous_bytes(), time.perf_counter()
    model = load_model(checkpoint, options)
    load_s = time.perf_counter() - started_at
    return Loaded(model, load_s, anonymous_bytes() - before)


def anonymous_bytes() -> int:
    """Return the memory of this process without mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("there is no RssAnon in /proc/self/status")


def logits_of(model: StepModel) -> np.ndarray:
    tokens = np.random.default_rng(5).integers(0, model.spec.vocab_size, NUM_TOKENS).tolist()
    blocks = list(range(NUM_TOKENS // BLOCK_SIZE))
    return np.asarray(model.logits([Span(tokens, 0, blocks)], range(NUM_TOKENS)))


def measure(path: Path, reference: np.ndarray | None, dtypes: tuple[str, ...]) -> Iterator[str]:
    yield f"{'':9}  load s  memory MB  logit error  " + "  ".join(
        f"tok/s at {count:2}" for count in RUNNING
    )
    for dtype in dtypes:
        loaded = load(path, dtype)
        rates = [count / time_step(loaded.model, count, CONTEXT) for count in RUNNING]
        error = float("nan")
        if reference is not None:
            off = logits_of(loaded.model) - reference
            error = float(np.sqrt(np.mean(off**2)) / reference.std())
        yield (
            f"{dtype:9} {loaded.load_s:7.2f} {loaded.num_bytes / 1e6:10.0f} {error:12.2%}  "
            + "  ".join(f"{rate:11.1f}" for rate in rates)
        )
        del loaded
        gc.collect()


def measure_llama(path: Path) -> str:
    """Run llama.cpp in its own environment on the same file."""
    python = python_of(default_cache(), "llama-cpp")
    if not python.exists():
        return "llama.cpp: not prepared (python -m benchmarks.peers prepare)"
    command = [str(python), "-m", "benchmarks.live.kquants_llama", str(path), str(CONTEXT)]
    done = subprocess.run(
        [*command, *map(str, RUNNING)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LLAMA_TIMEOUT_S,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else f"llama.cpp: {done.stderr[-400:]}"


def time_packing(path: Path, dtypes: tuple[str, ...]) -> Iterator[str]:
    """Time packing twice: the second time the file is in memory."""
    for dtype in dtypes:
        taken = []
        for _ in range(2):
            taken.append(load(path, dtype).load_s)
            gc.collect()
        yield f"{path.name:24} to {dtype:5} {min(taken):7.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--mixture", default="Q4_K_M")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = args.folder or Path(temporary)
        path = folder / f"{args.shape}-{args.mixture}.gguf"
        if not path.exists():
            write_random(path, spec_from_config(SHAPES[args.shape]), args.mixture)
        if args.pack:
            for line in time_packing(path, ("int4", "int8")):
                print(line, flush=True)
            whole = write_folder(folder / f"{args.shape}-bf16", args.shape)
            for line in time_packing(whole, ("bf16", "int8", "int4")):
                print(line, flush=True)
            return
        reference = None if args.no_reference else logits_of(load(path, "fp32").model)
        gc.collect()
        for line in measure(path, reference, ("int8", "int4")):
            print(line, flush=True)
        print(measure_llama(path))


if __name__ == "__main__":
    main()
