"""GET /v1/requests/{id}/explanation: what happened to a request, and why it took so long."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.errors import LedgerError
from headway.observe.account import Account, for_tenant
from headway.observe.explain import as_dict
from headway.observe.ledger import Ledger
from headway.server.edge import MAX_ID_CHARS
from headway.server.encoding import JsonResponse
from headway.server.errors import UNAVAILABLE, ApiError, ErrorAnswer
from headway.server.services import Services

logger = logging.getLogger(__name__)

# The same whether there is no such request or it is somebody else's.
_UNKNOWN = ErrorAnswer(404, "there is no such request", "invalid_request_error", "not_found")
_UNREADABLE = replace(UNAVAILABLE, message="the ledger cannot be read now; try again shortly")


def explanations_router(services: Services) -> APIRouter:
    """The route and its handler."""
    router = APIRouter()

    @router.get("/v1/requests/{request_id}/explanation")
    async def get_explanation(request: Request, request_id: str) -> Response:
        is_admin = getattr(request.state, "is_admin", False)
        tenant = None if is_admin else getattr(request.state, "tenant", "")
        account = None
        # Ids are short and printable; anything else is no question for a database.
        is_id = (
            len(request_id) <= MAX_ID_CHARS and request_id.isascii() and request_id.isprintable()
        )
        if services.ledger is not None and is_id:
            account = await _find(services.ledger, request_id, tenant)
        if account is None:
            raise ApiError(_UNKNOWN)
        return JsonResponse(as_dict(account if is_admin else for_tenant(account)))

    return router


async def _find(ledger: Ledger, request_id: str, tenant: str | None) -> Account | None:
    account = ledger.find(request_id, tenant)
    if account is not None or ledger.archive is None:
        return account
    try:
        return await asyncio.to_thread(ledger.find_stored, request_id, tenant)
    except LedgerError as error:
        logger.warning("%s", error)
        raise ApiError(_UNREADABLE) from error
