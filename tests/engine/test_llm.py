"""The Python entry point, on the real model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.core.invariants import check_drained
from headway.errors import ConfigError, InvalidRequestError, NeverFitsError

pytestmark = pytest.mark.model

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    progress: list[tuple[int, int]] = []
    llm = LLM(
        str(model_path),
        kv_cache_memory_bytes="64M",
        progress=lambda *done: progress.append(done),
    )
    assert progress[-1][0] == progress[-1][1] > 200
    yield llm
    check_drained(llm.core.scheduler)
    llm.close()


def test_text_and_token_ids_are_the_same_prompt(llm: LLM):
    text = "The capital of France is"
    token_ids = llm.tokenizer.encode(text)
    outputs = llm.generate([text, token_ids], GREEDY)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert outputs[0].prompt == text
    assert outputs[0].prompt_token_ids == token_ids
    assert outputs[0].outputs[0].finish_reason == "length"
    assert "Paris" in outputs[0].outputs[0].text


def test_one_prompt_needs_no_list(llm: LLM):
    assert len(llm.generate("One", GREEDY)) == 1
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1


def test_params_may_differ_per_prompt(llm: LLM):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (3, 5)]
    outputs = llm.generate(["One", "Two"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    with pytest.raises(InvalidRequestError):
        llm.generate(["One"], params)


def test_samples_logprobs_and_metrics(llm: LLM):
    params = SamplingParams(n=3, max_tokens=6, seed=5, logprobs=2)
    (output,) = llm.generate("Once upon a time", params)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({sample.text for sample in output.outputs}) > 1
    for sample in output.outputs:
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)
        assert all(len(entry.top_ids) == 2 for entry in sample.logprobs)
    metrics = output.metrics
    assert metrics.ttft_s is not None
    assert metrics.e2e_s is not None
    assert 0 < metrics.ttft_s < metrics.e2e_s


def test_a_stop_string_ends_the_text(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=("Tokyo",))
    (output,) = llm.chat(QUESTION, params)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == "Tokyo"
    assert "Tokyo" not in output.outputs[0].text
    assert not llm.core.has_work


def test_chat_answers_and_streams(llm: LLM):
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (output,) = llm.chat(QUESTION, params)
    assert "Tokyo" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "".join(llm.stream_chat(QUESTION, params)) == output.outputs[0].text
    assert len(llm.chat([QUESTION, QUESTION], params)) == 2


def test_an_abandoned_stream_frees_its_blocks(llm: LLM):
    stream = llm.stream_chat(QUESTION, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.core.has_work
    check_drained(llm.core.scheduler)


def test_a_bad_request_starts_nothing(llm: LLM):
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["fine", []], GREEDY)
    with pytest.raises(NeverFitsError, match="tokens"):
        llm.generate("too long", SamplingParams(max_tokens=100_000))
    with pytest.raises(InvalidRequestError, match="outside"):
        llm.generate([10**6], GREEDY)
    assert not llm.core.has_work


@pytest.mark.full  # on a tiny model always: tests/parity/test_schedules.py
def test_a_full_cache_preempts_and_still_answers_the_same(llm: LLM, model_path: Path):
    prompts = [f"{number} is a number that" for number in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    expected = llm.generate(prompts, params)
    small = LLM(str(model_path), kv_cache_memory_bytes="6M", max_num_seqs=8)
    outputs = small.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    small.close()


def test_an_unknown_setting_is_an_error(model_path: Path):
    with pytest.raises(ConfigError, match="no_such_setting"):
        LLM(str(model_path), no_such_setting=1)
