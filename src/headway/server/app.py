"""The two HTTP applications: their routes and their middleware.

A request passes the edge and the body limit. All routes except GET of the two
probes and of the files of pages, wrong paths included, then check the Host header and the key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Router

from headway.engine.client.async_engine import AsyncEngine
from headway.engine.process.messages import all_events
from headway.observe import Observers
from headway.observe.metrics.expected_ttft import ExpectedTtft
from headway.server.access import AccessControl
from headway.server.admission import AdmissionController
from headway.server.api.batches import batches, files
from headway.server.api.chat import CHAT, chat_router
from headway.server.api.completions import COMPLETIONS, completions_router
from headway.server.api.embeddings import embeddings_router
from headway.server.api.messages.route import messages_router
from headway.server.api.models import models_router
from headway.server.api.openapi.route import openapi_router
from headway.server.api.operate.explanations import explanations_router
from headway.server.api.operate.health import HealthStatus, health_router, probe_router
from headway.server.api.operate.requests import requests_router
from headway.server.api.operate.status import load_router, metrics_router, version_router
from headway.server.api.operate.traces import traces_router
from headway.server.api.responses.route import responses_router
from headway.server.api.streams import streams_router
from headway.server.api.tokenize import tokenize_router
from headway.server.batches.feeder import BatchFeeder
from headway.server.batches.store import BatchStore
from headway.server.context import ServerContext
from headway.server.http.access_log import AccessLog
from headway.server.http.edge import Edge
from headway.server.http.errors import UNAVAILABLE, ApiError, ErrorResponse, install_error_handlers
from headway.server.http.hosts import HostPolicy
from headway.server.http.limits import BodyLimit
from headway.server.http.routing import NO_PAGES, Pages, Routes
from headway.server.http.trace_headers import TraceHeaders
from headway.server.schema.request import RequestLimits
from headway.text import ChatTemplate

logger = logging.getLogger(__name__)

UNSUPPORTED_PATHS = (
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/responses/{response_id}/input_items",
    "/v1/messages/batches",
    "/v1/messages/batches/{rest:path}",
)
"""Endpoints of other servers; the 404 answer names the endpoints to use instead."""
BATCH_PATHS = (files.PATH, batches.PATH)
BATCH_ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}
"""Endpoints that the requests of a batch may use."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass(frozen=True, slots=True)
class Apps:
    """The ASGI apps of the two listeners."""

    public: Starlette
    admin: Starlette
    idle_work: Callable[[], Awaitable[None]] | None = None
    """Runs beside the server; waits until nobody is delayed by it."""
    feed_batches: Callable[[], Awaitable[None]] | None = None
    """Runs beside the server; sends the requests of batches."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The names of the model, and its chat template."""

    names: tuple[str, ...]
    """The first is the name in answers to requests that name no model."""
    chat_template: ChatTemplate


def create_context(
    engine: AsyncEngine,
    admission: AdmissionController,
    access: AccessControl,
    model: ServedModel,
    observers: Observers,
    batch_store: BatchStore | None = None,
) -> ServerContext:
    """Return what the handlers share; subscribe the observers to the engine.

    The caller starts and stops the engine. Without `batch_store` there are no files and no batches.
    """
    context = ServerContext(
        engine,
        model.names,
        model.chat_template,
        observers.metrics,
        admission,
        int(time.time()),
        access.config.slow_reader_timeout_s,
        tool_call_parser=access.config.tool_call_parser,
        reasoning_field=access.config.reasoning_field,
        ledger=observers.ledger,
        batches=batch_store,
        steps=observers.steps,
        spans=observers.spans,
        prompt_log=access.prompt_log,
    )
    logger.info("%s", context.dialect.describe())
    engine.subscribe(lambda batch: observers.consume(all_events(batch)))
    engine.subscribe_steps(observers.steps.record)
    engine.subscribe_restarts(observers.metrics.count_restart)
    expected = ExpectedTtft(observers.requests, lambda: engine.last_steps)
    observers.others.append(expected)
    observers.metrics.watch_ttft(expected.seconds)
    if engine.demand is not None:
        observers.metrics.watch_need(lambda: engine.demand.need if engine.demand else 0.0)
    return context


