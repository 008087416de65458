"""GET /v1/requests/{id}/explanation: the account of a request, and what it waited for."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from headway.errors import LedgerError
from headway.observe.ledger.ledger import Ledger
from headway.observe.trace.account import RequestAccount, for_tenant
from headway.observe.trace.explain import as_dict
from headway.server.context import ServerContext
from headway.server.http.edge import MAX_ID_CHARS
from headway.server.http.encoding import JsonResponse
from headway.server.http.errors import UNAVAILABLE, ApiError, ErrorResponse
from headway.server.http.routing import Routes

logger = logging.getLogger(__name__)

MAX_LOOKUPS = 4
"""Lookups in the ledger's database at a time; more are refused with 503."""
# The same answer for an unknown request and for a request of another tenant.
_UNKNOWN = ErrorResponse(404, "there is no such request", "invalid_request_error", "not_found")
_UNREADABLE = replace(UNAVAILABLE, message="the ledger cannot be read now; try again shortly")


def explanations_router(context: ServerContext) -> Routes:
    """Return the route of this endpoint."""
    router, finder = Routes(), AccountFinder(context.ledger)

    @router.get("/v1/requests/{request_id}/explanation")
    async def get_explanation(request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        is_admin = getattr(request.state, "is_admin", False)
        tenant = None if is_admin else getattr(request.state, "tenant", "")
        account = await finder.find(request_id, tenant)
        return JsonResponse(as_dict(account if is_admin else for_tenant(account)))

    return router


class AccountFinder:
    """Looks up requests in the ledger.

    A database may be slow or unreachable. Lookups are few at a time and have their own threads, so
    that the rest of the server does not wait for them.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        self._ledger = ledger
        self._pool = ThreadPoolExecutor(MAX_LOOKUPS, "ledger-lookup")
        self._num_busy = 0

    async def find(self, request_id: str, tenant: str | None) -> RequestAccount:
        """Return the account of a request, of any tenant if `tenant` is None; or raise 404."""
        account = None
        # Ids are short and printable; any other text need not reach the database.
        is_id = (
            len(request_id) <= MAX_ID_CHARS and request_id.isascii() and request_id.isprintable()
        )
        if self._ledger is not None and is_id:
            account = await self._find(self._ledger, request_id, tenant)
        if account is None:
            raise ApiError(_UNKNOWN)
        return account

    async def _find(
        self, ledger: Ledger, request_id: str, tenant: str | None
    ) -> RequestAccount | None:
        account = ledger.find(request_id, tenant)
        if account is not None or ledger.archive is None:
            return account
        if self._num_busy >= MAX_LOOKUPS:
            raise ApiError(_UNREADABLE)
        self._num_busy += 1
        loop = asyncio.get_running_loop()
        lookup = loop.run_in_executor(self._pool, ledger.find_stored, request_id, tenant)
        lookup.add_done_callback(self._end_lookup)
        try:
            # The client may leave, but the thread stays busy until the database answers.
            return await asyncio.shield(lookup)
        except LedgerError as error:
            logger.warning("%s", error)
            raise ApiError(_UNREADABLE) from error

    def _end_lookup(self, lookup: asyncio.Future[RequestAccount | None]) -> None:
        self._num_busy -= 1
        if not lookup.cancelled():
            lookup.exception()  # marks it as retrieved: the client may have left
