"""The composition root of a fleet: engines on the network, and the frontends that use them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import zmq.asyncio

from headway._version import __version__
from headway.build import about_recording, load_text, locate_model
from headway.build_server import EngineLauncher, Load, serve_api, supervise
from headway.clock import SystemClock
from headway.config import Config, FrontendConfig, weights_cache_dir
from headway.core.waiting.policies import make_queue
from headway.engine.client.async_engine import AsyncEngine, FailoverRules
from headway.engine.client.routed_placement import RoutedPlacement
from headway.engine.supervise.start import ENGINE_COMMAND, EngineStart
from headway.executors.source import locate
from headway.executors.weights import open_checkpoint
from headway.fleet.engines.engine_host import host_engine
from headway.fleet.engines.listener import EngineIdentity, EngineListener
from headway.fleet.engines.numerics import weights_digest
from headway.fleet.frontends.discovery import Discovery, EngineSet, parse_discovery
from headway.fleet.frontends.link import LinkParts
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.router.frontends import FleetRouter
from headway.fleet.router.link import RouterLinks
from headway.fleet.router.process import RouterListener, host_router
from headway.fleet.router.recorded import RecordedSharedRouter
from headway.fleet.router.shared import SharedRouter
from headway.record.recording import start_recording
from headway.record.router.encoder import RouterEncoder
from headway.record.router.entries import RouterHeader
from headway.record.router.recorded import MAX_QUEUED_CALLS, RecordedRouter
from headway.routing import AllowedEngines, Router, Rule
from headway.server import run
from headway.server.descriptors import raise_descriptor_limit
from headway.tenancy import SharedMeters
from headway.text import ChatTemplate, Tokenizer


def run_engine(
    config: Config, command: Sequence[str] = ENGINE_COMMAND, first: EngineStart | None = None
) -> int:
    """Run an engine for frontends until a signal; return the exit code."""
    endpoint = Endpoint.parse(config.listener.listen, "--listen", may_be_any=True)
    key = cluster_key(config)
    endpoint.check_key(key is not None, "--listen")
    raise_descriptor_limit()  # each connection takes one
    make_queue(config.scheduler.scheduling_policy)  # refuses an unknown policy before loading
    located = locate_model(config)
    launcher = EngineLauncher(located, command, first)

    async def main() -> int:
        # The engine loads while its files are read here.
        identity = engine_identity(config.model.model, located)
        return await host_engine(
            supervise(launcher, config.supervision),
            lambda one: EngineListener(
                endpoint, key, one, identity, SystemClock(), config.orphans.orphan_s
            ),
            config.orphans.lease_s,
        )

    try:
        return run(main())
    finally:
        launcher.close()


def engine_identity(model: str, located: Config) -> EngineIdentity:
    """Return what an engine of this model says about itself."""
    source = open_checkpoint(locate(located.model.model, located.model.revision)).source
    folder = weights_cache_dir(located.model)
    cache = None if folder is None else Path(folder)
    weights = "" if source is None else weights_digest(source, cache)
    return EngineIdentity(model, load_text(located)[0].digest(), weights)


def run_frontend(config: Config) -> int:
    """Serve the OpenAI API over engines on the network until a signal; return the exit code."""
    frontend, key = config.frontend, cluster_key(config)
    discovery = parse_discovery(frontend.engine, frontend.discover, key)
    routers = [Endpoint.parse(text, "--router") for text in frontend.router]
    links: FrontendLinks | None = None
    at_end = ExitStack()

    async def make_engine(load: Load) -> tuple[AsyncEngine, ChatTemplate]:
        nonlocal links
        tokenizer, chat_template = await load(lambda: load_text(locate_model(config)))
        links = FrontendLinks(discovery, routers, link_parts(frontend, key, tokenizer))
        make_router = frontend_router(config, at_end)
        return links.make_engine(config, make_router, tokenizer), chat_template

    async def follow(engine: AsyncEngine) -> None:
        if links is not None:
            await links.follow(engine)

    with at_end:
        return serve_api(
            config, make_engine, follow, lambda: None if links is None else links.meters
        )


MakeRouter = Callable[[Rule, AllowedEngines], Router]


def frontend_router(config: Config, at_end: ExitStack) -> MakeRouter:
    """Return what makes the router of a frontend; its recording, if any, ends `at_end`."""
    is_shared = bool(config.frontend.router)
    if config.recording.record is None:
        return SharedRouter if is_shared else Router

    def make(rule: Rule, allowed: AllowedEngines) -> Router:
        router = (RecordedSharedRouter if is_shared else RecordedRouter)(rule, allowed)
        begin_recording(config, router, at_end)
        return router

    return make


def begin_recording(config: Config, router: RecordedRouter, at_end: ExitStack) -> None:
    """Have a router be recorded until the end, if its folder can be written."""
    about = about_recording()
    header = RouterHeader(
        recording=f"{about.name}-router",
        headway=__version__,
        platform=about.platform,
        rule=config.routing.routing,
        clock_began_at=about.clock_began_at,
    )
    encoder = RouterEncoder(about.key)
    recording = start_recording(config.recording, header, encoder, MAX_QUEUED_CALLS)
    if recording is not None:
        router.record(recording)
        at_end.callback(recording.close)


class FrontendLinks:
    """What a frontend is connected to: engines, and routers if there are any."""

    def __init__(self, discovery: Discovery, routers: Sequence[Endpoint], parts: LinkParts) -> None:
        """Raise ConfigError if a router needs a cluster key and there is none."""
        self._engines = EngineSet(discovery, parts)
        self._routers = RouterLinks(routers, parts) if routers else None

    def make_engine(
        self, config: Config, make_router: MakeRouter, tokenizer: Tokenizer
    ) -> AsyncEngine:
        """Return an engine without links; `follow` adds them."""
        rules = config.frontend
        failover = FailoverRules(rules.failover == "any", rules.failover_s)

        def make(rule: Rule, allowed: AllowedEngines) -> Router:
            router = make_router(rule, allowed)
            if self._routers is not None and isinstance(router, SharedRouter):
                self._routers.follow(router)
            return router

        placement = partial(RoutedPlacement, rule=config.routing.routing, make_router=make)
        return AsyncEngine(
            [], tokenizer, SystemClock(), make_placement=placement, failover=failover
        )

    @property
    def meters(self) -> SharedMeters | None:
        """Quotas over all frontends; None without a router."""
        return None if self._routers is None else self._routers.quotas

    async def follow(self, engine: AsyncEngine) -> None:
        """Keep the links, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._engines.follow(engine))
            if self._routers is not None:
                group.create_task(self._routers.run(engine))


