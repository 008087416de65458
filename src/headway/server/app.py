"""The two HTTP applications: their routes and their middleware.

A request passes the edge and the body limit. All routes except GET of the two
probes, wrong paths included, then check the Host header and the key.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Router

from headway.engine.client.async_engine import AsyncEngine
from headway.engine.process.messages import all_events
from headway.observe import Observers
from headway.server.access import AccessControl
from headway.server.admission import AdmissionController
from headway.server.api.chat import chat_router
from headway.server.api.completions import completions_router
from headway.server.api.embeddings import embeddings_router
from headway.server.api.explanations import explanations_router
from headway.server.api.health import HealthStatus, health_router, probe_router
from headway.server.api.models import models_router
from headway.server.api.openapi import openapi_router
from headway.server.api.requests import requests_router
from headway.server.api.status import load_router, metrics_router, version_router
from headway.server.api.streams import streams_router
from headway.server.api.tokenize import tokenize_router
from headway.server.context import ServerContext
from headway.server.http.edge import Edge
from headway.server.http.errors import UNAVAILABLE, ApiError, ErrorResponse, install_error_handlers
from headway.server.http.hosts import HostPolicy
from headway.server.http.limits import BodyLimit
from headway.server.http.routing import Routes
from headway.server.schema.request import RequestLimits
from headway.text import ChatTemplate

UNSUPPORTED_PATHS = ("/v1/responses", "/v1/messages")
"""Endpoints of other servers; the 404 answer names the endpoints to use instead."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True)
class Apps:
    """The ASGI apps of the two listeners."""

    public: Starlette
    admin: Starlette
    idle_work: Callable[[], Awaitable[None]] | None = None
    """Runs beside the server; waits until nobody is delayed by it."""


def create_apps(
    engine: AsyncEngine,
    admission: AdmissionController,
    access: AccessControl,
    model_names: tuple[str, ...],
    chat_template: ChatTemplate,
    observers: Observers,
) -> Apps:
    """Return the apps around an engine; the caller starts and stops the engine.

    The observers are subscribed to the engine here. `model_names[0]` is the name in answers to
    requests that name no model.
    """
    context = ServerContext(
        engine,
        model_names,
        chat_template,
        observers.metrics,
        admission,
        int(time.time()),
        access.config.slow_reader_timeout_s,
        ledger=observers.ledger,
    )
    engine.subscribe(lambda batch: observers.consume(all_events(batch)))
    engine.subscribe_restarts(observers.metrics.count_restart)
    if engine.demand is not None:
        observers.metrics.watch_need(lambda: engine.demand.need if engine.demand else 0.0)
    return make_apps(context, access)


def make_apps(context: ServerContext, access: AccessControl) -> Apps:
    """Return the apps over an existing context."""
    directory, limits = access.tenants.directory, RequestLimits.of(access.config)
    public = (
        chat_router(context, limits),
        completions_router(context, limits),
        embeddings_router(context, limits),
        models_router(context),
        requests_router(context),
        explanations_router(context),
        streams_router(context),
        tokenize_router(context),
        load_router(context),
        openapi_router(context, limits, has_keys=not directory.is_open),
        _unsupported_router(),
    )
    health = HealthStatus(context.status, lambda: context.engine.has_given_up)
    make = partial(_app, access, health, context.metrics.count_refusal)
    return Apps(
        make(access.hosts, public),
        make(access.admin_hosts, (metrics_router(context, directory),)),
        context.grammars.prepare_when_idle,
    )


def loading_apps(access: AccessControl, status: Callable[[], str]) -> Apps:
    """Return the apps without an engine: probes work, all else gets 503."""
    router = Routes()

    async def refuse(_request: Request) -> Response:
        raise ApiError(UNAVAILABLE)

    router.add("/{rest:path}", refuse, *METHODS)
    make = partial(_app, access, HealthStatus(status, lambda: False), lambda _reason: None)
    return Apps(make(access.hosts, (router,)), make(access.admin_hosts, (router,)))


def _app(
    access: AccessControl,
    health: HealthStatus,
    count_refusal: Callable[[str], None],
    hosts: HostPolicy,
    routers: Sequence[Routes],
) -> Starlette:
    probes = probe_router(health)
    # The probes again: only their GET needs no key; their other methods are refused behind it.
    routers = (probes, health_router(health), version_router(), *routers)
    guarded = Router([route for router in routers for route in router], redirect_slashes=False)
    app = Starlette(
        # A mount, not a list of protected paths, which could omit a path.
        routes=[*probes, Mount("", app=access.protect(guarded, hosts))],
        middleware=[
            Middleware(Edge),
            Middleware(BodyLimit, max_body_bytes=access.config.max_body_bytes),
        ],
    )
    app.router.redirect_slashes = False
    install_error_handlers(app, count_refusal)
    return app


def _unsupported_router() -> Routes:
    router = Routes()

    async def refuse(request: Request) -> Response:
        message = (
            f"{request.scope['path'][:100]} is not offered by this server; "
            "use /v1/chat/completions or /v1/completions"
        )
        raise ApiError(ErrorResponse(404, message, "invalid_request_error", "not_found"))

    for path in UNSUPPORTED_PATHS:
        router.add(path, refuse, *METHODS)
        router.add(path + "/{rest:path}", refuse, *METHODS)
    return router
