# pyright: basic, reportMissingImports=false
"""lm-evaluation-harness: the same requests to the server and to transformers in fp32.

Both read the same GGUF file; MODEL_PATH names it. The data files were written for these checks.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate

from benchmarks.clients.uses.checks import Server, expect, run

DATA = Path(__file__).parent / "data"
QUESTIONS, TEXTS, GENERATION = "questions", "texts", "generation"
ERROR = 0.01
"""Largest difference of the log-probability of one request."""


def _task(name: str, file: str, **fields: Any) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(DATA / f"{file}.jsonl")}},
        "test_split": "test",
        **fields,
    }


def tasks() -> list[dict[str, Any]]:
    prompt = "Question: {{question}}\nAnswer:"
    return [
        _task(
            QUESTIONS,
            QUESTIONS,
            output_type="multiple_choice",
            doc_to_text=prompt,
            doc_to_choice="{{choices}}",
            doc_to_target="answer",
            metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
        ),
        _task(
            TEXTS,
            TEXTS,
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "bits_per_byte"}],
        ),
        _task(
            GENERATION,
            QUESTIONS,
            output_type="generate_until",
            doc_to_text=prompt,
            doc_to_target="{{choices[answer]}}",
            generation_kwargs={"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
            metric_list=[{"metric": "exact_match"}],
        ),
    ]


@cache
def served(server: Server, num_concurrent: int = 1) -> dict[str, Any]:
    """Evaluate over HTTP, with the tokenizer of the server."""
    os.environ["OPENAI_API_KEY"] = server.key
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": server.model,
            "base_url": f"{server.openai_url}/completions",
            "tokenizer_backend": "remote",
            "auth_token": server.key,
            "num_concurrent": num_concurrent,
        },
        tasks=tasks(),
        log_samples=True,
        bootstrap_iters=0,
    )
    expect(found, "results")
    return found or {}


@cache
def computed() -> dict[str, Any]:
    """Evaluate in this process, with transformers."""
    path = Path(os.environ["MODEL_PATH"])
    found = simple_evaluate(
        model="hf",
        model_args={
            "pretrained": str(path.parent),
            "gguf_file": path.name,
            "dtype": "float32",
            "device": "cpu",
        },
        tasks=tasks(),
        log_samples=True,
        bootstrap_iters=0,
    )
    expect(found, "results")
    return found or {}


def _samples(found: dict[str, Any], task: str) -> list[Any]:
    ordered = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [response for sample in ordered for response in sample["resps"]]


def _logprobs(found: dict[str, Any], task: str) -> list[float]:
    """Read one log-probability per request: a number, or a pair with whether it is greedy."""
    firsts = [response[0] for response in _samples(found, task)]
    return [float(first[0] if isinstance(first, (list, tuple)) else first) for first in firsts]


def _compare(server: Server, task: str) -> str:
    ours, theirs = _logprobs(served(server), task), _logprobs(computed(), task)
    errors = [abs(one - other) for one, other in zip(ours, theirs, strict=True)]
    expect(max(errors) <= ERROR, f"{max(errors):.4f} of {max(map(abs, theirs)):.1f}")
    return f"{len(errors)} requests, largest difference {max(errors):.4f}"


def multiple_choice_as_transformers(server: Server) -> str:
    return _compare(server, QUESTIONS)


def accuracy_as_transformers(server: Server) -> str:
    names = ("acc,none", "acc_norm,none")
    ours, theirs = (
        [found["results"][QUESTIONS][name] for name in names]
        for found in (served(server), computed())
    )
    expect(ours == theirs, (ours, theirs))
    return f"acc {ours[0]:.2f}, acc_norm {ours[1]:.2f}"


def rolling_text_as_transformers(server: Server) -> str:
    return _compare(server, TEXTS)


def generation_as_transformers(server: Server) -> str:
    ours, theirs = _samples(served(server), GENERATION), _samples(computed(), GENERATION)
    num_equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
    expect(num_equal == len(theirs), f"{num_equal} of {len(theirs)} equal")
    return f"{num_equal} equal texts"


def eight_at_once(server: Server) -> str:
    """Sums in plain torch depend on the batch; those of the compiled kernels do not."""
    ours, together = _logprobs(served(server), QUESTIONS), _logprobs(served(server, 8), QUESTIONS)
    largest = max(abs(one - other) for one, other in zip(ours, together, strict=True))
    expect(largest < 0.001, "the same log-probabilities")
    return f"{len(ours)} log-probabilities, largest difference {largest:.6f}"


if __name__ == "__main__":
    run(
        multiple_choice_as_transformers,
        accuracy_as_transformers,
        rolling_text_as_transformers,
        generation_as_transformers,
        eight_at_once,
    )
