"""The static files of the pages, read once, with headers that keep a page to itself.

Each file is a route of its own, so that no other path answers without a key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import Response

from headway.server.http.routing import Handler, Routes

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
SHARED = ("common.css", "client.js", "format.js", "icon.svg")
"""Files that both pages use."""
DASHBOARD = (
    *SHARED, "dashboard.css", "main.js", "parts.js", "chart.js", "overview.js", "tenants.js",
    "requests.js", "engines.js", "settings.js", "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css", "vendor/preact.module.js",
)  # fmt: skip
PLAYGROUND = (*SHARED, "playground.css", "playground.js")


def dashboard_files() -> Routes:
    """Return the routes of the files of the dashboard."""
    return _routes("/dashboard", "dashboard.html", DASHBOARD)


def playground_files() -> Routes:
    """Return the routes of the files of the playground."""
    return _routes("/playground", "playground.html", PLAYGROUND)


def _routes(prefix: str, page: str, names: tuple[str, ...]) -> Routes:
    routes, folder = Routes(), files("headway.dashboard") / "static"
    paths: Mapping[str, str] = {prefix: page, f"{prefix}/": page} | {
        f"{prefix}/static/{name}": name for name in names
    }
    for path, name in paths.items():
        routes.add(path, _handler(folder / name), "GET")
    return routes


def _handler(file: Traversable) -> Handler:
    content = file.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": etag, "Content-Type": TYPES[file.name.rpartition(".")[2]]}

    async def get_file(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={**HEADERS, "ETag": etag})
        return Response(content, headers=headers)

    return get_file
