"""Base of all runners: a process that loads a model once and runs workloads on request.

A line `run WORKLOAD SAMPLING` on standard input is answered by lines of JSON on standard output:
`started` after the warm-up, then `result`. The end of the input ends the process. Only the standard
library is used, because each runner has its own environment. Output of libraries goes to standard
error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TextIO

MAX_NUM_SEQS = 32
MAX_NUM_BATCHED_TOKENS = 512
MAX_MODEL_LEN = 4096
KV_CACHE_GIB = 2
MAX_NUM_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class Item:
    """One request: prompt tokens, and the exact number of output tokens."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How all requests of a run sample; other limits such as top_k are off."""

    temperature: float
    top_p: float
    seed: int = 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def seed_of(self, index: int) -> int:
        """Return the seed of a request; no two runs share one."""
        return self.seed * MAX_NUM_REQUESTS + index


GREEDY, SAMPLED = "greedy", "sampled"
SAMPLINGS = {GREEDY: Sampling(0.0, 1.0), SAMPLED: Sampling(0.8, 0.95)}


@dataclass(slots=True)
class Stream:
    """Tokens of one request, and the times of the first and the last."""

    token_ids: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0

    def add(self, token_ids: Sequence[int], at: float) -> None:
        if token_ids and not self.token_ids:
            self.first_at = at
        if token_ids:
            self.last_at = at
        self.token_ids.extend(token_ids)


class Backend(Protocol):
    """A loaded model."""

    def details(self) -> dict[str, Any]:
        """Return versions, settings and `precision` for the results file."""
        ...

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        """Prepare for a run before it is timed, such as the shape of the cache."""
        ...

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        """Run all requests together, ignoring the end-of-sequence token."""
        ...


Options = Mapping[str, str]
Load = Callable[[Path, Options], Backend]


def serve(load: Load) -> None:
    """Load the model, then answer commands until the end of the input."""
    _die_with_parent()
    answers = _keep_stdout()
    options, args = _parse()
    workloads: dict[str, Any] = json.loads(args.workloads.read_text())
    backend = load(args.model, options)
    _answer(answers, {"event": "ready", "details": backend.details()})
    runs = Runs(backend)
    for line in sys.stdin:
        match line.split():
            case ["run", name, sampling] if name in workloads and sampling in SAMPLINGS:
                pass
            case _:
                _answer(answers, {"event": "error", "message": f"cannot {line.strip()!r}"})
                continue
        items = [Item(item["prompt"], item["num_output"]) for item in workloads[name]["items"]]
        try:
            runs.prepare(name, sampling, items, workloads[name]["is_warmed_up"])
            _answer(answers, {"event": "started"})
            figures = runs.measure(name, sampling, items)
        except Exception as error:
            traceback.print_exc()
            _answer(answers, {"event": "error", "message": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from error  # its state is unknown
        _answer(answers, {"event": "result", **figures})
    os._exit(0)  # threads that a library left behind would keep the process alive


class Runs:
    """The runs of a process; each has another seed."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._num_runs = 0
        self._warm_up: dict[tuple[str, str], list[list[int]]] = {}
        """Tokens of the warm-up by workload and sampling."""

    def prepare(self, name: str, sampling: str, items: Sequence[Item], is_warmed_up: bool) -> None:
        self._backend.arrange(items, SAMPLINGS[sampling])
        if is_warmed_up and (name, sampling) not in self._warm_up:
            streams = self._backend.run(items, self._next(sampling))
            self._warm_up[name, sampling] = [stream.token_ids for stream in streams]

    def measure(self, name: str, sampling: str, items: Sequence[Item]) -> dict[str, Any]:
        """Time one run; return its figures."""
        settings = self._next(sampling)
        started_at = time.monotonic()
        streams = self._backend.run(items, settings)
        seconds = time.monotonic() - started_at
        before = self._warm_up.get((name, sampling))
        check_streams(items, streams, settings, before)
        return figures_of(items, streams, started_at, seconds)

    def _next(self, sampling: str) -> Sampling:
        self._num_runs += 1
        return replace(SAMPLINGS[sampling], seed=self._num_runs)


def check_streams(
    items: Sequence[Item],
    streams: Sequence[Stream],
    sampling: Sampling,
    before: Sequence[Sequence[int]] | None,
) -> None:
    """Raise RuntimeError for wrong lengths, or if two seeds gave the same tokens."""
    for item, stream in zip(items, streams, strict=True):
        if len(stream.token_ids) != item.num_output:
            raise RuntimeError(f"{len(stream.token_ids)} tokens instead of {item.num_output}")
    if not sampling.is_greedy and before == [stream.token_ids for stream in streams]:
        raise RuntimeError("two runs gave the same tokens: it does not sample")


def figures_of(
    items: Sequence[Item], streams: Sequence[Stream], started_at: float, seconds: float
) -> dict[str, Any]:
    num_tokens = sum(item.num_output for item in items)
    per_token = [
        (stream.last_at - stream.first_at) / (len(stream.token_ids) - 1)
        for stream in streams
        if len(stream.token_ids) > 1
    ]
    return {
        "num_output_tokens": num_tokens,
        "seconds": seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "ttft_s": median(stream.first_at - started_at for stream in streams),
        "tpot_ms": 1000 * median(per_token) if per_token else None,
        "first_token_ids": [stream.token_ids[0] for stream in streams],
        "peak_memory_mb": peak_memory_mb(),
    }


def peak_memory_mb() -> float:
    """Return the most memory that this process had, with mapped files."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def package_versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


def _parse() -> tuple[dict[str, str], argparse.Namespace]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--option", action="append", default=[], help="key=value")
    args = parser.parse_args()
    return dict(option.split("=", 1) for option in args.option), args


def _keep_stdout() -> TextIO:
    """Return standard output for the answers; redirect other output to stderr."""
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def _answer(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _die_with_parent() -> None:
    """End this process with its parent, even while it is stopped between turns."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
