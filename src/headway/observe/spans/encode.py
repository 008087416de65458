"""Spans as OTLP messages; needs `pip install 'headway[otlp]'`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp

from headway._version import __version__
from headway.observe.spans.spans import Attribute, EndedRequest, RequestSpan, spans_of

_SAMPLED = 1


def encode_requests(ended: Iterable[EndedRequest], resource: Mapping[str, Attribute]) -> bytes:
    """Return the spans of requests as the body of an export."""
    spans = [_span(one, span) for one in ended for span in spans_of(one)]
    scope = otlp.ScopeSpans(
        scope=InstrumentationScope(name="headway", version=__version__), spans=spans
    )
    whole = otlp.ResourceSpans(
        resource=Resource(attributes=_attributes(resource)), scope_spans=[scope]
    )
    return ExportTraceServiceRequest(resource_spans=[whole]).SerializeToString()


def num_rejected(body: bytes) -> int:
    """Return how many spans a receiver did not take, by its answer."""
    return ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans


def _span(ended: EndedRequest, span: RequestSpan) -> otlp.Span:
    status = otlp.Status(code=otlp.Status.STATUS_CODE_ERROR, message=span.error)
    return otlp.Span(
        trace_id=ended.trace.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        trace_state=ended.trace.state,
        flags=_SAMPLED,
        name=span.name,
        kind=otlp.Span.SPAN_KIND_SERVER if span.is_server else otlp.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_attributes(span.attributes),
        status=status if span.error else None,
    )


def _attributes(values: Mapping[str, Attribute]) -> list[KeyValue]:
    """Return attributes that say something: none is empty."""
    return [KeyValue(key=name, value=_value(one)) for name, one in values.items() if one != ""]


def _value(value: Any) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case _:
            return AnyValue(array_value=ArrayValue(values=[_value(one) for one in value]))
