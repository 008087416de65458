"""A model on the compiled kernels: one call per step, on packed weights.

Weights are bf16, int8 or int4; 4-bit and 8-bit blocks of a GGUF file are packed without
requantization. This module keeps alive all memory that the kernels read. The kernels do not know
tensor names.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from headway.core.executor import BlockRecorder
from headway.core.plan import Failure, Sample
from headway.errors import ModelLoadError
from headway.executors.cpu import kernels
from headway.executors.cpu.kernel_blocks import KernelBlocks
from headway.executors.cpu.offload_store import OffloadStore
from headway.executors.cpu.packing import Packer, no_threads
from headway.executors.cpu.sampling import HiddenStates, Samplings, Scorings
from headway.executors.cpu.shared_kv import KVRecorder, SharedKV
from headway.executors.rope import rope_frequencies
from headway.executors.sampling import HiddenRow, Row, SampleRow, ScoreRow
from headway.executors.spec import ModelSpec
from headway.executors.step_model import (
    DEFAULT_LOADING,
    ModelLoading,
    ModelOptions,
    RowOutcome,
    Span,
)
from headway.executors.weights import Checkpoint
from headway.executors.weights.names import (
    DOWN_PROJ,
    EMBEDDING,
    FINAL_NORM,
    GATE_UP,
    HEAD,
    O_PROJ,
    QKV,
    ROPE_FACTORS,
    layer_prefix,
)

logger = logging.getLogger(__name__)


class StepMasks(NamedTuple):
    """Addresses of the masks of a step, and the work that writes them."""

    addresses: int | None
    pending: Future[None] | None


NO_MASKS = StepMasks(None, None)


class PromptRows(NamedTuple):
    """What a step returns of prompts."""

    scorings: Scorings
    states: HiddenStates


class CompiledModel:
    """A StepModel on the compiled kernels."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: ModelOptions,
        loading: ModelLoading = DEFAULT_LOADING,
    ) -> None:
        library = kernels.load_kernels()
        if library is None:
            raise ModelLoadError(
                "the compiled kernels are not built; install a C++ compiler and reinstall"
            )
        self.spec = checkpoint.spec
        if misfit := self.spec.facts.kernel_misfit:
            raise ModelLoadError(f"the kernels cannot run this model: {misfit}")
        self.num_blocks = options.num_blocks
        self.block_size = options.block_size
        self._library = library
        self._packer = Packer(library, checkpoint, options, loading)
        self._model = _describe(self._packer, options)
        self._packer.finish()
        loading.when_packed()
        block_bytes: int = library.hw_block_bytes(self._model)
        num_bytes = block_bytes * options.num_blocks * self.spec.num_layers
        # Not initialized: the kernels clear a block before they read it.
        shape = (self.spec.num_layers, options.num_blocks, block_bytes)
        shared = self._shared = self._map_shared(loading.kv_descriptor, options, shape)
        self._model.kv = shared.address if shared else self._packer.allocate(num_bytes)
        memory = (ctypes.c_uint8 * num_bytes).from_address(self._model.kv)
        blocks = np.ctypeslib.as_array(memory).reshape(shape)
        self.num_slots = options.num_slots
        self._offload = OffloadStore(blocks, options.num_slots)
        self._engine = _create_engine(library, self._model, options)
        self._blocks = KernelBlocks(library, self._engine)
        self.recorder: BlockRecorder | None = (
            KVRecorder(shared, self._blocks, options.block_size) if shared else None
        )

    def _map_shared(
        self, descriptor: int | None, options: ModelOptions, shape: tuple[int, int, int]
    ) -> SharedKV | None:
        if descriptor is None:
            return None
        # What the contents of a block depend on, beside its tokens.
        numerics = (
            options.dtype,
            options.kv_dtype,
            options.activation_dtype,
            options.kernels,
            options.max_model_len,
        )
        identity = hashlib.sha256(f"{self._packer.identity}\n{numerics}".encode()).digest()
        try:
            return SharedKV(descriptor, identity, shape)
        except OSError as error:
            logger.warning("KV blocks will not outlive this process: %s", error)
            return None

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self._library.hw_destroy(self._engine)
            self._engine = None

    def sample(
        self,
        spans: Sequence[Span],
        places: Sequence[int],
        rows: Sequence[Row],
        masks: Future[None] | None = None,
    ) -> list[RowOutcome]:
        sampled = {at: row for at, row in enumerate(rows) if isinstance(row, SampleRow)}
        # Rows that need more than their best token come first: only theirs are logits in memory.
        order = sorted(sampled, key=lambda at: not sampled[at].needs_logits)
        special = [sampled[at] for at in order if sampled[at].needs_logits]
        samplings = Samplings(special, self.spec.vocab_size)
        addresses = samplings.mask_addresses([sampled[at] for at in order])
        step_masks = StepMasks(addresses, masks)
        ordered = [places[at] for at in order]
        scored = {at: row for at, row in enumerate(rows) if isinstance(row, ScoreRow)}
        scored_places = [places[at] for at in scored]
        scorings = Scorings(scored_places, list(scored.values()), self.spec.vocab_size)
        hidden = [at for at, row in enumerate(rows) if isinstance(row, HiddenRow)]
        states = HiddenStates([places[at] for at in hidden], self.spec.hidden_size)
        wanted = PromptRows(scorings, states)
        chosen_ids, best = self._step(spans, ordered, samplings, masks=step_masks, prompts=wanted)
        outcomes: dict[int, RowOutcome] = dict(zip(scored, scorings.outcomes(), strict=True))
        outcomes |= zip(hidden, states.outcomes(), strict=True)
        for row, at in enumerate(order):
            if math.isfinite(best[row]):
                logprobs = samplings.logprobs_of(row) if row < len(special) else None
                outcomes[at] = Sample((chosen_ids[row],), logprobs)
            else:
                outcomes[at] = Failure(f"the model's scores are not finite ({best[row]})")
        return [outcomes[at] for at in range(len(rows))]

    def logits(self, spans: Sequence[Span], places: Sequence[int]) -> np.ndarray:
        logits = np.empty((len(places), self.spec.vocab_size), dtype=np.float32)
        self._step(spans, places, Samplings((), self.spec.vocab_size), logits.ctypes.data)
        return logits

    def _step(
        self,
        spans: Sequence[Span],
        places: Sequence[int],
        samplings: Samplings,
        logits: int | None = None,
        masks: StepMasks = NO_MASKS,
        prompts: PromptRows | None = None,
    ) -> tuple[array[int], array[float]]:
        """Run the kernels; return the chosen tokens and the best logits of `places`."""
        token_ids = array("i")
        for span in spans:
            token_ids.extend(span.token_ids)
        tables = [_table(span.block_ids) for span in spans]
        starts = array("i", [span.start for span in spans])
        lengths = array("i", [len(span.token_ids) for span in spans])
        addresses = array("q", [table.buffer_info()[0] for table in tables])
        rows = array("i", places)
        chosen_ids, best = array("i", bytes(4 * len(rows))), array("f", bytes(4 * len(rows)))
        step = kernels.Step(
            len(spans),
            len(token_ids),
            len(rows),
            len(samplings.structs),
            *(_at(a) for a in (token_ids, starts, lengths, addresses, rows)),
            samplings.structs,
            logits,
            _at(chosen_ids),
            _at(best),
            samplings.logprobs,
            masks.addresses,
            self._ready_flag(masks.pending),
        )
        if prompts is not None:
            scorings, states = prompts
            step.scored, step.scores = scorings.structs, scorings.scores
            step.num_scored = scorings.num_rows
            step.num_hidden, step.hidden_rows = len(states.rows), _at(states.rows)
            step.hidden = states.values.ctypes.data
        if self._shared is not None:
            for span in spans:
                for block_id in span.written_block_ids(self.block_size):
                    self._shared.prepare(block_id)
        _check(self._library.hw_step(self._engine, step))
        return chosen_ids, best

    def _ready_flag(self, pending: Future[None] | None) -> ctypes._Pointer[ctypes.c_int32] | None:
        """Return a flag that is set when the masks are written; None if nothing is pending."""
        if pending is None:
            return None
        flag = ctypes.pointer(ctypes.c_int32(0))
        pending.add_done_callback(lambda _: self._library.hw_set_ready(flag))
        return flag

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        source_ids, target_ids = array("i", sources), array("i", targets)
        _check(
            self._library.hw_copy_blocks(
                self._engine, _at(source_ids), _at(target_ids), len(source_ids)
            )
        )

    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        self._offload.save(block_ids, slot_ids)

    def load(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self._offload.load(slot_ids, block_ids)
        self._blocks.forget(block_ids)

    def profile(self) -> dict[str, float]:
        """Return seconds by part since the last call, on the thread of the engine."""
        seconds = (ctypes.c_double * len(kernels.PARTS))()
        self._library.hw_profile(self._engine, seconds)
        return dict(zip(kernels.PARTS, seconds, strict=True))


def _create_engine(library: ctypes.CDLL, model: kernels.Model, options: ModelOptions) -> int:
    """Start the threads of the kernels; return the engine address for `hw_step`."""
    isa = kernels.ISA.index(options.kernels or "plain")
    engine = ctypes.c_void_p()
    status = library.hw_create(model, isa, options.num_threads, engine)
    if status == kernels.STATUSES["NO_THREADS"]:
        raise no_threads(options.num_threads)
    if status == kernels.STATUSES["NO_MEMORY"]:
        raise ModelLoadError("no memory left for the kernels; set --max-model-len lower")
    if status or not engine.value:
        raise ModelLoadError(
            f"the {options.kernels} kernels cannot run this model; set --kernels none"
        )
    return engine.value


def _check(status: int) -> None:
    if status:
        raise MemoryError("the compiled kernels ran out of memory")


def _table(block_ids: Sequence[int]) -> array[int]:
    return block_ids if isinstance(block_ids, array) else array("i", block_ids)


def _at(numbers: array) -> int:
    return numbers.buffer_info()[0]


def _describe(packer: Packer, options: ModelOptions) -> kernels.Model:
    """Return the model struct for the kernels."""
    spec = packer.checkpoint.spec
    embedding = packer.matrix([EMBEDDING])
    layers = (kernels.Layer * spec.num_layers)(
        *(_layer(packer, spec, index) for index in range(spec.num_layers))
    )
    packer.kept.append(layers)
    final_norm = packer.values(FINAL_NORM)
    head = embedding if spec.tie_embeddings else packer.matrix([HEAD])
    factors = packer.reader.read(ROPE_FACTORS) if packer.reader.has(ROPE_FACTORS) else None
    positions = np.arange(options.max_model_len, dtype=np.float32)
    angles = np.outer(positions, rope_frequencies(spec, factors))
    return kernels.Model(
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.vocab_size,
        options.max_model_len,
        spec.rms_norm_eps,
        kernels.FORMATS[options.kv_dtype],
        options.block_size,
        options.num_blocks,
        kernels.FORMATS[options.activation_dtype],
        0,
        layers,
        embedding,
        head,
        final_norm,
        packer.keep(np.cos(angles)),
        packer.keep(np.sin(angles)),
        None,
    )


def _layer(packer: Packer, spec: ModelSpec, index: int) -> kernels.Layer:
    """Return the struct of one layer."""
    prefix = layer_prefix(index)
    attention_norm = packer.values(f"{prefix}input_layernorm.weight")
    qkv = packer.linear(prefix, QKV)
    has_norm = spec.has_qk_norm
    return kernels.Layer(
        attention_norm,
        packer.values(f"{prefix}self_attn.q_norm.weight") if has_norm else None,
        packer.values(f"{prefix}self_attn.k_norm.weight") if has_norm else None,
        packer.values(f"{prefix}post_attention_layernorm.weight"),
        qkv,
        packer.linear(prefix, (O_PROJ,)),
        packer.linear(prefix, GATE_UP, is_interleaved=True),
        packer.linear(prefix, (DOWN_PROJ,)),
        spec.windows[index] or 0,
        0,
    )
