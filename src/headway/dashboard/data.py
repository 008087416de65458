"""JSON routes of the dashboard: stream, tenants, requests, engines and settings."""

from __future__ import annotations

from dataclasses import asdict
from heapq import nsmallest
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway._version import __version__
from headway.config import Config
from headway.dashboard.collector import Collector
from headway.dashboard.settings import setting_rows
from headway.dashboard.stream import DashboardStream
from headway.engine.client.replica import EngineReplica
from headway.observe.requests.table import TrackedRequest
from headway.observe.trace.explain import as_dict
from headway.server.api.operate.explanations import AccountFinder
from headway.server.context import ServerContext
from headway.server.http.auth import check_admin
from headway.server.http.encoding import JsonResponse
from headway.server.http.query import read_query
from headway.server.http.routing import Handler, Routes
from headway.server.http.sse import EventStream
from headway.tenancy import Directory

API = "/dashboard/api"
MAX_LIVE = 50
"""Most requests in a list: the oldest live ones, or the slowest of those that ended last."""
MAX_FOUND = 50
"""Most tenants in the answer to a search."""
MAX_SEARCH_CHARS = 100
NO_STORE = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


class DashboardData:
    """Answers the page's questions, for administrators only."""

    def __init__(
        self, context: ServerContext, config: Config, directory: Directory, collector: Collector
    ) -> None:
        self._context = context
        self._config = config
        self._directory = directory
        self._collector = collector
        self._finder = AccountFinder(context.ledger)

    def routes(self, stream: DashboardStream) -> Routes:
        """Return the routes that read."""
        routes = Routes()

        async def get_stream(_request: Request) -> Response:
            return EventStream(stream.open(), self._context.slow_reader_timeout_s)

        handlers: dict[str, Handler] = {
            "/stream": get_stream,
            "/tenants": self._get_tenants,
            "/requests": self._get_requests,
            "/requests/{request_id:path}": self._get_request,
            "/engines": self._get_engines,
            "/settings": self._get_settings,
        }
        for path, handler in handlers.items():
            routes.add(API + path, admin_only(self._directory, handler), "GET")
        return routes

    async def _get_tenants(self, request: Request) -> Response:
        search = read_query(request, "search").get("search", "")[:MAX_SEARCH_CHARS]
        window = self._collector.tenants
        self._collector.advance(self._collector.clock.now())
        names = list(window.tenants)
        if search:
            names = [name for name in names if search in name]
            found = self._directory.names_with(search, MAX_FOUND)
            names += [name for name in found if name not in window.tenants]
        loads = self._loads()
        rows = [self._tenant_row(name, loads.get(name, (0, 0))) for name in names]
        others = window.others.total()
        return JsonResponse({"tenants": rows, "others": others or None}, headers=NO_STORE)

    def _loads(self) -> dict[str, tuple[int, int]]:
        """Return the running and waiting requests of each tenant."""
        loads: dict[str, tuple[int, int]] = {}
        for request, part in self._collector.requests.live_parts:
            running, waiting = loads.get(request.terms.tenant, (0, 0))
            is_running = part.waiting_since is None
            loads[request.terms.tenant] = running + is_running, waiting + (not is_running)
        return loads

    def _tenant_row(self, name: str, load: tuple[int, int]) -> dict[str, Any]:
        counts = self._collector.tenants.tenants.get(name)
        row: dict[str, Any] = {
            "tenant": name,
            "num_running": load[0],
            "num_waiting": load[1],
            "counts": {} if counts is None else counts.total(),
        }
        record = self._directory.listed(name)
        if record is not None:
            meter, now = record.meter, self._collector.clock.now()
            quotas = {
                f"{kind}_per_minute": [bucket.num_left(now), bucket.per_minute]
                for kind, bucket in (("requests", meter.requests), ("tokens", meter.tokens))
                if bucket is not None
            }
            row |= {
                "tier": record.terms.tier,
                "weight": record.terms.weight,
                "max_kv_share": record.terms.max_kv_share,
                "is_disabled": record.tenant.is_disabled,
                "num_in_flight": meter.num_in_flight,
                "concurrent_requests": meter.quotas.concurrent_requests,
                "quotas": quotas,
            }
        return row

    async def _get_requests(self, request: Request) -> Response:
        read_query(request)
        live = nsmallest(MAX_LIVE, self._collector.requests.live_requests, key=_arrival_of)
        now = self._collector.clock.now()
        slowest = sorted(self._collector.ended, key=lambda one: one["age_s"], reverse=True)  # pyright: ignore
        rows = [_live_row(one, now) for one in live]
        return JsonResponse(
            {
                "live": rows,
                "num_live": len(self._collector.requests),
                "ended": slowest[:MAX_LIVE],
                "num_ended": len(slowest),
            },
            headers=NO_STORE,
        )

    async def _get_request(self, request: Request) -> Response:
        account = await self._finder.find(request.path_params["request_id"], None)
        return JsonResponse(as_dict(account), headers=NO_STORE)

    async def _get_engines(self, request: Request) -> Response:
        read_query(request)
        engine, admission = self._context.engine, self._context.admission
        rows = [_engine_row(one, self._collector.routed) for one in engine.engines]
        is_frontend = engine.demand is not None
        return JsonResponse(
            {
                "engines": rows,
                "is_frontend": is_frontend,
                "rule": self._config.routing.routing if is_frontend else None,
                "routers": self._config.frontend.router if is_frontend else (),
                "frontends": [asdict(one) for one in engine.frontends],
                "status": self._context.status(),
                "is_paused": admission.is_paused,
                "restarts": list(self._collector.restarts)[::-1],
            },
            headers=NO_STORE,
        )

    async def _get_settings(self, request: Request) -> Response:
        read_query(request)
        engine = self._context.engine
        notes = engine.info.notes if engine.takes_requests else ()
        return JsonResponse(
            {
                "version": __version__,
                "models": self._context.model_names,
                "settings": setting_rows(self._config),
                "notes": notes,
            },
            headers=NO_STORE,
        )


