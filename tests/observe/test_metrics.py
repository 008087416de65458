"""Metrics from hand-made events."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.core.events import (
    Admitted,
    Arrived,
    Event,
    Finished,
    Forked,
    Idled,
    Preempted,
    Refused,
    Stepped,
    TokensEmitted,
)
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.observe import Metrics, RequestTable
from headway.observe.spans.exporter import Receiver, SpanExporter
from tests.support.rows import make_writer

Tell = Callable[[Sequence[Event]], None]
"""Passes events by way of a request table to the metrics."""
LABELS = {"model_name": "m", "engine": "0"}


def step(at: float, **fields: Any) -> Stepped:
    known = {
        "step_id": 1,
        "at": at,
        "elapsed_s": 0.1,
        "num_tokens": 16,
        "token_budget": 64,
        "num_scheduled": 1,
        "max_num_seqs": 4,
        "num_running": 1,
        "num_waiting": 0,
        "num_blocks_used": 2,
        "num_blocks": 8,
    }
    return Stepped(**(known | fields))


class Reader:
    def __init__(self, metrics: Metrics) -> None:
        self._registry = metrics.registry

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, {**LABELS, **labels})


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


@pytest.fixture
def tell(metrics: Metrics) -> Tell:
    table = RequestTable()
    return lambda events: metrics.consume(table.consume(events))


@pytest.fixture
def read(metrics: Metrics) -> Reader:
    return Reader(metrics)


def a_life(end: FinishReason = FinishReason.STOP) -> list[list[Event]]:
    """Arrives at 10, is admitted at 12, has tokens at 13, 15 and 16."""
    return [
        [
            Arrived("a", 10.0, 20),
            Admitted("a", 12.0, 2.0, 8, 20, False),
            TokensEmitted("a", (1,), None),
            step(13.0),
        ],
        [TokensEmitted("a", (2,), None), step(15.0)],
        [
            TokensEmitted("a", (3,), None),
            Finished("a", 16.0, end, 3),
            step(16.0, num_running=0, num_blocks_used=0),
        ],
    ]


def test_the_times_of_a_request(tell: Tell, read: Reader) -> None:
    for events in a_life():
        tell(events)
    expected = {
        "vllm:time_to_first_token_seconds": (1, 3.0),
        "vllm:inter_token_latency_seconds": (2, 3.0),
        "vllm:request_time_per_output_token_seconds": (1, 1.5),
        "vllm:e2e_request_latency_seconds": (1, 6.0),
        "vllm:request_queue_time_seconds": (1, 2.0),
        "vllm:request_prefill_time_seconds": (1, 1.0),
        "vllm:request_decode_time_seconds": (1, 3.0),
        "vllm:request_prompt_tokens": (1, 20.0),
        "vllm:request_generation_tokens": (1, 3.0),
        "vllm:iteration_tokens_total": (3, 48.0),
    }
    for name, (count, total) in expected.items():
        assert (read(f"{name}_count"), read(f"{name}_sum")) == (count, total), name


def test_counters(tell: Tell, read: Reader) -> None:
    for events in a_life():
        tell(events)
    assert read("vllm:prefix_cache_queries_total") == 20
    assert read("vllm:prefix_cache_hits_total") == 8
    assert read("vllm:prompt_tokens_total") == 20
    assert read("vllm:generation_tokens_total") == 3
    assert read("vllm:request_success_total", finished_reason="stop") == 1
    assert read("headway_steps_total") == 3
    assert read("headway_requests_aborted_total") == 0


def test_gauges_follow_the_steps_and_return_to_idle(tell: Tell, read: Reader) -> None:
    first, second, last = a_life()
    tell(first)
    tell(second)
    assert read("vllm:num_requests_running") == 1
    assert read("vllm:kv_cache_usage_perc") == 0.25
    assert read("headway_kv_blocks_used") == 2
    assert read("headway_kv_blocks_total") == 8
    assert read("headway_slot_occupancy") == 0.25
    assert read("headway_token_budget_fill") == 0.25
    tell(last)
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "headway_kv_blocks_used",
        "headway_slot_occupancy",
        "headway_token_budget_fill",
    ):
        assert read(name) == 0, name
    assert read("headway_slot_occupancy_sum_total") == 0.75
    assert read("headway_token_budget_fill_sum_total") == 0.75


def test_an_abort_that_empties_the_engine_is_followed_by_no_step(tell: Tell, read: Reader) -> None:
    tell(
        [
            Arrived("a", 1.0, 4),
            Arrived("b", 1.0, 4),
            Admitted("a", 1.0, 0.0, 0, 4, False),
            TokensEmitted("a", (1,), None),
            step(2.0, num_waiting=1),
        ]
    )
    tell([Finished("b", 3.0, FinishReason.ABORT, 0)])
    assert read("vllm:num_requests_running") == 1
    tell([Finished("a", 3.0, FinishReason.ABORT, 1), Idled(3.0, 0)])
    assert read("vllm:num_requests_running") == 0
    assert read("vllm:num_requests_waiting") == 0
    assert read("headway_kv_blocks_used") == 0
    assert read("vllm:kv_cache_usage_perc") == 0
    assert read("headway_slot_occupancy") == 0
    assert read("headway_requests_aborted_total") == 2
    assert read("headway_prompts_arrived_total") == 2
    assert read("vllm:request_success_total", finished_reason="abort") == 2
    # One that never ran has no times but its whole life.
    assert read("vllm:request_queue_time_seconds_count") == 1
    assert read("vllm:e2e_request_latency_seconds_count") == 2


def test_preemption(tell: Tell, read: Reader) -> None:
    tell([Arrived("a", 1.0, 4), Admitted("a", 2.0, 1.0, 0, 4, False), step(3.0)])
    tell([Preempted("a", 4.0, "b", 7), step(5.0)])
    tell([Admitted("a", 6.0, 2.0, 4, 9, True), step(7.0)])
    tell([TokensEmitted("a", (1,), None), step(8.0)])
    tell([Finished("a", 9.0, FinishReason.LENGTH, 1)])
    assert read("vllm:num_preemptions_total") == 1
    assert read("headway_preempted_tokens_discarded_total") == 7
    # The second admission looks up no new prompt and is no new wait.
    assert read("vllm:prefix_cache_queries_total") == 4
    assert read("vllm:request_queue_time_seconds_sum") == 1.0
    assert read("vllm:request_prefill_time_seconds_sum") == 6.0


def test_forked_samples_count_as_requests_but_not_their_prompt(tell: Tell, read: Reader) -> None:
    tell(
        [
            Arrived("a", 1.0, 5),
            Admitted("a", 1.0, 0.0, 0, 5, False),
            Forked("a#1", 2.0, "a"),
            TokensEmitted("a", (1,), None),
            Finished("a", 2.0, FinishReason.LENGTH, 1),
            step(2.0),
        ]
    )
    tell(
        [
            # One for which no block was free is admitted on its own later.
            Admitted("a#1", 3.0, 1.0, 4, 5, False),
            TokensEmitted("a#1", (2,), None),
            Finished("a#1", 4.0, FinishReason.LENGTH, 1),
            step(4.0, num_running=0),
        ]
    )
    assert read("vllm:request_success_total", finished_reason="length") == 2
    assert read("vllm:prompt_tokens_total") == 5
    assert read("vllm:prefix_cache_queries_total") == 5
    assert read("vllm:generation_tokens_total") == 2
    assert read("vllm:time_to_first_token_seconds_sum") == 1.0 + 3.0


def test_refusals_and_params(metrics: Metrics, tell: Tell, read: Reader) -> None:
    tell([Refused("a", 1.0, "never_fits", "too long")])
    assert read("headway_requests_refused_total", reason="never_fits") is None
    metrics.count_refusal("never_fits")
    assert read("headway_requests_refused_total", reason="never_fits") == 1
    metrics.observe_params(SamplingParams(n=3, max_tokens=7))
    assert read("vllm:request_params_n_sum") == 3
    assert read("vllm:request_params_max_tokens_sum") == 7


def test_the_cache_is_described_once(metrics: Metrics, read: Reader) -> None:
    metrics.describe_cache(100, 16)
    metrics.describe_cache(100, 16)
    assert read("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert b"vllm:cache_config_info" in metrics.render()


def test_events_of_strangers_are_ignored(tell: Tell, read: Reader) -> None:
    tell(
        [
            Admitted("x", 1.0, 0.0, 0, 5, False),
            Forked("x#1", 1.0, "x"),
            TokensEmitted("x", (1,), None),
            Finished("x", 1.0, FinishReason.STOP, 1),
        ]
    )
    tell([])
    assert read("vllm:generation_tokens_total") == 0


def test_two_instances_share_nothing() -> None:
    first, second = Metrics("m"), Metrics("m")
    first.count_refusal("x")
    assert Reader(second)("headway_requests_refused_total", reason="x") is None


def test_every_metric_is_on_its_page_and_no_other(metrics: Metrics, tmp_path: Path) -> None:
    metrics.watch_ledger(make_writer(f"sqlite:///{tmp_path}/ledger.db", tmp_path / "spool"))
    metrics.watch_spans(SpanExporter(Receiver("http://x"), lambda *_: b"", lambda _: 0))
    metrics.watch_need(lambda: 2.5)
    metrics.watch_ttft(lambda: 0.5)
    assert b'headway_expected_ttft_seconds{engine="0",model_name="m"} 0.5' in metrics.render()
    assert b'headway_fleet_desired_replicas{engine="0",model_name="m"} 2.5' in metrics.render()
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| (`.+`) \| (\w+) \|", page, re.MULTILINE)
    documented = {(name, kind) for names, kind in rows for name in re.findall(r"`([^`]+)`", names)}
    assert documented == {(one.name, one.type) for one in metrics.registry.collect()}
