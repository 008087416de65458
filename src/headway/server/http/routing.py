"""Collects the routes of one file from the decorators of its handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


class Routes(list[Route]):
    """Routes in the order in which they are matched."""

    def get(self, path: str) -> Callable[[Handler], Handler]:
        return self._route(path, "GET")

    def post(self, path: str) -> Callable[[Handler], Handler]:
        return self._route(path, "POST")

    def delete(self, path: str) -> Callable[[Handler], Handler]:
        return self._route(path, "DELETE")

    def add(self, path: str, handler: Handler, *methods: str) -> None:
        route = Route(path, handler, methods=list(methods))
        # Starlette would answer HEAD on every GET route; only the given methods are allowed.
        route.methods = set(methods)
        self.append(route)

    def _route(self, path: str, method: str) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            self.add(path, handler, method)
            return handler

        return add


@dataclass(frozen=True, slots=True)
class Pages:
    """Routes that other packages add to the listeners."""

    public_files: Routes = field(default_factory=Routes)
    """Files of the public listener that need no key; they hold no data."""
    admin_files: Routes = field(default_factory=Routes)
    """Files of the admin listener that need no key; they hold no data."""
    admin: Routes = field(default_factory=Routes)
    """Routes of the admin listener, behind the key."""


NO_PAGES = Pages()
