"""The HTTP application: routes, and what every request passes on its way to them."""

from __future__ import annotations

import time

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware import Middleware

from headway.config import ServerConfig
from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import all_events
from headway.observe.metrics import Metrics
from headway.server.auth import require_key
from headway.server.chat import chat_router
from headway.server.completions import completions_router
from headway.server.edge import Edge
from headway.server.errors import install_error_handlers
from headway.server.health import health_router
from headway.server.limits import BodyLimit
from headway.server.models import models_router
from headway.server.services import Services
from headway.server.status import status_router
from headway.text import ChatTemplate


def create_app(
    engine: AsyncEngine,
    config: ServerConfig,
    model_names: tuple[str, ...],
    chat_template: ChatTemplate,
    metrics: Metrics,
) -> FastAPI:
    """An app around an engine that someone else starts and stops.

    Metrics are subscribed to the engine here. `model_names[0]` is the name in answers to requests
    that name no model.
    """
    services = Services(engine, model_names, chat_template, metrics, int(time.time()))
    engine.subscribe(lambda batch: metrics.consume(all_events(batch)))
    app = FastAPI(
        # The documentation pages load scripts from other people's servers.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(Edge),
            Middleware(BodyLimit, max_body_bytes=config.max_body_bytes),
        ],
    )
    install_error_handlers(app, metrics.count_refusal)
    app.include_router(health_router(services))
    # Whatever is added below needs a key; there is no list of paths to forget one in.
    guarded = APIRouter(dependencies=[Depends(require_key(config.api_key))])
    guarded.include_router(chat_router(services))
    guarded.include_router(completions_router(services))
    guarded.include_router(models_router(services))
    guarded.include_router(status_router(services))
    app.include_router(guarded)
    return app
