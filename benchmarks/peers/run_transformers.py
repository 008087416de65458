# pyright: basic, reportMissingImports=false
"""transformers in bf16: `generate` on static batches, or its continuous batching.

mode=static: batches of 32 in the order given, padded on the left to the longest prompt and run
until the longest output is done. mode=continuous: the manager behind `generate_batch`, which also
takes a length per request.
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
    num_cores,
    package_versions,
    serve,
)

NO_TOKEN = -1
PAD = 0
PAGE_SIZE = 256
PRECISION = "bf16 weights, bf16 KV"


def load_weights(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(num_cores())
    weights = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.bfloat16)
    weights.eval()
    # Outputs have the requested lengths: no token ends one early.
    weights.generation_config.eos_token_id = None
    weights.generation_config.pad_token_id = PAD
    return weights


def generation_of(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of a generation config; transformers' own top_k of 50 is off."""
    if sampling.is_greedy:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
    }


class StaticBackend:
    """`generate` on one batch after the other."""

    def __init__(self, model: Path) -> None:
        self._model = load_weights(model)

    def details(self) -> dict[str, Any]:
        return {
            **package_versions("transformers", "torch"),
            "precision": PRECISION,
            "mode": "static",
        }

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        pass

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        import torch

        torch.manual_seed(sampling.seed)
        streams: list[Stream] = []
        for start in range(0, len(items), MAX_NUM_SEQS):
            streams.extend(self._run_batch(items[start : start + MAX_NUM_SEQS], sampling))
        return streams

    def _run_batch(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        import torch
        from transformers import StoppingCriteria, StoppingCriteriaList

        times: list[float] = []

        class Clock(StoppingCriteria):
            """Records the time of every token; stops nothing."""

            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                times.append(time.monotonic())
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        longest = max(len(item.prompt) for item in items)
        padded = [[PAD] * (longest - len(item.prompt)) + item.prompt for item in items]
        mask = [[0] * (longest - len(item.prompt)) + [1] * len(item.prompt) for item in items]
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                **generation_of(sampling),
                max_new_tokens=max(item.num_output for item in items),
                stopping_criteria=StoppingCriteriaList([Clock()]),
            )
        return [
            Stream(row[longest : longest + item.num_output], times[0], times[item.num_output - 1])
            for item, row in zip(items, output.tolist(), strict=True)
        ]


class ContinuousBackend:
    """The continuous batching manager, which runs in a thread of its own."""

    def __init__(self, model: Path) -> None:
        self._model = load_weights(model)
        self._manager: Any = None
        self._sampling: Sampling | None = None

    def details(self) -> dict[str, Any]:
        return {
            **package_versions("transformers", "torch"),
            "precision": PRECISION,
            "mode": "continuous",
        }

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        """Make a manager for the sampling, which is a setting of it."""
        if sampling == self._sampling:
            return
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if self._manager is not None:
            self._manager.stop(block=True)
        config = self._model.config
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * 2
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(
                **generation_of(sampling), eos_token_id=NO_TOKEN, pad_token_id=PAD
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=KV_CACHE_GIB * 1024**3 // (per_token * PAGE_SIZE),
                max_batch_tokens=MAX_NUM_BATCHED_TOKENS,
                max_requests_per_batch=MAX_NUM_SEQS,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()
        self._sampling = sampling

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        import torch

        torch.manual_seed(sampling.seed)
        names = [
            self._manager.add_request(
                item.prompt,
                max_new_tokens=item.num_output,
                eos_token_id=NO_TOKEN,
                record_timestamps=True,
            )
            for item in items
        ]
        streams: dict[str, Stream] = {}
        while len(streams) < len(items):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the generation thread ended")
            if result is None or not result.is_finished():
                continue
            if result.error is not None:
                raise RuntimeError(result.error)
            # The manager uses the performance counter, which on Linux is the monotonic clock.
            times = result.timestamps
            streams[result.request_id] = Stream(result.generated_tokens, times[0], times[-1])
        return [streams[name] for name in names]


def load(model: Path, options: Options) -> StaticBackend | ContinuousBackend:
    if options.get("mode") == "continuous":
        return ContinuousBackend(model)
    return StaticBackend(model)


if __name__ == "__main__":
    serve(load)
