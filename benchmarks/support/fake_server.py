"""The real server with the fake engine, or a frontend of engines on the network.

Arguments: port, engine settings as JSON, server settings as JSON, tokenizer file. Server settings
with `engine` or `discover` make a frontend.
"""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import msgspec

from headway.build_fleet import FrontendLinks, cluster_key, frontend_router, link_parts
from headway.clock import SystemClock
from headway.config import (
    BatchConfig,
    ClusterConfig,
    Config,
    FrontendConfig,
    LedgerConfig,
    RecordConfig,
    RoutingConfig,
    ServerConfig,
    SupervisionConfig,
    TracingConfig,
)
from headway.dashboard import make_pages
from headway.engine.client.async_engine import AsyncEngine
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.launcher import EngineProcess
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.start import EngineStart
from headway.engine.supervise.supervisor import Supervisor
from headway.errors import ConfigError
from headway.fleet.frontends.discovery import parse_discovery
from headway.fleet.network.endpoints import Endpoint
from headway.observe import Metrics, make_observers
from headway.server import (
    AdmissionController,
    ServedModel,
    ServerParts,
    Timeouts,
    create_context,
    listen,
    make_apps,
    run,
    serve,
)
from headway.server.batches.store import open_batch_store
from headway.text import ChatTemplate, Tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Price:
    prompt: float = 1.0
    cached_prompt: float = 0.25
    output: float = 4.0


T = TypeVar("T")


def take(given: dict[str, Any], section: type[T]) -> T:
    """Remove the settings of a section from those given."""
    names = {one.name for one in fields(section)}  # pyright: ignore
    return msgspec.convert({name: given.pop(name) for name in names & given.keys()}, section)


async def main(port: int, settings: bytes, server_settings: bytes, tokenizer_path: str) -> int:
    given = msgspec.json.decode(server_settings)
    for_ledger = LedgerConfig(ledger_url=given.pop("ledger_url", "none"))
    defaults = {"admin_port": 0, "log_interval_s": 0.2, "max_body_bytes": 100_000}
    timeouts = Timeouts(**given.pop("timeouts", {}))
    supervision = take(given, SupervisionConfig)
    frontend, cluster = take(given, FrontendConfig), take(given, ClusterConfig)
    routing, for_batches = take(given, RoutingConfig), take(given, BatchConfig)
    tracing, recording = take(given, TracingConfig), take(given, RecordConfig)
    config = msgspec.convert({"port": port, **defaults, **given}, ServerConfig)
    try:
        listeners = listen(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    batches = open_batch_store(for_batches, for_ledger)
    command = [sys.executable, "-m", "benchmarks.support.fake_engine"]
    limits = RestartLimits(
        supervision.max_engine_restarts,
        supervision.engine_restart_window_s,
        supervision.engine_hang_s,
    )
    tokenizer = Tokenizer.from_gguf(tokenizer_path)

    def launch(_before: EngineInfo | None) -> EngineProcess:
        process = EngineProcess(EngineStart(command), settings)
        print("engine", process.pid, flush=True)
        return process

    observers = make_observers(Metrics("fake"), for_ledger, SystemClock(), tracing)

    at_end = ExitStack()

    async def make_parts() -> ServerParts:
        background = meters = None
        if frontend.engine or frontend.discover is not None:
            key = cluster_key(Config(cluster=cluster))
            discovery = parse_discovery(frontend.engine, frontend.discover, key)
            routers = [Endpoint.parse(text, "--router") for text in frontend.router]
            links = FrontendLinks(discovery, routers, link_parts(frontend, key, tokenizer))
            routed = Config(frontend=frontend, routing=routing, recording=recording)
            engine = links.make_engine(routed, frontend_router(routed, at_end), tokenizer)
            background, meters = partial(links.follow, engine), links.meters
        else:
            links = [Supervisor(launch, SystemClock(), limits)]
            engine = AsyncEngine(links, tokenizer, SystemClock(), limits.hang_s)
        admission = AdmissionController(config, engine, SystemClock())
        admission.shared_meters = meters
        template, access = ChatTemplate(TEMPLATE, {}), listeners.access
        model = ServedModel(("fake",), template)
        context = create_context(engine, admission, access, model, observers, batches)
        shown = Config(
            server=config,
            ledger=for_ledger,
            supervision=supervision,
            frontend=frontend,
            routing=routing,
        )
        pages = make_pages(context, observers, shown, access.tenants.directory)
        apps = make_apps(context, access, pages)
        return ServerParts(engine, apps, admission, observers.stats, background)

    observers.ledger.price_of = lambda _tier: Price()
    observers.start()
    try:
        with at_end:
            return await serve(make_parts, listeners, timeouts)
    finally:
        observers.close()
        if batches is not None:
            batches.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    port, settings, server_settings, path = sys.argv[1:]
    sys.exit(run(main(int(port), settings.encode(), server_settings.encode(), path)))
