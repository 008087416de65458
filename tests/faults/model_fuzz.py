"""Loads model files that are nearly right, as the engine would: headers, weights, packing, a step.

    python -m tests.faults.model_fuzz [--count N] [--seed N] [--only PLACE]

Every file must end in a model that runs a step or in a HeadwayError, within MAX_S seconds.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from headway.clock import SystemClock
from headway.config import Config, load_config
from headway.core.params import SamplingParams
from headway.core.plan import NewRequest, ScheduledRequest, StepPlan
from headway.errors import HeadwayError
from headway.executors.cpu.kernels import best_isa
from headway.executors.load import facts_of, load_executor, open_checkpoint
from headway.executors.source import locate
from headway.resolve import Hardware, resolve
from tests.faults.model_mutate import (
    GGUF_SEEDS,
    SAFE_SEEDS,
    gguf_model,
    mutated_folder,
    mutated_gguf,
    places,
    safe_folder,
)

MAX_S = 60.0
"""Far above what a small model takes under a sanitizer on a machine with other work."""
MACHINE = Hardware(num_cores=1, available_bytes=2**28, kernels=best_isa())
FORMS = (
    *(("auto", "auto"), ("bf16", "auto"), ("int8", "int8"), ("int4", "auto"), ("fp32", "auto")),
    *(("int8", "auto"), ("bf16", "int8"), ("int4", "int8")),
)


class Hang(BaseException):
    """A load took longer than MAX_S; no handler of the product's catches this."""


@dataclass
class Report:
    """What became of the files."""

    num_good: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    grown_bytes: int = 0
    """By how much the process grew at its largest."""

    @property
    def num_refused(self) -> int:
        return self.refusals.total()


def settings(place: int) -> Config:
    """Every form of weights and KV cache in turn."""
    dtype, kv_dtype = FORMS[place % len(FORMS)]
    return load_config(
        {"dtype": dtype, "kv_cache_dtype": kv_dtype, "kv_cache_memory_bytes": 2**20}, environ={}
    )


def load(path: Path, config: Config) -> None:
    """As the engine does it, down to a first step."""
    checkpoint = open_checkpoint(locate(str(path)))
    resolved = resolve(config, facts_of(checkpoint), MACHINE)
    executor = load_executor(checkpoint, resolved, SystemClock())
    capacity = executor.capacity()
    token_ids = (0, 1, 2)[: capacity.max_model_len]
    new = NewRequest(SamplingParams(temperature=0.0), 0, 0, token_ids, len(token_ids))
    item = ScheduledRequest("a", 0, token_ids, (0,), True, new)
    executor.collect(executor.submit(StepPlan(1, (item,))))
    executor.close()


@contextmanager
def time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def try_file(path: Path, place: int, report: Report) -> None:
    started_at = time.monotonic()
    try:
        with time_limit():
            load(path, settings(place))
        report.num_good += 1
    except HeadwayError as error:
        report.refusals[type(error).__name__] += 1
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error}"[:150]
        report.defects.append(f"file {place}: {text} ({Path(where.filename).name}:{where.lineno})")
    report.slowest_s = max(report.slowest_s, time.monotonic() - started_at)


def check_seeds(folder: Path) -> None:
    """Every unchanged file loads in every form that fits it."""
    for seed in GGUF_SEEDS:
        (folder / "seed.gguf").write_bytes(gguf_model(*seed).encode())
        for place in range(len(FORMS)):
            load(folder / "seed.gguf", settings(place))
    for seed in SAFE_SEEDS:
        (folder / "seed").mkdir(exist_ok=True)
        safe_folder(*seed).write(folder / "seed")
        for place in range(len(FORMS)):
            load(folder / "seed", settings(place))


def run(folder: Path, count: int, seed: int, only: int | None = None) -> Report:
    """Two GGUF files for every folder of safetensors."""
    report = Report()
    file, checkpoint = folder / "mutated.gguf", folder / "mutated"
    checkpoint.mkdir()
    before = _peak_bytes()
    for place, source in places(count, seed):
        if only is not None and place != only:
            continue
        if place % 3 == 2:
            mutated_folder(source).write(checkpoint)
            try_file(checkpoint, place, report)
        else:
            file.write_bytes(mutated_gguf(source))
            try_file(file, place, report)
    report.grown_bytes = _peak_bytes() - before
    return report


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the one file of this number")
    args = parser.parse_args()
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # files full of NaN
    with tempfile.TemporaryDirectory() as name:
        check_seeds(Path(name))
        report = run(Path(name), args.count, args.seed, args.only)
    print(
        f"{args.count} files of seed {args.seed}: {report.num_good} loaded, {report.num_refused} "
        f"refused ({dict(report.refusals)}), {len(report.defects)} defects; the slowest took "
        f"{report.slowest_s:.2f} s; memory grew by {report.grown_bytes / 2**20:.0f} MiB"
    )
    for defect in report.defects:
        print(defect)
    return 1 if report.defects else 0


if __name__ == "__main__":
    sys.exit(main())
