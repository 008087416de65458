"""Headway's own runner: the engine core on the executor, as `headway bench offline` drives it.

Settings come from HEADWAY_* variables, as for the server; the limits of the workloads are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.runner import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Item,
    Options,
    Sampling,
    Stream,
    serve,
)
from headway._version import __version__
from headway.bench.offline.modes import Bench
from headway.bench.options import SamplingOptions
from headway.build import load_model
from headway.clock import SystemClock
from headway.config import load_config
from headway.workload import OfflineWorkload, WorkItem


class HeadwayBackend:
    """An executor, and a new scheduler for every run."""

    def __init__(self, model: Path) -> None:
        self._config = load_config(
            {
                "model": str(model),
                "max_num_seqs": MAX_NUM_SEQS,
                "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                "enable_prefix_caching": False,
            }
        )
        self._model = load_model(self._config)
        self._bench = Bench(
            self._model.executor, self._config.scheduler, SystemClock(), enable_prefix_caching=False
        )

    def details(self) -> dict[str, Any]:
        resolved = self._model.resolved
        return {
            "headway": __version__,
            "precision": f"{resolved.dtype} weights, {resolved.activation_dtype} activations, "
            f"{resolved.kv_dtype} KV",
            "resolved": list(resolved.reasons),
        }

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        pass

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        work = tuple(WorkItem(tuple(item.prompt), item.num_output) for item in items)
        options = SamplingOptions(temperature=sampling.temperature, top_p=sampling.top_p)
        bench = replace(self._bench, sampling=options, seed=sampling.seed_of(0))
        record = bench.run_continuous(OfflineWorkload("peers", work))
        return [
            Stream(request.token_ids, request.first_token_at or 0.0, request.finished_at or 0.0)
            for request in record.requests
        ]


def load(model: Path, options: Options) -> HeadwayBackend:
    return HeadwayBackend(model)


if __name__ == "__main__":
    serve(load)
