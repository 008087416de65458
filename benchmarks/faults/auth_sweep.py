"""Requests every route without a valid key; every attempt must fail.

    python -m benchmarks.faults.auth_sweep MODEL [--json FILE]

The server has two keys. The script requests each route of both listeners, and some that do not
exist, over raw connections: with eight methods, several spellings of the path, no key, wrong keys,
crafted Hosts, and headers that make proxies see another method or path. The expected answer is 401,
or 400 if the server refuses the request before it checks the key. Only GET of the two probes and of
static files may answer otherwise. With a valid key, a tenant that is no admin may not read /metrics
or use the dashboard, and a tenant may not read, cancel or delete a background response of another.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from benchmarks.support.records import write_record
from benchmarks.support.servers import RunningServer, start_model_server
from headway.bench.steal import StealMeter

KEY = "hw-the-right-key"
OTHER_KEY = "hw-the-key-of-somebody-else"
LIVE, READY = "/health/live", "/health/ready"
ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/x", "/tokenize",
    "/v1/streams/cmpl-0123456789abcdef0123456789abcdef",
    "/detokenize", "/version", "/health", READY, LIVE, "/openapi.json", "/metrics",
    "/v1/responses", "/v1/responses/resp_0123456789abcdef0123456789abcdef",
    "/v1/responses/resp_0123456789abcdef0123456789abcdef/cancel", "/v1/embeddings",
    "/v1/messages", "/v1/messages/count_tokens", "/", "/docs", "/admin", "/no/such/path",
    "/dashboard", "/dashboard/static/main.js", "/dashboard/api/stream", "/dashboard/api/requests/x",
    "/dashboard/api/drain", "/playground", "/trace",
)  # fmt: skip
FILES = ("/dashboard", "/dashboard/static/main.js", "/playground")
"""Static files, which hold no data: the only routes besides the probes that need no key."""
FOR_ADMINS = (
    ("GET", "/metrics"),
    ("GET", "/trace"),
    ("GET", "/dashboard/api/stream"),
    ("GET", "/dashboard/api/tenants"),
    ("GET", "/dashboard/api/requests"),
    ("GET", "/dashboard/api/requests/x"),
    ("GET", "/dashboard/api/engines"),
    ("GET", "/dashboard/api/settings"),
    ("DELETE", "/dashboard/api/requests/x"),
    ("POST", "/dashboard/api/drain"),
    ("POST", "/dashboard/api/log-level"),
)
"""Routes of the admin listener that a tenant may not use."""
BACKGROUND = {"input": "hi", "max_output_tokens": 2, "background": True}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
HEADERS = {
    "no key": (),
    "wrong key": ("Authorization: Bearer hw-another-key",),
    "empty key": ("Authorization: Bearer ",),
    "key of another scheme": (f"Authorization: Basic {KEY}",),
    "key as a parameter": ("Authorization: Bearer", f"X-Api-Key: {KEY}"),
    "two keys": (f"Authorization: Bearer {KEY}", "Authorization: Bearer x"),
    "Host with a path": ("Host: localhost/health/live?",),
    "Host of another site": ("Host: evil.example",),
    "two Hosts": ("Host: localhost", "Host: evil.example"),
    "method override": ("X-HTTP-Method-Override: GET", "X-Method-Override: GET"),
    "path override": (f"X-Original-URL: {LIVE}", f"X-Rewrite-URL: {LIVE}"),
    "gateway": (
        "x-gateway-inference-fairness-id: key-00000000",
        "x-llm-d-inference-objective: default",
        "X-Forwarded-For: 127.0.0.1",
    ),
    "forwarded": ("X-Forwarded-For: 127.0.0.1", f"X-Forwarded-Prefix: {LIVE}"),
}


def spellings(path: str) -> dict[str, str]:
    """Return spellings of a path that a router or guard might read differently."""
    encoded = "".join(f"%{ord(letter):02x}" if letter.isalpha() else letter for letter in path)
    return {
        "plain": path,
        "double slash": "/" + path,
        "encoded": encoded,
        "encoded slash": path.replace("/", "%2f"),
        "from the open route": f"{LIVE}/..{path}",
        "with a query": f"{path}?path={LIVE}",
        "with a fragment of the open route": f"{path};{LIVE}",
        "absolute": f"http://localhost{path}",
        "trailing slash": path.rstrip("/") + "/",
        "upper case": path.upper(),
    }


def attempts() -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """Yield name, method, path and headers of each attempt."""
    for route in ROUTES:
        for spelling, path in spellings(route).items():
            for method in METHODS:
                yield f"{method} {route}, {spelling}, no key", method, path, HEADERS["no key"]
        for kind, headers in HEADERS.items():
            for method in ("GET", "POST"):
                yield f"{method} {route}, {kind}", method, route, headers


def ask(port: int, method: str, path: str, headers: tuple[str, ...]) -> int:
    """Return the status of the answer; 0 if the connection closed without one."""
    lines = [f"{method} {path} HTTP/1.1", *headers, "Connection: close"]
    if not any(header.startswith("Host:") for header in headers):
        lines.append("Host: localhost")
    if method in ("POST", "PUT", "PATCH"):
        lines += ["Content-Type: application/json", "Content-Length: 2"]
    body = "{}" if method in ("POST", "PUT", "PATCH") else ""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
        answer = b""
        while b"\r\n" not in answer and (data := connection.recv(4096)):
            answer += data
    return int(answer.split()[1]) if answer else 0


def is_right(method: str, path: str, status: int) -> bool:
    if status in (0, 400, 401):
        return True
    # The path alone determines the route, so an absolute URL is the same request.
    where = path.removeprefix("http://localhost").partition("?")[0]
    is_file = unquote(where).removesuffix("/") in FILES
    return method == "GET" and (is_file or unquote(where) in (LIVE, READY)) and status == 200


def ask_for_others(port: int) -> list[str]:
    """Ask for a background response with the key of another tenant; return what was answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/responses", json.dumps(BACKGROUND), headers)
    path = f"/v1/responses/{json.load(connection.getresponse())['id']}"
    connection.close()
    opened: list[str] = []
    for key, expected in ((OTHER_KEY, 404), (KEY, 200)):
        for method, rest in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ):
            status = ask(port, method, path + rest, (f"Authorization: Bearer {key}",))
            if status != expected:
                opened.append(f"{method} {path}{rest} with the key {key}: {status}")
    return opened