def make_apps(context: ServerContext, access: AccessControl, pages: Pages = NO_PAGES) -> Apps:
    """Return the apps over an existing context, with the pages of other packages."""
    directory, limits = access.tenants.directory, RequestLimits.of(access.config)
    feeder = _make_feeder(context, access, limits)
    public = (
        chat_router(context, limits),
        completions_router(context, limits),
        responses_router(context, limits),
        messages_router(context, limits),
        embeddings_router(context, limits),
        models_router(context),
        requests_router(context),
        explanations_router(context),
        streams_router(context),
        tokenize_router(context),
        load_router(context),
        openapi_router(context, limits, has_keys=not directory.is_open),
        *_batch_routers(context, feeder),
        _unsupported_router(),
    )
    admin = (metrics_router(context, directory), traces_router(context, directory), pages.admin)
    health = HealthStatus(context.status, lambda: context.engine.has_given_up)
    make = partial(_app, access, health, context.metrics.count_refusal, _body_limits(context))
    return Apps(
        make(_Listener(access.hosts, public, pages.public_files, context.spans is not None)),
        make(_Listener(access.admin_hosts, admin, pages.admin_files)),
        context.grammars.prepare_when_idle,
        None if feeder is None else feeder.run,
    )


def loading_apps(access: AccessControl, status: Callable[[], str]) -> Apps:
    """Return the apps without an engine: probes work, all else gets 503."""
    router = Routes()

    async def refuse(_request: Request) -> Response:
        raise ApiError(UNAVAILABLE)

    router.add("/{rest:path}", refuse, *METHODS)
    make = partial(_app, access, HealthStatus(status, lambda: False), lambda _reason: None, {})
    public, admin = (_Listener(hosts, (router,)) for hosts in (access.hosts, access.admin_hosts))
    return Apps(make(public), make(admin))


@dataclass(frozen=True, slots=True)
class _Listener:
    """The routes of one listener, and the host names that it answers to."""

    hosts: HostPolicy
    routers: Sequence[Routes]
    files: Routes = field(default_factory=Routes)
    """Files that need no key: the same for everybody, without data."""
    has_spans: bool = False
    """Whether requests of this listener get spans."""


def _app(
    access: AccessControl,
    health: HealthStatus,
    count_refusal: Callable[[str], None],
    body_limits: Mapping[str, int],
    listener: _Listener,
) -> Starlette:
    probes = probe_router(health)
    # Probes and files again: only their GET needs no key; other methods are refused behind it.
    routers = (probes, health_router(health), version_router(), listener.files, *listener.routers)
    guarded = Router([route for router in routers for route in router], redirect_slashes=False)
    app = Starlette(
        # A mount, not a list of protected paths, which could omit a path.
        routes=[*probes, *listener.files, Mount("", app=access.protect(guarded, listener.hosts))],
        middleware=[
            *([Middleware(AccessLog)] if access.config.access_log else []),
            Middleware(Edge),
            *([Middleware(TraceHeaders)] if listener.has_spans else []),
            Middleware(BodyLimit, max_body_bytes=access.config.max_body_bytes, by_path=body_limits),
        ],
    )
    app.router.redirect_slashes = False
    install_error_handlers(app, count_refusal)
    return app


def _body_limits(context: ServerContext) -> dict[str, int]:
    """Return the limits of bodies that are written to disk as they arrive."""
    store = context.batches
    return {} if store is None else {files.PATH: store.config.batch_file_bytes + files.FORM_BYTES}


def _make_feeder(
    context: ServerContext, access: AccessControl, limits: RequestLimits
) -> BatchFeeder | None:
    if context.batches is None:
        return None
    directory, longest = access.tenants.directory, access.config.max_body_bytes
    return BatchFeeder(context, context.batches, limits, directory, BATCH_ENDPOINTS, longest)


def _batch_routers(context: ServerContext, feeder: BatchFeeder | None) -> list[Routes]:
    store = context.batches
    if store is None or feeder is None:
        instead = "start it with --batch-dir FOLDER for files and batches"
        paths = [path + rest for path in BATCH_PATHS for rest in ("", "/{rest:path}")]
        return [_missing_router(paths, instead)]
    return [
        files.files_router(context, store),
        batches.batches_router(context, store, feeder, BATCH_ENDPOINTS.keys()),
    ]


def _unsupported_router() -> Routes:
    return _missing_router(UNSUPPORTED_PATHS, "use /v1/chat/completions or /v1/completions")


def _missing_router(paths: Sequence[str], instead: str) -> Routes:
    router = Routes()

    async def refuse(request: Request) -> Response:
        path = request.scope["path"][:100]
        message = f"{path} is not offered by this server; {instead}"
        raise ApiError(ErrorResponse(404, message, "invalid_request_error", "not_found"))

    for path in paths:
        router.add(path, refuse, *METHODS)
    return router
