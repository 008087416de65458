"""A receiver of spans over real sockets, which decodes what it gets with opentelemetry-proto."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Received:
    """A span with its attributes as Python values."""

    span: Span
    attributes: dict[str, Any]
    resource: dict[str, Any]

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9


@dataclass
class SpanReceiver:
    """Listens on a free port while it is entered."""

    status: int = 200
    num_rejected: int = 0
    spans: list[Received] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def __enter__(self) -> SpanReceiver:
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        exported = ExportTraceServiceRequest.FromString(body)
        found = [
            Received(span, _values(span.attributes), _values(whole.resource.attributes))
            for whole in exported.resource_spans
            for scope in whole.scope_spans
            for span in scope.spans
        ]
        with self._changed:
            self.paths.append(path)
            self.headers.append(headers)
            if self.status == 200:
                self.spans += found
            self._changed.notify_all()

    def wait_for(self, is_so: Callable[[SpanReceiver], bool], timeout_s: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: is_so(self), timeout_s), self.paths

    def roots(self) -> dict[str, Received]:
        """The spans of whole requests by id."""
        server = Span.SPAN_KIND_SERVER
        return {
            one.attributes["gen_ai.response.id"]: one
            for one in self.spans
            if one.span.kind == server
        }

    def children(self, root: Received) -> list[Received]:
        return [one for one in self.spans if one.span.parent_span_id == root.span.span_id]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


def _handler(receiver: SpanReceiver) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            answer = ExportTraceServiceResponse()
            if receiver.num_rejected:
                answer.partial_success.rejected_spans = receiver.num_rejected
            content = answer.SerializeToString()
            self.send_response(receiver.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
