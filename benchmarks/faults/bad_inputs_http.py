"""Bad inputs: malformed HTTP (methods, paths, types, lengths, headers, garbage)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.faults.cases import (
    CHAT,
    CHAT_ENDPOINT,
    CLOSED,
    COMPLETION_ENDPOINT,
    COMPLETIONS,
    ENDPOINTS,
    JSON_TYPE,
    Case,
    Outcome,
)

BODY = COMPLETION_ENDPOINT.body()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
CLOSE = b"Connection: close\r\n"

GET_PATHS = ("/health", "/health/live", "/health/ready", "/version", "/v1/models")
UNKNOWN_PATHS = (
    "/",
    "/v1",
    "/v1/",
    "/v1/chat",
    "/v1/chat/completions/",
    "/v1/completions/x",
    "//v1/chat/completions",
    "/v1//chat/completions",
    "/V1/chat/completions",
    "/v1/../v1/chat/completions",
    "/./v1/chat/completions",
    "/v1/chat/completions;x=1",
    "/v1/chat/completions%00",
    "/v1/chat/completions%20",
    "/v1/chat%252Fcompletions",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/../../etc/passwd",
    "/%ff%fe",
    "/v1/completions.json",
    "/v1/responses/resp_1/input_items",
    "/v1/images/generations",
    "/v1/audio/transcriptions",
    "/v2/chat/completions",
    "/invocations",
    "/inference/v1/generate",
    "/generate",
    "/metrics",
    "/pause",
    "/abort_requests",
    "/update_weights",
    "/load_lora_adapter",
    "/sleep",
    "/server_info",
    "/docs",
    "/redoc",
    "/.env",
    "/.git/config",
    "/admin",
)
WRONG_TYPES = (
    "text/plain",
    "text/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/xml",
    "application/octet-stream",
    "application/jsonx",
    "application/json5",
    "application/x-ndjson",
    "application/json, text/plain",
    "json",
    "*/*",
    "",
    ";application/json",
    "application /json",
    "x" * 5000,
)


def methods() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE"):
            name = f"{endpoint.name}-method-{method}"
            yield Case(name, (405,), method=method, path=endpoint.path, body=endpoint.body())
        # The parser knows these methods; no route here has them.
        for method in ("PROPFIND", "SEARCH", "PURGE", "MKCOL"):
            name = f"{endpoint.name}-method-{method}"
            yield Case(name, (405, 501), method=method, path=endpoint.path, body=b"")
        for method in ("BREW", "post", "P\u00d6ST", "POSTPOST", "X" * 10_000):
            name = f"{endpoint.name}-method-{ascii(method)[1:9]}"
            yield Case(name, (400,), method=method, path=endpoint.path, body=endpoint.body())
    for path in GET_PATHS:
        for method in ("POST", "PUT", "DELETE"):
            yield Case(f"method-{method}-of-{path}", (405,), method=method, path=path, body=b"{}")
    yield Case("method-override", (405,), method="GET", headers=_header("X-HTTP-Method-Override"))


def _header(name: str, value: str = "POST") -> tuple[tuple[str, str], ...]:
    return (JSON_TYPE, (name, value))


def paths() -> Iterator[Case]:
    body = CHAT_ENDPOINT.body()
    for path in UNKNOWN_PATHS:
        yield Case(f"path-{path}", (404,), path=path, body=body)
    for model in ("none", "", "../version", "%00", "%ff", "fake/..", "x" * 5000):
        name = f"model-path-{model[:20] or 'empty'}"
        yield Case(name, (404,), method="GET", path=f"/v1/models/{model}")
    yield Case("path-of-20000-characters", (404,), path="/" + "a" * 20_000, body=body)
    yield Case("path-of-70000-characters", (400, 414, 431), path="/" + "a" * 70_000, body=body)
    yield Case("path-of-20000-slashes", (404,), path="/" * 20_000, body=body)
    # Other spellings of the same resource: every route checks keys, so they open nothing.
    for path in (
        "/v1/%63hat/completions",
        CHAT + "?a=b",
        CHAT + "?" + "a=b&" * 1000,
        CHAT + "?%00",
    ):
        yield Case(f"accepts-path-{path[:40]}", (200,), path=path, body=body)
    absolute = b"POST http://127.0.0.1/v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    rest = b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    yield raw("accepts-absolute-form", absolute + rest % len(BODY) + BODY, 200)
    yield raw("absolute-form-of-another-path", absolute.replace(b"v1/", b"v9/") + rest % 0, 404)
    foreign = absolute.replace(b"127.0.0.1", b"evil.example", 1)
    yield raw("absolute-form-of-another-host", foreign + rest % len(BODY) + BODY, 200, 400)
    yield raw("path-with-a-space", b"GET /health /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400)
    yield raw("path-missing", b"GET  HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400)
    yield raw("path-without-slash", b"GET health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400)
    yield raw("path-with-nul", b"GET /health\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 400)
    yield raw(
        "path-star", b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n", 404, 400
    )
    tunnel = b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    yield raw("connect", tunnel, 400, 404, 405)


def content_types() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for kind in WRONG_TYPES:
            name = f"{endpoint.name}-content-type-{kind[:40] or 'empty'}"
            headers = (("Content-Type", kind),)
            yield Case(name, (415,), path=endpoint.path, headers=headers, body=endpoint.body())
        name = f"{endpoint.name}-content-type-missing"
        yield Case(name, (415,), path=endpoint.path, headers=(), body=endpoint.body())
        for kind in ("application/json; charset=utf-8", "APPLICATION/JSON", " application/json ;"):
            name = f"{endpoint.name}-accepts-content-type-{kind}"
            headers = (("Content-Type", kind),)
            yield Case(name, (200,), path=endpoint.path, headers=headers, body=endpoint.body())


def raw(name: str, request: bytes, *expected: Outcome, half_closed: bool = False) -> Case:
    return Case(f"raw-{name}", expected, raw=(request,), is_half_closed=half_closed)


def lengths() -> Iterator[Case]:
    """Yield requests with a wrong body length, as in request smuggling."""
    for value in (b"-1", b"+5", b"0x10", b"5 5", b"5,5", b"", b"five", b"1e3", b"9" * 30, b"5\x00"):
        head = HEAD + b"Content-Length: " + value + b"\r\n"
        yield raw(f"length-{ascii(value)[2:14]}", head + CLOSE + b"\r\n" + BODY, 400)
    own = b"Content-Length: %d\r\n" % len(BODY)
    yield raw("length-twice-different", HEAD + own + b"Content-Length: 5\r\n\r\n" + BODY, 400)
    yield raw("length-twice-equal", HEAD + own + own + CLOSE + b"\r\n" + BODY, 400)
    chunked = b"Transfer-Encoding: chunked\r\n"
    whole = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    yield raw("length-and-chunked", HEAD + own + chunked + b"\r\n" + whole, 400)
    yield raw("chunked-and-length", HEAD + chunked + own + b"\r\n" + whole, 400)
    for coding in (b"identity", b"xchunked", b"chunked, identity", b"gzip", b"chunked\x0b"):
        head = HEAD + b"Transfer-Encoding: " + coding + b"\r\n"
        # Without a known coding there is no body, or its end is unknown.
        yield raw(f"coding-{ascii(coding)[2:-1]}", head + CLOSE + b"\r\n" + whole, 400, 501)
    spaced = HEAD + b"Transfer-Encoding : chunked\r\n"
    yield raw("coding-with-a-space-before-the-colon", spaced + b"\r\n" + whole, 400)
    yield raw("accepts-chunked", HEAD + CLOSE + chunked + b"\r\n" + whole, 200)
    short = HEAD + b"Content-Length: 5\r\n\r\n" + BODY
    # The rest begins another request, before the first has its answer.
    yield raw("length-shorter-than-the-body", short, 400, CLOSED)
    long = HEAD + b"Content-Length: %d\r\n\r\n" % (len(BODY) + 100) + BODY
    yield raw("length-longer-than-the-body", long, CLOSED, half_closed=True)
    huge = HEAD + b"Content-Length: 1000000000000\r\n\r\n{"
    yield raw("length-of-a-terabyte", huge, 413)
    expecting = HEAD + b"Expect: 100-continue\r\nContent-Length: 1000000000000\r\n\r\n"
    yield raw("length-of-a-terabyte-expecting-100", expecting, 413)
    for size in (b"zz", b"-1", b"0x5", b"", b" ", b"f" * 17, b"5" * 5000, b"5\x00"):
        name = f"chunk-size-{ascii(size)[2:14] or 'empty'}"
        yield raw(name, HEAD + chunked + b"\r\n" + size + b"\r\n" + BODY + b"\r\n0\r\n\r\n", 400)
    wrong = HEAD + chunked + b"\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n"
    yield raw("chunk-longer-than-its-size", wrong, 400)
    unfinished = HEAD + chunked + b'\r\n5\r\n{"pro'
    yield raw("chunks-without-an-end", unfinished, CLOSED, half_closed=True)
    for endpoint in ENDPOINTS:
        path = endpoint.path.encode()
        yield Case(f"raw-{endpoint.name}-chunks-beyond-the-limit", (413,), raw=_many_chunks(path))


def _many_chunks(path: bytes) -> tuple[bytes, ...]:
    """Return a body above the largest limit in use, in small chunks."""
    head = HEAD.replace(COMPLETIONS.encode(), path) + b"Transfer-Encoding: chunked\r\n\r\n"
    return (head, *[(b"1000\r\n" + b" " * 4096 + b"\r\n") * 64] * 40)


def headers() -> Iterator[Case]:
    too_many = (400, 431, CLOSED)
    many = {101: too_many, 1000: too_many, 20_000: too_many, 90: (200,)}
    for count, expected in many.items():
        lines = b"".join([b"X-%d: x\r\n" % i for i in range(count)])
        yield raw(f"{count}-headers", LIVE + lines + b"\r\n", *expected)
        same = LIVE + b"X: x\r\n" * count + b"\r\n"
        yield raw(f"{count}-equal-headers", same, *expected)
    for size in (66_000, 1_000_000):
        yield raw(f"header-value-of-{size}", LIVE + b"X: " + b"x" * size + b"\r\n\r\n", *too_many)
        yield raw(f"header-name-of-{size}", LIVE + b"X" * size + b": x\r\n\r\n", *too_many)
        endless = LIVE + b"X: " + b"x" * size
        yield raw(f"header-of-{size}-without-end", endless, *too_many, half_closed=True)
    sixty = b"".join([b"X-%d: %s\r\n" % (i, b"x" * 1100) for i in range(60)])
    yield raw("60-headers-of-1100", LIVE + sixty + b"\r\n", *too_many)
    bad = {
        "without-colon": b"NoColonHere\r\n",
        "without-name": b": value\r\n",
        "with-a-space-in-its-name": b"X Y: z\r\n",
        "with-nul-in-its-name": b"X\x00Y: z\r\n",
        "with-nul-in-its-value": b"X: a\x00b\r\n",
        "with-a-lone-return": b"X: a\rb: c\r\n",
        "with-bytes-over-127-in-its-name": b"X\xff: a\r\n",
        "folded": b" folded: x\r\n",
    }
    for name, line in bad.items():
        first = b"GET /health/live HTTP/1.1\r\n"
        yield raw(
            f"header-{name}", first + line + b"Host: 127.0.0.1\r\nConnection: close\r\n\r\n", 400
        )
    for name, line in {
        "request-id-that-is-huge": b"X-Request-Id: " + b"r" * 5000,
        "request-id-with-odd-bytes": b"X-Request-Id: \xff\xfe",
        "authorization-of-odd-bytes": b"Authorization: Bearer \xff\xfe\x80",
        "another-host": b"X-Forwarded-Host: evil.example",
        "forwarded-prefix": b"X-Forwarded-Prefix: /../..",
        "upgrade-to-h2c": b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
        "range": b"Range: bytes=0-" + b"0-," * 1000,
        "cookies": b"Cookie: " + b"a=b; " * 1000,
    }.items():
        yield raw(f"accepts-{name}", LIVE + line + b"\r\n\r\n", 200)
    socket = b"Upgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n"
    upgrade = b"GET /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade, close\r\n"
    yield raw("websocket", upgrade + socket + b"\r\n", 405)


BAD_HOSTS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "evil.example:80",
    "user@127.0.0.1",
    "127.0.0.1@evil.example",
    "127.0.0.1/health/live?",
    "127.0.0.1#",
    "127.0.0.1, evil.example",
    "127.0.0.1 evil.example",
    "127.0.0.1:port",
    "127.0.0.1:999999999",
    "[::1",
    "::1",
    "[::1%lo]",
    "0.0.0.0",
    "2130706433",
    "0x7f000001",
    "..",
    ":80",
    "\u00e9",
    "h" * 5000,
)


def hosts() -> Iterator[Case]:
    """Yield requests with Hosts of other sites, as in DNS rebinding."""
    get = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n"
    for host in BAD_HOSTS:
        name = f"host-{ascii(host)[1:-1][:40]}"
        yield raw(name, get + b"Host: " + host.encode() + b"\r\n\r\n", 400)
    yield raw("host-empty", get + b"Host:\r\n\r\n", 400)
    yield raw("host-missing", get + b"\r\n", 400)
    yield raw("host-missing-in-http-1.0", get.replace(b"1.1", b"1.0") + b"\r\n", 400)
    two = b"Host: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
    yield raw("host-twice", get + two, 400)
    forwarded = b"Host: evil.example\r\nX-Forwarded-Host: 127.0.0.1\r\n\r\n"
    yield raw("host-forwarded", get + forwarded, 400)
    live = b"GET /health/live HTTP/1.1\r\nConnection: close\r\nHost: "
    for host in (b"localhost", b"LOCALHOST:80", b"localhost.", b"[::1]:8000", b"127.0.0.1:1"):
        yield raw(f"accepts-host-{host.decode()}", live + host + b"\r\n\r\n", 200)


def garbage() -> Iterator[Case]:
    no_http = (400, 505, CLOSED)
    for name, data in {
        "http2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
        "http-0.9": b"GET /health/live\r\n\r\n",
        "http-9.9": b"GET /health/live HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        "http-version-of-words": b"GET /health/live HTTP/one\r\nHost: 127.0.0.1\r\n\r\n",
        "other-protocol": b"GET /health/live SPDY/1.0\r\nHost: 127.0.0.1\r\n\r\n",
        "tls-hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
        "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
        "redis": b"*1\r\n$4\r\nPING\r\n",
        "smtp": b"EHLO evil.example\r\nMAIL FROM:<a@b>\r\n",
        "an-answer": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        "nul-bytes": b"\x00" * 1000,
        "high-bytes": b"\xff" * 1000,
        "all-bytes": bytes(range(256)) * 20,
        "a-pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
        "zmq-greeting": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL",
        "spaces": b" " * 1000,
        "a-line-of-70000": b"G" * 70_000,
    }.items():
        yield raw(f"garbage-{name}", data, *no_http, half_closed=True)
    for name, data in {
        "nothing": b"",
        "half-a-method": b"PO",
        "half-a-line": b"POST /v1/comp",
        "half-a-header": HEAD + b"Content-Le",
        "no-empty-line": HEAD,
        "only-line-ends": b"\r\n" * 100,
    }.items():
        yield Case(f"raw-{name}", (CLOSED,), raw=(data,), is_half_closed=True)
    bytewise = tuple(bytes([byte]) for byte in LIVE + b"\r\n")
    yield Case("raw-accepts-a-slow-header", (200,), raw=bytewise, pause_s=0.005)
    endless = (LIVE, *[b"X: x\r\n"] * 20)
    yield Case(
        "raw-slow-header-given-up", (CLOSED,), raw=endless, pause_s=0.02, is_half_closed=True
    )
    head = HEAD + CLOSE + b"Content-Length: %d\r\n\r\n" % len(BODY)
    slow = (head, *[BODY[i : i + 1] for i in range(len(BODY))])
    yield Case("raw-accepts-a-slow-body", (200,), raw=slow, pause_s=0.005)
    yield Case(
        "raw-slow-body-given-up", (CLOSED,), raw=slow[:20], pause_s=0.02, is_half_closed=True
    )


def http_cases() -> list[Case]:
    return [*methods(), *paths(), *content_types(), *lengths(), *headers(), *hosts(), *garbage()]
