"""The composition root: wired objects from settings. Only this module knows every package."""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.clock import SystemClock
from headway.config import Config, FrontendConfig, SupervisionConfig, weights_cache_dir
from headway.core.events import Sink
from headway.core.executor import BlockRecorder, Executor
from headway.core.waiting.policies import make_queue
from headway.engine.client.async_engine import AsyncEngine, FailoverRules
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.launcher import EngineProcess
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.start import ENGINE_COMMAND, EngineStart, make_memory
from headway.engine.supervise.supervisor import Supervisor
from headway.executors.cpu.packed_cache import PackedCache
from headway.executors.hardware import probe_hardware
from headway.executors.source import locate
from headway.resolve import ModelFacts, Resolved, resolve
from headway.text import ChatTemplate, Tokenizer

if TYPE_CHECKING:
    from headway.core.engine import EngineCore
    from headway.engine.offline import OfflineParts
    from headway.engine.process.loop import Progress
    from headway.executors.executor import ModelExecutor
    from headway.fleet.cluster_key import ClusterKey
    from headway.fleet.link import LinkParts
    from headway.fleet.listener import EngineIdentity


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor with its weights in memory, and its resolved settings."""

    executor: ModelExecutor
    resolved: Resolved
    vocab_size: int


def locate_model(config: Config) -> Config:
    """Return the settings with the model's name replaced by its path on this machine.

    A Hugging Face id is resolved once, here: a branch may move while the server runs, and an engine
    that takes over must load the same weights as the engine before it.
    """
    path = locate(config.model.model, config.model.revision).path
    return replace(config, model=replace(config.model, model=str(path), revision=None))


def load_text(config: Config) -> tuple[Tokenizer, ChatTemplate]:
    """Return the tokenizer and chat template of the configured model."""
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

    checkpoint = load.open_checkpoint(locate(config.model.model, config.model.revision))
    resolved = resolve(config, load.facts_of(checkpoint), probe_hardware(load.has_cuda()))
    loading = load.ModelLoading(
        progress=progress,
        cache=packed_cache(config),
        kv_descriptor=kv_descriptor,
        when_packed=when_packed,
    )
    executor = load.load_executor(checkpoint, resolved, SystemClock(), loading)
    return LoadedModel(executor, resolved, checkpoint.spec.vocab_size)


def packed_cache(config: Config) -> PackedCache | None:
    """Return the cache of packed weights; None if it is turned off."""
    folder = weights_cache_dir(config.model)
    return None if folder is None else PackedCache(Path(folder), config.model.weights_cache_bytes)


def build_core(
    config: Config, executor: Executor, sink: Sink, recorder: BlockRecorder | None = None
) -> EngineCore:
    """Return an engine core: a scheduler over `executor`, with events sent to `sink`."""
    from headway.core.engine import EngineCore  # the API process needs neither
    from headway.core.scheduler import Scheduler

    scheduler = Scheduler(config.scheduler, executor.capacity(), config.cache.enable_prefix_caching)
    return EngineCore(scheduler, executor, SystemClock(), sink, recorder)


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
        kernels=model.resolved.kernels,
    )


def build_offline(config: Config, progress: Progress | None = None) -> OfflineParts:
    """Return the parts of an engine in the caller's process and thread."""
    from headway.engine.offline import OfflineParts

    config = locate_model(config)
    tokenizer, chat_template = load_text(config)
    model = load_model(config, progress)
    return OfflineParts(
        lambda sink: build_core(config, model.executor, sink),
        engine_info(config, model),
        tokenizer,
        chat_template,
        SystemClock(),
    )