def run_router(config: Config) -> int:
    """Decide for frontends which engine gets a request, until a signal; return the exit code."""
    endpoint = Endpoint.parse(config.listener.listen, "--listen", may_be_any=True)
    key = cluster_key(config)
    endpoint.check_key(key is not None, "--listen")
    raise_descriptor_limit()

    async def main() -> int:
        make_router = Router if config.recording.record is None else RecordedRouter
        fleet = FleetRouter(config.routing.routing, SystemClock(), make_router)
        listener = RouterListener(endpoint, key, fleet, SystemClock())
        with ExitStack() as at_end:
            if isinstance(fleet.router, RecordedRouter):
                begin_recording(config, fleet.router, at_end)
            return await host_router(listener)

    return run(main())


def link_parts(config: FrontendConfig, key: ClusterKey | None, tokenizer: Tokenizer) -> LinkParts:
    """Return what all links of a frontend share."""
    name = f"{socket.gethostname()}:{os.getpid()}"
    return LinkParts(
        zmq.asyncio.Context(),
        key,
        name,
        tokenizer.digest(),
        SystemClock(),
        may_mix_weights=config.failover == "any",
    )


def cluster_key(config: Config) -> ClusterKey | None:
    """Return the key of the cluster; None without one."""
    path = config.cluster.cluster_key_file
    return None if path is None else ClusterKey.read(Path(path))
