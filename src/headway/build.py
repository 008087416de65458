"""The composition root: wired objects from settings.

`build_server.py` has the part of the server, `build_fleet.py` that of engines on the network.

The API process and the engine process both import this module, and each needs a part of it: what
takes long to import is imported where it is used.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from headway._version import __version__
from headway.clock import SystemClock
from headway.config import Config, weights_cache_dir
from headway.engine.process.messages import EngineInfo
from headway.errors import ModelLoadError
from headway.executors.source import ModelSource, locate, locate_here

if TYPE_CHECKING:
    from headway.core.engine import EngineCore
    from headway.core.events import Sink
    from headway.core.executor import BlockRecorder, Executor
    from headway.engine.offline import OfflineParts
    from headway.engine.process.loop import Progress
    from headway.executors.cpu.packed_cache import PackedCache
    from headway.executors.executor import ModelExecutor
    from headway.record.recording import Recording
    from headway.resolve import ModelFacts, Resolved
    from headway.text import ChatTemplate, Tokenizer
    from headway.text.matchers import Matchers


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor with its weights in memory, and its resolved settings."""

    executor: ModelExecutor
    resolved: Resolved
    vocab_size: int
    hidden_size: int


def locate_model(config: Config) -> Config:
    """Return the settings with the model's name replaced by its path on this machine.

    A Hugging Face id is resolved once, here: a branch may move while the server runs, and an engine
    that takes over must load the same weights as the engine before it.
    """
    return _with_path(config, locate(config.model.model, config.model.revision))


def locate_model_here(config: Config) -> Config | None:
    """Return the same at once if the model is a file or folder here, else None.

    `locate_model` reports a wrong path, after mistakes in other settings were reported.
    """
    try:
        source = locate_here(config.model.model)
    except ModelLoadError:
        return None
    return None if source is None else _with_path(config, source)


def _with_path(config: Config, source: ModelSource) -> Config:
    return replace(config, model=replace(config.model, model=str(source.path), revision=None))


def load_text(config: Config) -> tuple[Tokenizer, ChatTemplate]:
    """Return the tokenizer and chat template of the configured model."""
    from headway.text import ChatTemplate, Tokenizer

    tokenizer = Tokenizer.from_path(locate(config.model.model, config.model.revision).path)
    return tokenizer, ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)


def model_facts(config: Config) -> ModelFacts:
    """Return what the headers of the configured model say; no weights are read."""
    from headway.executors.weights import facts_of, open_checkpoint

    return facts_of(open_checkpoint(locate(config.model.model, config.model.revision)))


def load_model(
    config: Config,
    progress: Progress | None = None,
    kv_descriptor: int | None = None,
    when_packed: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """Resolve the settings and load the weights; see ModelLoading for the other parameters."""
    from headway.executors import load
    from headway.executors.hardware import probe_hardware
    from headway.resolve import resolve

    checkpoint = load.open_checkpoint(locate(config.model.model, config.model.revision))
    resolved = resolve(config, load.facts_of(checkpoint), probe_hardware(load.has_cuda()))
    loading = load.ModelLoading(
        progress=progress,
        cache=packed_cache(config),
        kv_descriptor=kv_descriptor,
        when_packed=when_packed,
    )
    executor = load.load_executor(checkpoint, resolved, SystemClock(), loading)
    spec = checkpoint.spec
    return LoadedModel(executor, resolved, spec.vocab_size, spec.hidden_size)


def packed_cache(config: Config) -> PackedCache | None:
    """Return the cache of packed weights; None if it is turned off."""
    from headway.executors.cpu.packed_cache import PackedCache

    folder = weights_cache_dir(config.model)
    return None if folder is None else PackedCache(Path(folder), config.model.weights_cache_bytes)


def build_core(
    config: Config,
    executor: Executor,
    sink: Sink,
    recorder: BlockRecorder | None = None,
    recording: Recording | None = None,
) -> EngineCore:
    """Return an engine core: a scheduler over `executor`, with events sent to `sink`."""
    from headway.core.engine import EngineCore
    from headway.core.scheduler import Scheduler

    scheduler = Scheduler(config.scheduler, executor.capacity(), config.cache.enable_prefix_caching)
    if recording is None:
        return EngineCore(scheduler, executor, SystemClock(), sink, recorder)
    from headway.record.core import RecordedCore

    return RecordedCore(scheduler, executor, SystemClock(), sink, recorder, recording)


def build_recording(config: Config, model: LoadedModel) -> Recording | None:
    """Begin the recording of this process; None if there is to be none, or it cannot begin."""
    if config.recording.record is None:
        return None
    from headway.record.encoder import CallEncoder
    from headway.record.entries import RecordingHeader
    from headway.record.recording import start_recording

    resolved = model.resolved
    formats = (resolved.dtype, resolved.activation_dtype, resolved.kv_dtype, resolved.kernels)
    capacity, has_cache = model.executor.capacity(), config.cache.enable_prefix_caching
    about = about_recording()
    header = RecordingHeader(
        recording=about.name,
        headway=__version__,
        platform=about.platform,
        model=Path(config.model.model).name,
        numerics=", ".join(str(one) for one in formats if one is not None),
        scheduler=config.scheduler,
        capacity=capacity,
        enable_prefix_caching=has_cache,
        clock_began_at=about.clock_began_at,
    )
    encoder = CallEncoder(about.key, capacity.block_size if has_cache else 0)
    return start_recording(config.recording, header, encoder)


@dataclass(frozen=True, slots=True)
class RecordingFacts:
    """What every recording of this process says, and the key of its hashes."""

    name: str
    platform: str
    clock_began_at: float
    key: bytes


def about_recording() -> RecordingFacts:
    """Return the facts of a new recording."""
    return RecordingFacts(
        f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}-{os.urandom(3).hex()}",
        f"{platform.platform()}, Python {platform.python_version()}",
        time.time() - SystemClock().now(),
        os.urandom(16),
    )


def engine_info(config: Config, model: LoadedModel) -> EngineInfo:
    """Return the facts about this engine that its clients need."""
    return EngineInfo(
        model.executor.capacity(),
        max_num_seqs=config.scheduler.max_num_seqs,
        vocab_size=model.vocab_size,
        scheduling_policy=config.scheduler.scheduling_policy,
        notes=model.resolved.reasons,
        dtype=model.resolved.dtype,
        kv_cache_bytes=model.resolved.kv_cache_bytes,
        has_prefix_cache=config.cache.enable_prefix_caching,
        kv_dtype=model.resolved.kv_dtype,
        activation_dtype=model.resolved.activation_dtype,
        kernels=model.resolved.kernels,
        hidden_size=model.hidden_size,
    )


def build_matchers(config: Config, vocab_size: int) -> Matchers:
    """Return what compiles grammars; it loads the tokenizer with the first grammar."""
    from headway.text.matchers import Matchers

    return Matchers(lambda: load_text(config)[0], vocab_size)


def build_offline(config: Config, progress: Progress | None = None) -> OfflineParts:
    """Return the parts of an engine in the caller's process and thread."""
    from headway.engine.offline import OfflineParts
    from headway.text.matchers import Matchers

    config = locate_model(config)
    tokenizer, chat_template = load_text(config)
    model = load_model(config, progress)
    matchers = Matchers(lambda: tokenizer, model.vocab_size)
    model.executor.use_grammars(matchers)
    return OfflineParts(
        lambda sink: build_core(config, model.executor, sink),
        engine_info(config, model),
        tokenizer,
        chat_template,
        SystemClock(),
        matchers,
    )