def sweep(server: RunningServer) -> dict[str, Any]:
    """Send all attempts to both listeners; return the report."""
    statuses: Counter[int] = Counter()
    opened = []
    for listener, port in (("public", server.port), ("admin", server.admin_port)):
        for name, method, path, headers in attempts():
            status = ask(port, method, path, headers)
            statuses[status] += 1
            if not is_right(method, path, status):
                opened.append(f"{listener}: {name}: {status}")
        good = (f"Authorization: Bearer {KEY}",)
        if ask(port, "GET", "/version", good) != 200:
            opened.append(f"{listener}: the right key is refused")
        # There are two tenants, and neither is an admin; the public listener has no such route.
        expected = 403 if listener == "admin" else 404
        for method, path in FOR_ADMINS:
            if (status := ask(port, method, path, good)) != expected:
                opened.append(f"{listener}: {method} {path} with a tenant's key: {status}")
    opened += ask_for_others(server.port)
    return {"attempts": statuses.total(), "statuses": dict(statuses), "opened": opened}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    meter = StealMeter()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = start_model_server(args.model, log, "--api-key", KEY, "--api-key", OTHER_KEY)
        try:
            server.wait_ready(KEY)
            report = sweep(server)
        finally:
            server.stop()
    print(json.dumps(report, indent=2))
    write_record(report, meter, args.json)
    return 1 if report["opened"] else 0


if __name__ == "__main__":
    sys.exit(main())
