"""The real model over real sockets: many clients at once, clients that leave, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from benchmarks.support.servers import RunningServer, start_model_server
from headway import LLM, SamplingParams

pytestmark = pytest.mark.model

NUM_STREAMS = 16
NUM_LEAVERS = 200
MAX_TOKENS = 24


def _prompts() -> list[str]:
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    draw = random.Random(3)
    starts = [draw.randrange(len(words) - 60) for _ in range(NUM_STREAMS)]
    return [" ".join(words[at : at + draw.randint(5, 60)]) for at in starts]


async def _stream(client: openai.AsyncOpenAI, model: str, prompt: str) -> tuple[str, list[str]]:
    """The text and the tokens of one streamed completion."""
    text, tokens = "", []
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True, logprobs=0
    )
    async for chunk in stream:
        text += chunk.choices[0].text
        if chunk.choices[0].logprobs is not None:
            tokens += chunk.choices[0].logprobs.tokens or []
    return text, tokens


async def test_streams_at_once_make_the_same_tokens_as_offline(
    model_server: RunningServer, model_path: Path
) -> None:
    prompts = _prompts()
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key="none", timeout=600
    ) as client:
        model = (await client.models.list()).data[0].id
        served = await asyncio.gather(*(_stream(client, model, prompt) for prompt in prompts))
    llm = LLM(str(model_path), kv_cache_memory_bytes="256M")
    offline = llm.generate(prompts, SamplingParams(max_tokens=MAX_TOKENS, temperature=0))
    llm.close()
    for (text, tokens), expected in zip(served, offline, strict=True):
        made = expected.outputs[0]
        assert text == made.text
        assert tokens == [llm.tokenizer.token_text(token_id) for token_id in made.token_ids]
    assert sum(len(tokens) for _, tokens in served) > NUM_STREAMS * MAX_TOKENS / 2


async def _leave(client: httpx.AsyncClient, number: int) -> None:
    """Begin a request and go away at a random moment: queued, in prefill or in mid-stream."""
    draw = random.Random(number)
    body: dict[str, Any] = {
        "prompt": f"{number} " + "word " * draw.randint(1, 300),
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": draw.random() < 0.7,
        "n": draw.choice((1, 1, 2)),
    }
    await asyncio.sleep(draw.uniform(0, 10))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(draw.uniform(0, 4)):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    pass


async def test_200_leavers_leave_every_block_free(model_server: RunningServer) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=model_server.url, limits=limits, timeout=60) as client:
        await asyncio.gather(*(_leave(client, number) for number in range(NUM_LEAVERS)))
    model_server.wait_for("vllm:num_requests_running", 0, timeout_s=60.0)
    model_server.wait_for("vllm:num_requests_waiting", 0, timeout_s=60.0)
    assert model_server.metric("headway_kv_blocks_used") == 0
    # On a busy machine many leave before the server has read their request.
    assert model_server.metric("headway_requests_aborted_total") >= NUM_LEAVERS / 10


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_leaves_no_process(
    number: signal.Signals, model_path: Path, tmp_path: Path
) -> None:
    server = start_model_server(model_path, tmp_path / "log").wait_ready()
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert family, "the engine should be a process of its own"
    server.process.send_signal(number)
    assert server.process.wait(20) == 0, server.log
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert "Traceback" not in server.log


def test_a_killed_server_leaves_no_engine(model_path: Path, tmp_path: Path) -> None:
    server = start_model_server(model_path, tmp_path / "log").wait_ready()
    family = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait()
    began_at = time.monotonic()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive, f"alive after {time.monotonic() - began_at:.1f} s"
