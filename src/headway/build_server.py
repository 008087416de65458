"""The composition root of the server: the API process and the engine processes it starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from headway.build import load_text, locate_model, locate_model_here
from headway.clock import SystemClock
from headway.config import Config, SupervisionConfig
from headway.core.waiting.policies import make_queue
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.launcher import EngineProcess
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.start import ENGINE_COMMAND, EngineStart, make_memory

if TYPE_CHECKING:
    from headway.engine.client.async_engine import AsyncEngine
    from headway.engine.supervise.supervisor import Supervisor
    from headway.tenancy import SharedMeters
    from headway.text import ChatTemplate

T = TypeVar("T")


class EngineLauncher:
    """Launches engine processes, all with the settings of one model on this machine."""

    def __init__(self, config: Config, command: Sequence[str], first: EngineStart | None) -> None:
        """Launch the first process, or give `first`, which has started, its settings."""
        self.config = config
        self._command = command
        self._memory = make_memory() if first is None else first.memory
        start = first or EngineStart(command, self._memory)
        # Loads until `launch` asks for it.
        self._launched: EngineProcess | None = EngineProcess(start, self._settings(None))

    def close(self) -> None:
        """End the first process if nobody asked for it."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.discard()

    def launch(self, before: EngineInfo | None) -> EngineProcess:
        """Launch a process; `before` has the resolved settings of the process before it."""
        launched, self._launched = self._launched, None
        if launched is not None:
            return launched
        start = EngineStart(self._command, self._memory)
        return EngineProcess(start, self._settings(before))

    def launch_standby(self, before: EngineInfo | None) -> EngineProcess:
        """Launch a process that waits to take over."""
        start = EngineStart(self._command, self._memory, is_standby=True)
        return EngineProcess(start, self._settings(before))

    def _settings(self, before: EngineInfo | None) -> bytes:
        return msgspec.json.encode(_as_before(self.config, before))


def supervise(launcher: EngineLauncher, config: SupervisionConfig) -> Supervisor:
    """Return the supervisor of the engine processes that `launcher` starts."""
    from headway.engine.supervise.supervisor import Supervisor

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
    """Serve until a signal; return the exit code."""
    make_queue(config.scheduler.scheduling_policy)  # refuses an unknown policy before loading
    located = locate_model_here(config)
    launcher = None if located is None else EngineLauncher(located, command, first)
    try:
        return _run(config, command, first, launcher)
    finally:
        if launcher is not None:
            launcher.close()
        if first is not None:
            first.close()


def _run(
    config: Config,
    command: Sequence[str],
    first: EngineStart | None,
    launcher: EngineLauncher | None,
) -> int:
    """Serve until a signal. `launcher` is None if the model may have to be downloaded."""
    # The engine loads while these are imported.
    from headway.engine.client.async_engine import AsyncEngine

    async def make_engine(load: Load) -> tuple[AsyncEngine, ChatTemplate]:
        nonlocal launcher
        if launcher is None:
            launcher = EngineLauncher(await load(partial(locate_model, config)), command, first)
        tokenizer, chat_template = await load(partial(load_text, launcher.config))
        links = [supervise(launcher, config.supervision)]
        hang_s = config.supervision.engine_hang_s
        return AsyncEngine(links, tokenizer, SystemClock(), hang_s), chat_template

    try:
        return serve_api(config, make_engine)
    finally:
        if launcher is not None:
            launcher.close()


class Load(Protocol):
    """Runs work that may take long in a thread, which does not delay the end of the process."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


def serve_api(
    config: Config,
    make_engine: Callable[[Load], Awaitable[tuple[AsyncEngine, ChatTemplate]]],
    background: Callable[[AsyncEngine], Awaitable[None]] | None = None,
    find_meters: Callable[[], SharedMeters | None] = lambda: None,
) -> int:
    """Serve the OpenAI API over an engine until a signal; return the exit code.

    `background` runs beside the server, and starts again if it fails. `find_meters` is called when
    there is an engine, and returns quotas over several frontends.
    """
    from headway.dashboard import make_pages
    from headway.observe import Metrics, make_observers
    from headway.server import (
        AdmissionController,
        Loading,
        ServedModel,
        ServerParts,
        create_context,
        listen,
        make_apps,
        run,
        serve,
    )
    from headway.server.batches.store import open_batch_store

    listeners = listen(config.server)
    names = config.server.served_model_name or (config.model.model,)
    batches = open_batch_store(config.batches, config.ledger)
    observers = make_observers(Metrics(names[0]), config.ledger, SystemClock(), config.tracing)
    loadings: list[Loading] = []

    def load(work: Callable[[], T]) -> Awaitable[T]:
        loadings.append(loading := Loading(work))
        return loading.run()

    async def make_parts() -> ServerParts:
        engine, chat_template = await make_engine(load)
        admission = AdmissionController(config.server, engine, SystemClock())
        admission.shared_meters = find_meters()
        model, access = ServedModel(names, chat_template), listeners.access
        context = create_context(engine, admission, access, model, observers, batches)
        pages = make_pages(context, observers, config, access.tenants.directory)
        apps = make_apps(context, access, pages)
        work = None if background is None else partial(background, engine)
        return ServerParts(engine, apps, admission, observers.stats, work)

    observers.ledger.price_of = listeners.access.tenants.directory.price_of
    observers.start()
    try:
        exit_code = run(serve(make_parts, listeners))
    finally:
        observers.close()
        if batches is not None:
            batches.close()
    for loading in loadings:
        loading.exit_if_running(exit_code)
    return exit_code