def admin_only(directory: Directory, handler: Handler) -> Handler:
    """Return the handler for those who may see all tenants."""

    async def handle(request: Request) -> Response:
        check_admin(request, directory)
        return await handler(request)

    return handle


def _arrival_of(request: TrackedRequest) -> float:
    return min(part.arrived_at for part in request.parts.values())


def _live_row(request: TrackedRequest, now: float) -> dict[str, Any]:
    parts = [part for part in request.parts.values() if part.is_live]
    waits = [part.waiting_since for part in parts if part.waiting_since is not None]
    ended_s = sum(share.seconds for part in request.parts.values() for share in part.shares)
    return {
        "id": request.id,
        "tenant": request.terms.tenant,
        "state": "waiting" if len(waits) == len(parts) else "running",
        "age_s": now - _arrival_of(request),
        "wait_s": ended_s + sum(max(0.0, now - since) for since in waits),
        "num_prompt_tokens": sum(part.num_prompt_tokens for part in parts if not part.is_fork),
        "num_output_tokens": sum(part.num_output_tokens for part in request.parts.values()),
    }


def _engine_row(replica: EngineReplica, routed: dict[str, int]) -> dict[str, Any]:
    name, num_running, num_waiting, kv_usage = replica.state
    step, info = replica.last_step, replica.info
    return {
        "name": name,
        "is_up": replica.link.is_up,
        "is_ready": replica.is_ready,
        "is_retired": replica.is_retired,
        "num_running": num_running,
        "num_waiting": num_waiting,
        "kv_usage": kv_usage,
        "num_blocks_cached": 0 if replica.owners is None else replica.owners.num_cached,
        "num_routed": routed.get(name, 0),
        "num_own": replica.num_seqs,
        "step_s": None if step is None else step.elapsed_s,
        "token_budget": None if step is None else step.token_budget,
        "info": None if info is None else msgspec.to_builtins(info),
    }