class EngineLauncher:
    """Launches engine processes, all with the settings of one model on this machine."""

    def __init__(self, config: Config, command: Sequence[str], first: EngineStart | None) -> None:
        """`first` is a process that has already started, if there is one."""
        self._config = config
        self._command = command
        self._first = first
        self._launched: EngineProcess | None = None
        self._memory = make_memory(config) if first is None else first.memory

    def begin(self) -> None:
        """Launch the first process, which loads until `launch` asks for it."""
        self._launched = self.launch(None)

    async def close(self) -> None:
        """Stop the first process if nobody asked for it."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.kill()
            await launched.stop()

    def launch(self, before: EngineInfo | None) -> EngineProcess:
        """Launch a process; `before` has the resolved settings of the process before it."""
        launched, self._launched = self._launched, None
        if launched is not None:
            return launched
        first, self._first = self._first, None
        start = first or EngineStart(self._command, self._memory)
        return EngineProcess(start, self._settings(before))

    def launch_standby(self, before: EngineInfo | None) -> EngineProcess:
        """Launch a process that waits to take over."""
        start = EngineStart(self._command, self._memory, is_standby=True)
        return EngineProcess(start, self._settings(before))

    def _settings(self, before: EngineInfo | None) -> bytes:
        return msgspec.json.encode(_as_before(self._config, before))


def supervise(launcher: EngineLauncher, config: SupervisionConfig) -> Supervisor:
    """Return the supervisor of an engine process, which starts to load at once."""
    limits = RestartLimits(
        config.max_engine_restarts, config.engine_restart_window_s, config.engine_hang_s
    )
    launch_standby = launcher.launch_standby if config.standby else None
    return Supervisor(launcher.launch, SystemClock(), limits, launch_standby)


def _as_before(config: Config, before: EngineInfo | None) -> Config:
    """Return the settings of an engine that takes over from the engine with info `before`.

    Resolved values stay as they are: requests that fit the old cache must fit the new one.
    """
    if before is None:
        return config
    model = replace(config.model, dtype=before.dtype, max_model_len=before.capacity.max_model_len)
    cache = replace(config.cache, kv_cache_memory_bytes=before.kv_cache_bytes)
    return replace(config, model=model, cache=cache)


def run_server(
    config: Config,
    command: Sequence[str] = ENGINE_COMMAND,
    first: EngineStart | None = None,
) -> int:
    """Serve a model until a signal; return the exit code."""
    from headway.server import Loading

    locating = Loading(partial(locate_model, config))
    reading: Loading[tuple[Tokenizer, ChatTemplate]] | None = None

    async def make_engine() -> tuple[AsyncEngine, ChatTemplate]:
        nonlocal reading
        located = await locating.run()
        launcher = EngineLauncher(located, command, first)
        launcher.begin()  # the engine loads while the tokenizer is read
        try:
            reading = Loading(partial(load_text, located))
            tokenizer, chat_template = await reading.run()
        except BaseException:
            await launcher.close()
            raise
        links = [supervise(launcher, config.supervision)]
        hang_s = config.supervision.engine_hang_s
        return AsyncEngine(links, tokenizer, SystemClock(), hang_s), chat_template

    make_queue(config.scheduler.scheduling_policy)  # refuses an unknown policy before loading
    try:
        exit_code = serve_api(config, make_engine)
    finally:
        if first is not None:
            first.close()
    for loading in (locating, reading):
        if loading is not None:
            loading.exit_if_running(exit_code)
    return exit_code


def serve_api(
    config: Config,
    make_engine: Callable[[], Awaitable[tuple[AsyncEngine, ChatTemplate]]],
    background: Callable[[AsyncEngine], Awaitable[None]] | None = None,
) -> int:
    """Serve the OpenAI API over an engine until a signal; return the exit code.

    `background` runs beside the server, and starts again if it fails.
    """
    from headway.observe import Metrics, make_observers
    from headway.server import AdmissionController, ServerParts, create_apps, listen, run, serve

    listeners = listen(config.server)
    names = config.server.served_model_name or (config.model.model,)
    observers = make_observers(Metrics(names[0]), config.ledger, SystemClock())

    async def make_parts() -> ServerParts:
        engine, chat_template = await make_engine()
        admission = AdmissionController(config.server, engine, SystemClock())
        apps = create_apps(engine, admission, listeners.access, names, chat_template, observers)
        work = None if background is None else partial(background, engine)
        return ServerParts(engine, apps, admission, observers.stats, work)

    observers.ledger.price_of = listeners.access.tenants.directory.price_of
    observers.ledger.start()
    try:
        return run(serve(make_parts, listeners))
    finally:
        observers.ledger.close()


def run_engine(
    config: Config, command: Sequence[str] = ENGINE_COMMAND, first: EngineStart | None = None
) -> int:
    """Run an engine for frontends until a signal; return the exit code."""
    from headway.fleet.endpoints import Endpoint
    from headway.fleet.engine_host import host_engine
    from headway.fleet.listener import EngineListener
    from headway.server import run

    endpoint, key = Endpoint.parse(config.listener.listen, "--listen"), cluster_key(config)
    endpoint.check_key(key is not None, "--listen")
    make_queue(config.scheduler.scheduling_policy)
    located = locate_model(config)
    launcher = EngineLauncher(located, command, first)

    async def main() -> int:
        launcher.begin()  # the engine loads while its files are read here
        try:
            identity = engine_identity(config.model.model, located)
        except BaseException:
            await launcher.close()
            raise
        supervisor = supervise(launcher, config.supervision)
        return await host_engine(
            supervisor, lambda one: EngineListener(endpoint, key, one, identity, SystemClock())
        )

    return run(main())


def engine_identity(model: str, located: Config) -> EngineIdentity:
    """Return what an engine of this model says about itself."""
    from headway.executors.weights import open_checkpoint
    from headway.fleet.listener import EngineIdentity
    from headway.fleet.numerics import weights_digest

    source = open_checkpoint(locate(located.model.model, located.model.revision)).source
    folder = weights_cache_dir(located.model)
    cache = None if folder is None else Path(folder)
    weights = "" if source is None else weights_digest(source, cache)
    return EngineIdentity(model, load_text(located)[0].digest(), weights)


def run_frontend(config: Config) -> int:
    """Serve the OpenAI API over engines on the network until a signal; return the exit code."""
    from headway.fleet.discovery import EngineSet, parse_discovery
    from headway.server import Loading

    frontend, key = config.frontend, cluster_key(config)
    discovery = parse_discovery(frontend.engine, frontend.discover)
    locating = Loading(lambda: load_text(locate_model(config)))
    engines: EngineSet | None = None

    async def make_engine() -> tuple[AsyncEngine, ChatTemplate]:
        nonlocal engines
        tokenizer, chat_template = await locating.run()
        engines = EngineSet(discovery, link_parts(key, tokenizer))
        return frontend_engine(frontend, tokenizer), chat_template

    async def follow(engine: AsyncEngine) -> None:
        if engines is not None:
            await engines.follow(engine)

    exit_code = serve_api(config, make_engine, follow)
    locating.exit_if_running(exit_code)
    return exit_code


def frontend_engine(config: FrontendConfig, tokenizer: Tokenizer) -> AsyncEngine:
    """Return an engine without links; an EngineSet adds them."""
    failover = FailoverRules(config.failover == "any", config.failover_s)
    return AsyncEngine([], tokenizer, SystemClock(), failover=failover)


def link_parts(key: ClusterKey | None, tokenizer: Tokenizer) -> LinkParts:
    """Return what all links of a frontend share."""
    import zmq.asyncio

    from headway.fleet.link import LinkParts

    name = f"{socket.gethostname()}:{os.getpid()}"
    return LinkParts(zmq.asyncio.Context(), key, name, tokenizer.digest(), SystemClock())


def cluster_key(config: Config) -> ClusterKey | None:
    """Return the key of the cluster; None without one."""
    from headway.fleet.cluster_key import ClusterKey

    path = config.cluster.cluster_key_file
    return None if path is None else ClusterKey.read(Path(path))
