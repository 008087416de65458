"""Likelihoods of texts over HTTP, with the real model, against those of transformers.

The file in data/ has the sums of transformers in fp32 for the weights of the test model;
tests/parity/test_smollm2.py computes them again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.support.servers import RunningServer, start_model_server

pytestmark = pytest.mark.model

CASES = json.loads((Path(__file__).parent / "data" / "loglikelihoods.json").read_text())
KERNEL_ERROR = 0.01
"""Of bf16 arithmetic, per token of a continuation on average."""


def ask(url: str, cases: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Send what lm-evaluation-harness sends for a batch of loglikelihoods; return the choices."""
    body = {
        "prompt": [case["token_ids"] for case in cases],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
        **fields,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


def parse(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """Read an answer as lm-evaluation-harness does: the last token is not part of the text."""
    logprobs = choice["logprobs"]["token_logprobs"][num_context:-1]
    top_logprobs = choice["logprobs"]["top_logprobs"][num_context:-1]
    pairs = zip(logprobs, top_logprobs, strict=True)
    return sum(logprobs), all(one == max(top.values()) for one, top in pairs)


def check(url: str, error: float) -> list[tuple[float, bool]]:
    found = [
        parse(choice, case["num_context"])
        for choice, case in zip(ask(url, CASES), CASES, strict=True)
    ]
    for case, (logprob, is_greedy) in zip(CASES, found, strict=True):
        num_tokens = len(case["token_ids"]) - case["num_context"]
        assert logprob == pytest.approx(case["logprob"], abs=error * (10 + num_tokens))
        assert is_greedy == case["is_greedy"]
    return found


def serve(model_path: Path, folder: Path, *flags: str) -> Iterator[RunningServer]:
    flags = (*flags, "--kv-cache-memory-bytes", "256M")
    server = start_model_server(model_path, folder / "server.log", *flags)
    try:
        yield server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def bf16_server(model_path: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """Without int8 activations, which change a log-probability by more."""
    yield from serve(model_path, tmp_path, "--activation-dtype", "bf16")


@pytest.fixture
def fp32_server(model_path: Path, tmp_path: Path) -> Iterator[RunningServer]:
    yield from serve(model_path, tmp_path, "--kernels", "none", "--dtype", "fp32")


def test_loglikelihoods_are_those_of_transformers(bf16_server: RunningServer) -> None:
    together = check(bf16_server.url, KERNEL_ERROR)
    # Alone, after the prompts are in the prefix cache: the same bits.
    for index in (0, 7, 9):
        (choice,) = ask(bf16_server.url, CASES[index : index + 1])
        assert parse(choice, CASES[index]["num_context"]) == together[index]
    (choice,) = ask(bf16_server.url, CASES[-1:], max_tokens=0)
    assert len(choice["logprobs"]["tokens"]) == len(CASES[-1]["token_ids"])


def test_embeddings_of_like_texts_are_near(model_server: RunningServer) -> None:
    texts = [
        "The cat sleeps on the sofa.",
        "A cat is sleeping on the couch.",
        "Stock prices fell sharply on Monday.",
    ]
    body = {"input": texts, "encoding_format": "float"}
    response = httpx.post(f"{model_server.url}/v1/embeddings", json=body, timeout=60)
    first, like, other = [one["embedding"] for one in response.json()["data"]]
    assert math.hypot(*first) == pytest.approx(1.0, abs=1e-5)
    assert math.dist(first, like) < math.dist(first, other)
    alone = httpx.post(f"{model_server.url}/v1/embeddings", json={**body, "input": texts[1]})
    assert alone.json()["data"][0]["embedding"] == like


@pytest.mark.full
def test_in_fp32_they_are_equal(fp32_server: RunningServer) -> None:
    check(fp32_server.url, 1e-5)
