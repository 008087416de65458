"""Prompts in answers: echo, and log-probabilities of prompt tokens."""

from __future__ import annotations

from typing import Any

import pytest

from headway.clock import SystemClock
from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.engine.client.async_engine import AsyncEngine
from headway.engine.client.outputs import SampleDelta
from headway.engine.process.messages import EngineInfo
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.supervisor import Supervisor
from headway.executors.fake import FakeExecutor, score_of
from headway.text import Tokenizer
from tests.server.api.test_compatibility import events_of
from tests.support.apps import check_error, serving
from tests.support.local_engine import CAPACITY, LocalProcess

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
WIDE = "né!"
"""Its second character has two bytes, and in this vocabulary two tokens."""


def scores_of(prompt: list[int], num_top: int) -> list[TokenLogprobs]:
    return [score_of(prompt[:at], prompt[at], num_top) for at in range(1, len(prompt))]


async def complete(made: Any, **fields: Any) -> dict[str, Any]:
    response = await made.public.post(COMPLETIONS, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def joined(text: str, index: int) -> dict[str, Any]:
    """Return a choice of a stream as one choice."""
    parts = [one["choices"][0] for one in events_of(text) if one["choices"]]
    parts = [one for one in parts if one["index"] == index]
    lists = [one["logprobs"] for one in parts if one["logprobs"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {
        "index": index,
        "text": "".join(one["text"] for one in parts),
        "finish_reason": parts[-1]["finish_reason"],
        "logprobs": {name: [item for one in lists for item in one[name]] for name in names}
        if lists
        else None,
    }


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 2])
async def test_echo_with_logprobs(local, max_tokens: int, n: int) -> None:
    async with serving(local, "abc") as made:
        tokenizer = made.engine.tokenizer
        prompts = [tokenizer.encode(WIDE), tokenizer.encode("xyz, and more")]
        fields = {"echo": True, "logprobs": 2, "max_tokens": max_tokens, "n": n}
        answer = await complete(made, prompt=prompts, **fields)
        assert answer["usage"]["completion_tokens"] == 2 * n * max_tokens
        assert len(answer["choices"]) == 2 * n
        for choice in answer["choices"]:
            prompt = prompts[choice["index"] // n]
            text = tokenizer.decode(prompt) + "abc"[:max_tokens]
            assert (choice["text"], choice["finish_reason"]) == (text, "length")
            logprobs = choice["logprobs"]
            lengths = {len(one) for one in logprobs.values()}
            assert lengths == {len(prompt) + max_tokens}
            scores = scores_of(prompt, 2)
            expected = [None, *(one.logprob for one in scores), *([-0.25] * max_tokens)]
            assert logprobs["token_logprobs"] == expected
            assert logprobs["top_logprobs"][0] is None
            assert logprobs["top_logprobs"][1] == {
                tokenizer.token_text(0): 0.0,
                tokenizer.token_text(1): -0.001,
                logprobs["tokens"][1]: scores[0].logprob,
            }
            ends = [*logprobs["text_offset"][1:], len(text)]
            pairs = zip(logprobs["text_offset"], ends, strict=True)
            assert "".join(text[start:end] for start, end in pairs) == text
        texts = await complete(made, prompt=[WIDE, "xyz, and more"], **fields)
        assert texts["choices"] == answer["choices"]
        streamed = await made.public.post(
            COMPLETIONS, json={"prompt": prompts, "stream": True, **fields}
        )
        for choice in answer["choices"]:
            assert joined(streamed.text, choice["index"]) == choice


async def test_text_offsets_count_characters(local) -> None:
    async with serving(local, "ab") as made:
        answer = await complete(made, prompt=WIDE, echo=True, logprobs=0, max_tokens=2)
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["n", "bytes:\\xc3", "bytes:\\xa9", "!", "a", "b"]
        assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]


async def test_echo_alone_scores_nothing(local) -> None:
    async with serving(local, "abc") as made:
        answer = await complete(made, prompt=[WIDE, "x"], echo=True, max_tokens=1)
        assert [one["text"] for one in answer["choices"]] == [WIDE + "a", "xa"]
        assert [one["logprobs"] for one in answer["choices"]] == [None, None]
        assert made.process.added[-1].params.prompt_logprobs is None
        answer = await complete(made, prompt="x", max_tokens=0)
        assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_have_the_form_of_vllm(local) -> None:
    async with serving(local, "abc") as made:
        tokenizer = made.engine.tokenizer
        answer = await complete(made, prompt=["xy", "z"], prompt_logprobs=1, max_tokens=1)
        first, second = answer["choices"]
        prompt = tokenizer.encode("xy")
        (score,) = scores_of(prompt, 1)
        entry = {"logprob": score.logprob, "rank": score.rank, "decoded_token": "y"}
        likeliest = {"logprob": 0.0, "rank": 1, "decoded_token": tokenizer.token_text(0)}
        assert first["prompt_logprobs"] == [None, {str(prompt[1]): entry, "0": likeliest}]
        assert first["text"] == "a" and first["logprobs"] is None
        assert second["prompt_logprobs"] == [None]
        response = await made.public.post(CHAT, json={"messages": MESSAGES, "prompt_logprobs": 0})
        chat, added = response.json(), made.process.added[-1].token_ids
        assert len(chat["prompt_logprobs"]) == len(added)
        assert [list(one) for one in chat["prompt_logprobs"][1:]] == [[str(i)] for i in added[1:]]
        assert "prompt_logprobs" not in chat["choices"][0]


async def test_both_forms_have_their_own_number(local) -> None:
    async with serving(local, "abc") as made:
        fields = {"prompt": "xy", "echo": True, "logprobs": 0, "prompt_logprobs": 3}
        (choice,) = (await complete(made, max_tokens=0, **fields))["choices"]
        assert made.process.added[-1].params.prompt_logprobs == 3
        assert len(choice["logprobs"]["top_logprobs"][1]) == 1
        assert len(choice["prompt_logprobs"][1]) == 4


async def test_tokens_may_be_named_by_their_ids(local) -> None:
    async with serving(local, "abc") as made:
        fields = {"return_tokens_as_token_ids": True, "max_tokens": 1}
        answer = await complete(made, prompt="xy", echo=True, logprobs=1, **fields)
        logprobs = answer["choices"][0]["logprobs"]
        ids = made.engine.tokenizer.encode("xya")
        assert logprobs["tokens"] == [f"token_id:{one}" for one in ids]
        assert list(logprobs["top_logprobs"][1]) == ["token_id:0", f"token_id:{ids[1]}"]
        chat = {"messages": MESSAGES, "logprobs": True, **fields}
        content = (await made.public.post(CHAT, json=chat)).json()["choices"][0]["logprobs"]
        assert content["content"][0]["token"] == f"token_id:{ids[2]}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (
            {"echo": True, "stream": True, "stream_options": {"resumable": True}},
            "stream_options.resumable",
        ),
    ],
)
async def test_what_cannot_be_combined(local, fields: dict[str, Any], param: str) -> None:
    async with serving(local) as made:
        response = await made.public.post(COMPLETIONS, json={"prompt": "x", **fields})
        assert check_error(response, 400)["param"] == param


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
async def test_an_idempotency_key_is_refused(local, fields: dict[str, Any]) -> None:
    async with serving(local) as made:
        headers = {"Idempotency-Key": "a-key-of-this-test"}
        body = {"prompt": "x", **fields}
        response = await made.public.post(COMPLETIONS, json=body, headers=headers)
        assert check_error(response, 400)["param"] in fields


