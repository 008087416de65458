"""An observer that gives the requests that ended to the exporter."""

from __future__ import annotations

import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from headway._version import __version__
from headway.clock import Clock
from headway.config import TracingConfig
from headway.errors import ConfigError
from headway.observe.requests.table import Changes, RequestTable, TrackedRequest, account
from headway.observe.spans.context import RequestTrace, begin_trace
from headway.observe.spans.exporter import Receiver, SpanExporter
from headway.observe.spans.spans import Attribute, EndedRequest

MAX_BEGUN = 10_000
"""Most live requests whose traces are remembered; others begin a trace of their own."""


class SpanRecorder:
    """Remembers the traces of live requests; must be called on the event loop only."""

    def __init__(
        self,
        exporter: SpanExporter,
        requests: RequestTable,
        clock: Clock,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self.exporter = exporter
        self._requests = requests
        self._clock = clock
        self._time_of_day = time_of_day
        self._begun: OrderedDict[str, tuple[RequestTrace, Mapping[str, Attribute]]] = OrderedDict()
        self._sending: set[str] = set()
        """Requests that may get further prompts, so their ends are not final."""

    @contextmanager
    def begun(
        self, request_id: str, trace: RequestTrace | None, asked: Mapping[str, Attribute]
    ) -> Iterator[None]:
        """Remember the trace of a request while it is sent; forget it if that fails."""
        trace = trace or begin_trace()
        trace.is_recorded = True
        self._begun[request_id] = trace, asked
        while len(self._begun) > MAX_BEGUN:
            self._begun.popitem(last=False)
        self._sending.add(request_id)
        try:
            yield
        except BaseException:
            trace.is_recorded = False
            self._begun.pop(request_id, None)
            raise
        finally:
            self._sending.discard(request_id)
        request = self._requests.find(request_id, None)
        if request is not None and not request.is_live:
            self._export(request)

    def consume(self, changes: Changes) -> None:
        """Give each request that ended to the exporter."""
        for request in changes.ended:
            if request.id not in self._sending:
                self._export(request)

    def _export(self, request: TrackedRequest) -> None:
        trace, asked = self._begun.pop(request.id, None) or (begin_trace(), {})
        if trace.is_sampled:
            now = self._clock.now()
            found = account(request, now, self._time_of_day() - now)
            self.exporter.put(EndedRequest(found, trace, asked))


def open_spans(config: TracingConfig, requests: RequestTable, clock: Clock) -> SpanRecorder | None:
    """Return the recorder that the settings ask for; None if they name no receiver."""
    if config.otlp_endpoint is None:
        return None
    try:
        from headway.observe.spans.encode import encode_requests, num_rejected
    except ImportError as error:
        raise ConfigError(
            "otlp_endpoint needs opentelemetry-proto: pip install 'headway[otlp]'"
        ) from error
    resource: dict[str, Attribute] = {
        "service.name": config.otlp_service_name,
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }
    headers = dict(one.split("=", 1) for one in config.otlp_header)
    receiver = Receiver(config.otlp_endpoint, headers, resource)
    exporter = SpanExporter(receiver, encode_requests, num_rejected)
    return SpanRecorder(exporter, requests, clock)
