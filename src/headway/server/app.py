"""The two HTTP applications: their routes, and what every request passes on its way to them.

A request passes the edge and the body limit, then, unless it asks whether the process is alive,
the check of its Host and the guard. Behind the guard is everything else, wrong paths included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Router

from headway.core.events import Event
from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import EventBatch, all_events
from headway.observe import Observers
from headway.server.chat import chat_router
from headway.server.completions import completions_router
from headway.server.edge import Edge
from headway.server.entrance import Entrance
from headway.server.errors import UNAVAILABLE, ApiError, ErrorAnswer, install_error_handlers
from headway.server.explanations import explanations_router
from headway.server.gate import Gate
from headway.server.health import Health, health_router, live_router
from headway.server.hosts import HostPolicy
from headway.server.limits import BodyLimit
from headway.server.models import models_router
from headway.server.openapi import openapi_router
from headway.server.protocol import RequestLimits
from headway.server.routing import Routes
from headway.server.services import Services
from headway.server.status import metrics_router, version_router
from headway.server.tokenize import tokenize_router
from headway.text import ChatTemplate

NOT_OFFERED = ("/v1/responses", "/v1/embeddings", "/v1/messages")
"""What clients of other servers look for, and are told about instead of left to guess."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True)
class Apps:
    """One app per listener."""

    public: Starlette
    admin: Starlette


def create_apps(
    engine: AsyncEngine,
    gate: Gate,
    entrance: Entrance,
    model_names: tuple[str, ...],
    chat_template: ChatTemplate,
    observers: Observers,
) -> Apps:
    """The apps around an engine that someone else starts and stops.

    The observers are subscribed to the engine here. `model_names[0]` is the name in answers to
    requests that name no model.
    """
    services = Services(
        engine,
        model_names,
        chat_template,
        observers.metrics,
        gate,
        int(time.time()),
        entrance.config.slow_reader_timeout_s,
        ledger=observers.ledger,
    )
    # Each by itself: what fails in one is not missing in the other.
    for consume in (observers.metrics.consume, observers.ledger.consume):
        engine.subscribe(partial(_pass_on, consume))
    engine.subscribe_restarts(observers.metrics.count_restart)
    return apps_for(services, entrance)


def _pass_on(consume: Callable[[Iterable[Event]], None], batch: EventBatch) -> None:
    consume(all_events(batch))


def apps_for(services: Services, entrance: Entrance) -> Apps:
    """The apps over services that exist already."""
    directory, limits = entrance.tenants.directory, RequestLimits.of(entrance.config)
    public = (
        chat_router(services, limits),
        completions_router(services, limits),
        models_router(services),
        explanations_router(services),
        tokenize_router(services),
        openapi_router(services, limits, has_keys=not directory.is_open),
        _not_offered_router(),
    )
    health = Health(services.status, lambda: services.engine.has_given_up)
    make = partial(_app, entrance, health, services.metrics.count_refusal)
    return Apps(
        make(entrance.hosts, public),
        make(entrance.admin_hosts, (metrics_router(services, directory),)),
    )


def loading_apps(entrance: Entrance, status: Callable[[], str]) -> Apps:
    """The apps until there is an engine: they answer probes, and 503 to all else."""
    router = Routes()

    async def refuse(_request: Request) -> Response:
        raise ApiError(UNAVAILABLE)

    router.add("/{rest:path}", refuse, *METHODS)
    make = partial(_app, entrance, Health(status, lambda: False), lambda _reason: None)
    return Apps(make(entrance.hosts, (router,)), make(entrance.admin_hosts, (router,)))


def _app(
    entrance: Entrance,
    health: Health,
    count_refusal: Callable[[str], None],
    hosts: HostPolicy,
    routers: Sequence[Routes],
) -> Starlette:
    live = live_router(health)
    # The live route again: only its GET is open, and its other methods are refused in here.
    routers = (live, health_router(health), version_router(), *routers)
    guarded = Router([route for router in routers for route in router], redirect_slashes=False)
    app = Starlette(
        # Not a list of guarded paths, in which one could be forgotten: whatever is left goes in.
        routes=[*live, Mount("", app=entrance.guard(guarded, hosts))],
        middleware=[
            Middleware(Edge),
            Middleware(BodyLimit, max_body_bytes=entrance.config.max_body_bytes),
        ],
    )
    app.router.redirect_slashes = False
    install_error_handlers(app, count_refusal)
    return app


def _not_offered_router() -> Routes:
    router = Routes()

    async def refuse(request: Request) -> Response:
        message = (
            f"{request.scope['path'][:100]} is not offered by this server; "
            "use /v1/chat/completions or /v1/completions"
        )
        raise ApiError(ErrorAnswer(404, message, "invalid_request_error", "not_found"))

    for path in NOT_OFFERED:
        router.add(path, refuse, *METHODS)
        router.add(path + "/{rest:path}", refuse, *METHODS)
    return router
