"""Traces of clients, the spans of requests, and the thread that sends them."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headway.clock import VirtualClock
from headway.config import TracingConfig
from headway.core.events import Admitted, Arrived, Event, Finished
from headway.core.request import FinishReason
from headway.errors import ConfigError
from headway.observe.requests.table import RequestTable
from headway.observe.spans import exporter as exporters
from headway.observe.spans.context import RequestTrace, begin_trace, continue_trace
from headway.observe.spans.encode import encode_requests, num_rejected
from headway.observe.spans.exporter import Receiver, SpanExporter
from headway.observe.spans.recorder import MAX_BEGUN, SpanRecorder, open_spans
from headway.observe.spans.spans import EndedRequest
from tests.observe.stories import STOP, A, Story, causes, tokens
from tests.observe.test_metrics import step
from tests.observe.test_pieces import preempted_life
from tests.observe.test_requests import a_life
from tests.support.receivers import SpanReceiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


# ----------------------------------------------------------------------- traceparent


def test_a_traceparent_is_continued() -> None:
    trace = continue_trace(f"00-{TRACE}-{PARENT}-01", "vendor=1")
    assert (trace.trace_id.hex(), trace.parent_id.hex()) == (TRACE, PARENT)
    assert (trace.is_sampled, trace.state) == (True, "vendor=1")
    assert trace.header == f"00-{TRACE}-{trace.span_id.hex()}-01"
    assert trace.span_id.hex() != PARENT
    unwanted = continue_trace(f"00-{TRACE}-{PARENT}-00")
    assert not unwanted.is_sampled and unwanted.header.endswith("-00")
    later = continue_trace(f"cc-{TRACE}-{PARENT}-01-what-comes-later")
    assert later.trace_id.hex() == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-0g",
        f"00-{TRACE}-{PARENT}-01\n",
        f" 00-{TRACE}-{PARENT}-01",
        f"cc-{TRACE}-{PARENT}-01-{'x' * 100}",
        f"00-{TRACE}-{PARENT}-01" * 1000,
    ],
)
def test_an_invalid_traceparent_begins_a_trace(header: str) -> None:
    trace = continue_trace(header, "vendor=1")
    assert trace.trace_id.hex() != TRACE
    assert (trace.parent_id, trace.state, trace.is_sampled) == (b"", "", True)


@pytest.mark.parametrize("state", ["a" * 513, "a=\n", "a=\u00e9"])
def test_a_tracestate_that_is_none_is_left_out(state: str) -> None:
    assert continue_trace(f"00-{TRACE}-{PARENT}-01", state).state == ""


# -------------------------------------------------------------------------- sending


@contextmanager
def sending(url: str, **headers: str) -> Iterator[SpanExporter]:
    receiver = Receiver(url, headers, {"service.name": "test"})
    exporter = SpanExporter(receiver, encode_requests, num_rejected)
    exporter.start()
    try:
        yield exporter
    finally:
        exporter.stop()


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "INTERVAL_S", 0.02)
    monkeypatch.setattr(exporters, "FIRST_RETRY_S", 0.02)


def ended(story: Story, trace: RequestTrace | None = None) -> EndedRequest:
    asked = {"gen_ai.request.model": "tiny", "gen_ai.request.stream": True}
    return EndedRequest(story.only, trace or begin_trace(), asked)


def test_spans_reach_a_receiver_and_add_up_to_the_account() -> None:
    story = preempted_life()
    story.tell(Admitted("r-1", 2.5, 0.5, 48, 111, True, causes(kv_blocks=0.5), "b"))
    story.tell(tokens("r-1"), Finished("r-1", 3.0, STOP, 12), step(3.0))
    trace = continue_trace(f"00-{TRACE}-{PARENT}-01", "vendor=1")
    with SpanReceiver() as receiver, sending(receiver.url, authorization="Bearer x") as exporter:
        exporter.put(ended(story, trace))
        exporter.put(ended(Story(*a_life())))
        receiver.wait_for(lambda one: len(one.spans) == 9)
        assert set(receiver.paths) == {"/v1/traces"}
        assert receiver.headers[0]["authorization"] == "Bearer x"
        assert receiver.headers[0]["content-type"] == "application/x-protobuf"
        root = next(one for one in receiver.spans if one.span.trace_id.hex() == TRACE)
        children = receiver.children(root)
    account = story.only
    assert (root.span.parent_span_id.hex(), root.span.trace_state) == (PARENT, "vendor=1")
    assert root.span.name == "chat tiny"
    assert root.resource == {"service.name": "test"}
    assert root.seconds == pytest.approx(account.duration_s, abs=1e-9)
    assert root.span.start_time_unix_nano == round(account.arrived_at * 1e9)
    assert sum(one.seconds for one in children) == pytest.approx(account.duration_s, abs=1e-8)
    waits = [one for one in children if one.span.name == "queue"]
    assert sum(one.seconds for one in waits) == pytest.approx(account.queue_s, abs=1e-8)
    assert waits[0].attributes == {
        "headway.wait.kv_blocks_s": 0.5,
        "headway.interruption": "preempted",
        "headway.preempted_by": "r-2",
        "headway.preemption.cause": "kv_blocks",
    }
    assert root.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "headway",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "r-1",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 1.0,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "headway.tenant": "a",
        "headway.tier": "gold",
        "headway.queue_s": pytest.approx(0.5),
        "headway.preemptions": 1,
        "headway.wait.kv_blocks_s": 0.5,
    }


def test_a_request_that_fails_is_a_span_with_an_error() -> None:
    failed = Finished("r-1", 2.0, FinishReason.ERROR, 0, causes=causes(tenant_share=2.0))
    with SpanReceiver() as receiver, sending(receiver.url + "/own/path") as exporter:
        exporter.put(ended(Story([Arrived("r-1", 0.0, 5, A)], [failed])))
        receiver.wait_for(lambda one: len(one.spans) == 2)
    assert receiver.paths == ["/own/path"]
    root = receiver.roots()["r-1"]
    assert (root.span.status.code, root.attributes["error.type"]) == (2, "error")


def test_a_receiver_that_is_down_blocks_nothing_and_what_is_lost_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(exporters, "MAX_QUEUED", 5)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # nobody listens
        with sending(f"http://127.0.0.1:{probe.getsockname()[1]}") as exporter:
            began_at = time.monotonic()
            for _ in range(1000):
                exporter.put(ended(Story(*a_life())))
            assert exporter.num_pending == 5
            assert exporter.num_dropped == 995
            wait_until(lambda: exporter.is_failing)
        assert time.monotonic() - began_at < 10
    assert exporter.num_dropped == 1000


def test_a_receiver_that_comes_back_gets_what_waited() -> None:
    with SpanReceiver(status=503) as receiver, sending(receiver.url) as exporter:
        exporter.put(ended(Story(*a_life())))
        receiver.wait_for(lambda one: len(one.paths) >= 2)
        assert exporter.is_failing and not receiver.spans
        receiver.status = 200
        receiver.wait_for(lambda one: len(one.spans) == 4)
        wait_until(lambda: not exporter.is_failing)
    assert exporter.num_dropped == 0


def test_a_receiver_that_refuses_is_not_asked_again(caplog) -> None:
    with SpanReceiver(status=400) as receiver, sending(receiver.url) as exporter:
        for _ in range(3):
            exporter.put(ended(Story(*a_life())))
            wait_until(lambda: exporter.num_pending == 0)
        assert exporter.num_dropped == 3
    assert caplog.text.count("spans were refused: it answered 400") == 1


def test_spans_that_a_receiver_rejects_are_said(caplog) -> None:
    with SpanReceiver(num_rejected=2) as receiver, sending(receiver.url) as exporter:
        exporter.put(ended(Story(*a_life())))
        wait_until(lambda: "did not take 2 spans" in caplog.text)


def test_what_is_there_at_the_end_is_sent(monkeypatch) -> None:
    monkeypatch.setattr(exporters, "INTERVAL_S", 60.0)
    with SpanReceiver() as receiver:
        with sending(receiver.url) as exporter:
            exporter.put(ended(Story(*a_life())))
        assert len(receiver.spans) == 4


def wait_until(is_so, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ------------------------------------------------------------------------- recording


class Kept:
    """Stands in for an exporter."""

    def __init__(self) -> None:
        self.ended: list[EndedRequest] = []

    def put(self, ended: EndedRequest) -> None:
        self.ended.append(ended)


class Recorded:
    """A recorder over hand-made events."""

    def __init__(self) -> None:
        self.table, self.kept = RequestTable(), Kept()
        clock = VirtualClock(0.0)
        self.recorder = SpanRecorder(self.kept, self.table, clock, lambda: 1000.0)  # pyright: ignore

    def tell(self, *events: Event) -> None:
        self.recorder.consume(self.table.consume(events))

    def live(self, name: str, at: float) -> None:
        self.tell(Arrived(name, at, 3, A), Admitted(name, at, 0.0, 0, 3, False))

    def end(self, name: str, at: float) -> None:
        self.tell(tokens(name), Finished(name, at, STOP, 1), step(at))


def test_a_request_takes_the_place_of_its_client_in_the_trace() -> None:
    rig, trace = Recorded(), continue_trace(f"00-{TRACE}-{PARENT}-01")
    with rig.recorder.begun("r-1", trace, {"gen_ai.request.model": "tiny"}):
        assert trace.is_recorded
        rig.live("r-1", 1.0)
    assert not rig.kept.ended
    rig.end("r-1", 2.0)
    (found,) = rig.kept.ended
    assert found.trace is trace
    assert found.asked == {"gen_ai.request.model": "tiny"}
    assert found.account.duration_s == 1.0


def test_prompts_that_end_before_the_last_is_sent_are_one_request() -> None:
    rig = Recorded()
    with rig.recorder.begun("cmpl-1", None, {}):
        rig.live("cmpl-1", 1.0)
        rig.end("cmpl-1", 2.0)
        rig.live("cmpl-1-1", 3.0)
    assert not rig.kept.ended
    rig.end("cmpl-1-1", 4.0)
    (found,) = rig.kept.ended
    assert (found.account.num_parts, found.account.duration_s) == (2, 3.0)


def test_a_request_that_ends_while_it_is_sent_is_not_forgotten() -> None:
    rig = Recorded()
    with rig.recorder.begun("cmpl-1", None, {}):
        rig.live("cmpl-1", 1.0)
        rig.end("cmpl-1", 2.0)
    assert [one.account.id for one in rig.kept.ended] == ["cmpl-1"]


def test_what_a_client_does_not_want_sampled_makes_no_span() -> None:
    rig, trace = Recorded(), continue_trace(f"00-{TRACE}-{PARENT}-00")
    with rig.recorder.begun("r-1", trace, {}):
        rig.live("r-1", 1.0)
    rig.end("r-1", 2.0)
    assert trace.is_recorded and not rig.kept.ended


def test_a_refused_request_leaves_nothing_and_memory_is_bounded() -> None:
    rig, trace = Recorded(), begin_trace()
    with pytest.raises(ValueError, match="full"), rig.recorder.begun("r-1", trace, {}):
        raise ValueError("full")
    assert not trace.is_recorded and not rig.recorder._begun
    for number in range(MAX_BEGUN + 10):
        with rig.recorder.begun(f"r-{number}", None, {}):
            pass
    assert len(rig.recorder._begun) == MAX_BEGUN
    assert not rig.recorder._sending


def test_a_request_that_nobody_announced_begins_a_trace() -> None:
    rig = Recorded()
    rig.live("r-1", 1.0)
    rig.end("r-1", 2.0)
    (found,) = rig.kept.ended
    assert (len(found.trace.trace_id), found.trace.parent_id) == (16, b"")


@pytest.mark.parametrize(
    "setting",
    [
        {"otlp_endpoint": "127.0.0.1:4318"},
        {"otlp_endpoint": "ftp://x"},
        {"otlp_endpoint": "http://user:secret@x"},
        {"otlp_endpoint": "http://a b"},
        {"otlp_endpoint": "http://a:99999"},
        {"otlp_endpoint": "http://x", "otlp_header": ("authorization",)},
        {"otlp_endpoint": "http://x", "otlp_header": ("a=b\r\nc: d",)},
        {"otlp_header": ("a=b",)},
    ],
)
def test_settings_that_are_wrong_are_refused(setting) -> None:
    with pytest.raises(ConfigError) as refusal:
        TracingConfig(**setting)
    assert "secret" not in str(refusal.value)


def test_without_a_receiver_there_is_no_recorder() -> None:
    assert open_spans(TracingConfig(), RequestTable(), VirtualClock(0.0)) is None
