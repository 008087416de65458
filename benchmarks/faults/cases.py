"""One case of the bad-input corpus: what to send, and the expected response."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CLOSED = "closed"
"""The connection may close without an answer: the request was not HTTP, or incomplete."""

Outcome = int | str
JSON_TYPE = ("Content-Type", "application/json")
MAX_TOKENS = 2
"""max_tokens of every body that the server might accept, so that it is cheap."""


@dataclass(frozen=True, slots=True)
class Target:
    """Address and body limit of the server under test."""

    host: str
    port: int
    max_body_bytes: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


Body = bytes | Callable[[Target], bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its expected outcomes, usually a single status.

    `raw` is the whole request, for bytes that no HTTP client would send; then the other fields of
    the request are unused. Its pieces are sent one after another with `pause_s` between them.
    """

    name: str
    expected: tuple[Outcome, ...]
    method: str = "POST"
    path: str | Callable[[Target], str] = CHAT
    headers: tuple[tuple[str, str], ...] = (JSON_TYPE,)
    body: Body = b""
    raw: tuple[bytes, ...] = ()
    pause_s: float = 0.0
    is_half_closed: bool = False
    """The client closes its sending side, though its request is not complete."""

    def pieces(self, target: Target) -> tuple[bytes, ...]:
        if self.raw:
            return self.raw
        body = self.body if isinstance(self.body, bytes) else self.body(target)
        path = self.path if isinstance(self.path, str) else self.path(target)
        lines = [f"{self.method} {path} HTTP/1.1", f"Host: {target.host}:{target.port}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        return ("\r\n".join(lines).encode("latin-1") + body,)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the two generating endpoints, with the smallest body it accepts."""

    name: str
    path: str
    required: Mapping[str, Any] = field(default_factory=dict)

    def body(self, **fields: Any) -> bytes:
        return json.dumps({**self.required, "max_tokens": MAX_TOKENS, **fields}).encode()

    def case(self, name: str, body: Body, *expected: Outcome) -> Case:
        return Case(f"{self.name}-{name}", expected or (400,), path=self.path, body=body)

    def refused(self, name: str, **fields: Any) -> Case:
        """Return a case whose body must be refused with 400."""
        return self.case(name, self.body(**fields))

    def accepted(self, name: str, **fields: Any) -> Case:
        return self.case(name, self.body(**fields), 200)

    def with_literal(self, name: str, field_name: str, literal: bytes) -> Case:
        """Return a case with a field whose value no JSON writer would write."""
        marker = "@here@"
        body = self.body(**{field_name: marker})
        return self.case(name, body.replace(json.dumps(marker).encode(), literal))


CHAT_ENDPOINT = Endpoint("chat", CHAT, {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION_ENDPOINT = Endpoint("completion", COMPLETIONS, {"prompt": "hi"})
ENDPOINTS = (CHAT_ENDPOINT, COMPLETION_ENDPOINT)
