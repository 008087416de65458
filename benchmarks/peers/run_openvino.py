# pyright: basic, reportMissingImports=false
"""OpenVINO GenAI's continuous batching pipeline, on the GGUF file itself, with its KV cache in u8.

Adds all requests and steps until none is left, as the `generate` of the pipeline does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.runner import (
    KV_CACHE_GIB,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Item,
    Options,
    Sampling,
    Stream,
    package_versions,
    serve,
)


class OpenVinoBackend:
    """One pipeline; request numbers are unique over its life."""

    def __init__(self, model: Path) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = MAX_NUM_SEQS
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        self._properties = {"KV_CACHE_PRECISION": "u8"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(model), scheduler, "CPU", self._properties
        )
        self._num_added = 0

    def details(self) -> dict[str, Any]:
        return {
            **package_versions("openvino", "openvino-genai"),
            "precision": "GGUF weights as OpenVINO reads them, u8 KV",
            "properties": self._properties,
        }

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        pass

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        live = [
            (self._add(item, sampling, sampling.seed_of(index)), Stream())
            for index, item in enumerate(items)
        ]
        streams = [stream for _, stream in live]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            at = time.monotonic()
            for handle, stream in live:
                while handle.can_read():
                    for output in handle.read().values():
                        stream.add(output.generated_ids, at)
            live = [
                (handle, stream)
                for (handle, stream) in live
                if handle.get_status() == self._genai.GenerationStatus.RUNNING
            ]
        return streams

    def _add(self, item: Item, sampling: Sampling, seed: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = item.num_output
        config.ignore_eos = True
        config.do_sample = not sampling.is_greedy
        if config.do_sample:
            config.temperature, config.top_p = sampling.temperature, sampling.top_p
            config.rng_seed = seed
        tokens = self._openvino.Tensor(self._numpy.array([item.prompt], dtype=self._numpy.int64))
        self._num_added += 1
        return self._pipeline.add_request(self._num_added, tokens, config)


def load(model: Path, options: Options) -> OpenVinoBackend:
    return OpenVinoBackend(model)


if __name__ == "__main__":
    serve(load)