async def test_the_scores_of_an_answer_are_bounded(local) -> None:
    async with serving(local) as made:
        # 64 prompts of 190 tokens, 21 scores of each, and one sample more than fits.
        body = {"prompt": [[5] * 190] * 16, "n": 5, "max_tokens": 0, "prompt_logprobs": 20}
        response = await made.public.post(COMPLETIONS, json=body)
        assert check_error(response, 400)["param"] == "prompt_logprobs"
        assert not made.process.added


@pytest.mark.parametrize("num_steps", range(1, 9))
async def test_an_engine_that_dies_leaves_no_gap(tokenizer: Tokenizer, num_steps: int) -> None:
    """The prompt is scored in chunks; the next engine continues where the last one ended."""
    prompt = [10 + at % 200 for at in range(150)]
    processes: list[LocalProcess] = []

    def start(_before: object) -> LocalProcess:
        process = LocalProcess(FakeExecutor(CAPACITY), "fcfs", max_num_batched_tokens=48)
        process.info = EngineInfo(CAPACITY, 8, 1000)
        process.dies_after = num_steps if not processes else None
        processes.append(process)
        return process

    link = Supervisor(start, SystemClock(), RestartLimits())  # pyright: ignore
    engine = AsyncEngine([link], tokenizer, SystemClock())
    await engine.start()
    try:
        params = SamplingParams(max_tokens=2, n=2, prompt_logprobs=1, ignore_eos=True, seed=3)
        stream = await engine.submit("cmpl-1", prompt, params)
        deltas: list[SampleDelta] = [one async for many in engine.deltas(stream) for one in many]
    finally:
        await engine.close()
    assert len(processes) == 2
    assert stream.prompt_scores == scores_of(prompt, 1)
    assert sum(len(one.token_ids) for one in deltas) == 4
    (resent, *_) = processes[1].added
    assert 1 < resent.num_scored <= len(prompt) or resent.params.prompt_logprobs is None
