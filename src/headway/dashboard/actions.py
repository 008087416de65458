"""What an administrator may do from the dashboard: abort, drain, change the log level.

Every action is a DELETE or has a JSON body, which a page of another site cannot send without a
preflight. On a server without keys, actions are for this machine only.
"""

from __future__ import annotations

import logging
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headway.dashboard.data import API, NO_STORE, admin_only
from headway.errors import InvalidRequestError
from headway.server.api.operate.explanations import AccountFinder
from headway.server.context import ServerContext, read_body
from headway.server.http.encoding import JsonResponse
from headway.server.http.errors import ApiError, ErrorResponse
from headway.server.http.routing import Handler, Routes
from headway.tenancy import Directory

logger = logging.getLogger(__name__)

Body = TypeVar("Body")
LOGGER = "headway"
_ENDED = ErrorResponse(
    404, "the request has ended, or another frontend has it", "invalid_request_error", "not_found"
)
_ABORTED = ErrorResponse(
    409, "the request was aborted by an administrator", "invalid_request_error", "request_cancelled"
)


_NO_KEYS = ErrorResponse(
    403,
    "actions over the network need keys; set --tenants-file or --api-keys-file",
    "permission_error",
    "keys_needed",
)


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """Whether to refuse new requests; those there are go on."""

    drain: bool


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    """The least level that is logged by this process."""

    level: Literal["debug", "info", "warning", "error"]


def action_routes(context: ServerContext, directory: Directory, is_local: bool) -> Routes:
    """Return the routes that change something; `is_local`: only this machine can reach them."""
    routes, finder = Routes(), AccountFinder(context.ledger)

    def add(path: str, handler: Handler, method: str) -> None:
        async def act(request: Request) -> Response:
            if directory.is_open and not is_local:
                raise ApiError(_NO_KEYS)
            return await handler(request)

        routes.add(API + path, admin_only(directory, act), method)

    async def abort(request: Request) -> Response:
        account = await finder.find(request.path_params["request_id"], None)
        generation = context.live.find(account.tenant, account.id)
        if generation is None or not generation.is_running:
            raise ApiError(_ENDED)
        logger.warning("request %s is aborted by %r", account.id, request.state.tenant)
        await generation.cancel(ApiError(_ABORTED))
        return JsonResponse({"id": account.id, "aborted": True}, headers=NO_STORE)

    async def drain(request: Request) -> Response:
        context.admission.is_paused = _decode(await read_body(request), Drain).drain
        doing = "drains" if context.admission.is_paused else "accepts requests again"
        logger.warning("the server %s, asked by %r", doing, request.state.tenant)
        return JsonResponse({"status": context.status()}, headers=NO_STORE)

    async def set_level(request: Request) -> Response:
        level = _decode(await read_body(request), LogLevel).level
        logging.getLogger(LOGGER).setLevel(level.upper())
        logger.warning("the log level is %s, asked by %r", level, request.state.tenant)
        return JsonResponse({"level": level}, headers=NO_STORE)

    add("/requests/{request_id:path}", abort, "DELETE")
    add("/drain", drain, "POST")
    add("/log-level", set_level, "POST")
    return routes


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(str(error)[:200]) from error
