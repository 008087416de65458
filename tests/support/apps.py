"""Both apps over a scripted engine, each with a client that names a host they answer to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx

from headway.clock import SystemClock
from headway.config import Config, LedgerConfig, ServerConfig
from headway.dashboard import make_pages
from headway.engine.process.messages import all_events
from headway.observe import Metrics, make_observers
from headway.server.access import AccessControl
from headway.server.admission import AdmissionController
from headway.server.app import make_apps
from headway.server.context import ServerContext
from headway.text import ChatTemplate
from tests.support.local_engine import TEMPLATE

NAMES = ("tiny", "alias/tiny")
BASE_URL = "http://localhost"
FIXED_ID = "0123456789abcdef"
FIXED_TIME = 1_800_000_000


@asynccontextmanager
async def serving(
    local: Any,
    script: Any = "abc",
    is_started: bool = True,
    policy: str = "fcfs",
    template: str = TEMPLATE,
    new_id: Callable[[], str] = lambda: FIXED_ID,
    **config: Any,
) -> AsyncIterator[SimpleNamespace]:
    """`public` and `admin` are clients; the time of day never changes, nor do ids by default."""
    made = await local(script, policy=policy, is_started=is_started)
    metrics, settings = Metrics(NAMES[0]), ServerConfig(**config)
    observers = make_observers(metrics, LedgerConfig(ledger_url="none"), SystemClock())
    made.engine.subscribe(lambda batch: observers.consume(all_events(batch)))
    made.engine.subscribe_steps(observers.steps.record)
    context = ServerContext(
        engine=made.engine,
        model_names=NAMES,
        chat_template=ChatTemplate(template, {}),
        metrics=metrics,
        admission=AdmissionController(settings, made.engine, SystemClock()),
        started_at=FIXED_TIME,
        tool_call_parser=settings.tool_call_parser,
        reasoning_field=settings.reasoning_field,
        ledger=observers.ledger,
        steps=observers.steps,
        new_id=new_id,
        time_of_day=lambda: FIXED_TIME,
    )
    access = AccessControl.of(settings, context.admission.clock)
    observers.ledger.price_of = access.tenants.directory.price_of
    shown = Config(server=settings, ledger=LedgerConfig(ledger_url="none"))
    pages = make_pages(context, observers, shown, access.tenants.directory)
    apps = make_apps(context, access, pages)
    async with client_of(apps.public) as public, client_of(apps.admin) as admin:
        yield SimpleNamespace(
            public=public,
            admin=admin,
            apps=apps,
            engine=made.engine,
            process=made.process,
            metrics=metrics,
            context=context,
            observers=observers,
            files=frozenset(one.path for one in (*pages.public_files, *pages.admin_files)),
        )


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=BASE_URL)


def routes_of(app: Any) -> set[tuple[str, str]]:
    """Every (method, path) behind the guard and before it."""
    found: set[tuple[str, str]] = set()
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        if hasattr(route, "methods"):
            found.update((method, route.path) for method in route.methods)
        else:
            pending.extend(innermost(route.app).routes)
    return found


def innermost(app: Any) -> Any:
    while hasattr(app, "_app"):
        app = app._app
    return app


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
