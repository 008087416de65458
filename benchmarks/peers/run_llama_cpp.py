# pyright: basic, reportMissingImports=false
"""llama.cpp through llama-cpp-python: a plain scheduling loop around `llama_decode`.

Each sequence has a KV stream of its own. A step decodes one token of every running request and
gives the rest of the token budget to prompts, oldest first, as llama.cpp's server does.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.runner import (
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

CONTEXT_STEP = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Number and length of the KV streams."""

    num_seqs: int
    num_tokens: int


@dataclass(slots=True)
class Running:
    """A running request, its KV stream and its computed tokens."""

    item: Item
    stream: Stream
    seq_id: int
    num_computed: int = 0
    num_scheduled: int = 0
    sampler: Any = None
    """Chain of samplers; None for greedy."""
    row: int | None = field(default=None)
    """Row of its logits in the batch of this step, if it samples a token."""

    @property
    def is_decoding(self) -> bool:
        return self.num_computed >= len(self.item.prompt)

    @property
    def is_finished(self) -> bool:
        return len(self.stream.token_ids) >= self.item.num_output


class LlamaCppBackend:
    """One model, with a context for the last arranged workload."""

    def __init__(self, model: Path) -> None:
        import llama_cpp
        import numpy

        self._llama, self._numpy = llama_cpp, numpy
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        if not self._model:
            raise RuntimeError(f"cannot load {model}")
        self._num_vocab = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(MAX_NUM_BATCHED_TOKENS, 0, 1)
        self._context: Any = None
        self._shape: Shape | None = None

    def details(self) -> dict[str, Any]:
        info = self._llama.llama_print_system_info().decode(errors="replace")
        name = ctypes.create_string_buffer(128)
        self._llama.llama_model_desc(self._model, name, len(name))
        return {
            **package_versions("llama-cpp-python"),
            "precision": f"{name.value.decode().split()[-1]} weights, f16 KV",
            "built_for": info,
        }

    def arrange(self, items: Sequence[Item], sampling: Sampling) -> None:
        longest = max(len(item.prompt) + item.num_output for item in items)
        rounded = -(-longest // CONTEXT_STEP) * CONTEXT_STEP
        shape = Shape(min(MAX_NUM_SEQS, len(items)), rounded)
        if shape == self._shape:
            return
        if self._context is not None:
            self._llama.llama_free(self._context)
        params = self._llama.llama_context_default_params()
        params.n_ctx = shape.num_seqs * shape.num_tokens
        params.n_seq_max = shape.num_seqs
        params.n_batch = params.n_ubatch = MAX_NUM_BATCHED_TOKENS
        params.n_threads = params.n_threads_batch = num_cores()
        params.kv_unified = False
        params.no_perf = True
        self._context = self._llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"no context for {shape}")
        self._shape = shape

    def run(self, items: Sequence[Item], sampling: Sampling) -> list[Stream]:
        if self._shape is None:
            raise RuntimeError("nothing is arranged")
        memory = self._llama.llama_get_memory(self._context)
        self._llama.llama_memory_clear(memory, True)
        streams = [Stream() for _ in items]
        waiting = deque(enumerate(zip(items, streams, strict=True)))
        free_seq_ids = list(range(self._shape.num_seqs))
        running: list[Running] = []
        while waiting or running:
            while waiting and free_seq_ids:
                index, (item, stream) = waiting.popleft()
                sampler = self._sampler(sampling, index)
                running.append(Running(item, stream, free_seq_ids.pop(), sampler=sampler))
            self._step(running)
            for request in [request for request in running if request.is_finished]:
                self._llama.llama_memory_seq_rm(memory, request.seq_id, -1, -1)
                if request.sampler is not None:
                    self._llama.llama_sampler_free(request.sampler)
                free_seq_ids.append(request.seq_id)
                running.remove(request)
        return streams

    def _step(self, running: Sequence[Running]) -> None:
        batch = self._batch
        batch.n_tokens = 0
        # Decodes first, so that prompts do not delay them.
        for request in sorted(running, key=lambda request: not request.is_decoding):
            self._schedule(request, MAX_NUM_BATCHED_TOKENS - batch.n_tokens)
        code = self._llama.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode: {code}")
        sampled = [
            (request, self._sample(request.sampler, request.row))
            for request in running
            if request.row is not None
        ]
        at = time.monotonic()
        for request in running:
            request.num_computed += request.num_scheduled
        for request, token in sampled:
            request.stream.add([token], at)

    def _schedule(self, request: Running, budget: int) -> None:
        """Add as many tokens of the request to the batch as the budget allows."""
        batch, prompt, start = self._batch, request.item.prompt, request.num_computed
        pending = request.stream.token_ids[-1:] if request.is_decoding else prompt[start:]
        taken = pending[:budget]
        request.num_scheduled = len(taken)
        request.row = None
        for offset, token in enumerate(taken):
            at = batch.n_tokens
            batch.token[at] = token
            batch.pos[at] = start + offset
            batch.n_seq_id[at] = 1
            batch.seq_id[at][0] = request.seq_id
            batch.logits[at] = 0
            batch.n_tokens += 1
        if taken and len(taken) == len(pending):
            batch.logits[batch.n_tokens - 1] = 1
            request.row = batch.n_tokens - 1

    def _sampler(self, sampling: Sampling, index: int) -> Any:
        """Return a chain with temperature before top-p, as the other engines have it."""
        if sampling.is_greedy:
            return None
        llama = self._llama
        chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for sampler in (
            llama.llama_sampler_init_temp(sampling.temperature),
            llama.llama_sampler_init_top_p(sampling.top_p, 1),
            llama.llama_sampler_init_dist(sampling.seed_of(index)),
        ):
            llama.llama_sampler_chain_add(chain, sampler)
        return chain

    def _sample(self, sampler: Any, row: int) -> int:
        if sampler is None:
            return self._argmax(row)
        return int(self._llama.llama_sampler_sample(sampler, self._context, row))

    def _argmax(self, row: int) -> int:
        logits = self._llama.llama_get_logits_ith(self._context, row)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        values = self._numpy.ctypeslib.as_array(pointer, shape=(self._num_vocab,))
        return int(values.argmax())


def load(model: Path, options: Options) -> LlamaCppBackend:
    return LlamaCppBackend(model)


if __name__ == "__main__":
    serve(load)
