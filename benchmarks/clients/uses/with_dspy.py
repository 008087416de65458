# pyright: basic, reportMissingImports=false
"""DSPy: signatures as text and as schemas, chains of thought, samples, streams, evaluation."""

from __future__ import annotations

from typing import Any, Literal

import dspy
import litellm

from benchmarks.clients.uses.checks import WRONG_KEY, Server, expect, raises, run
from benchmarks.clients.uses.tools import LONG, MESSAGES, QUESTION, SHORT


class Sky(dspy.Signature):
    """The sky in a city."""

    city: str = dspy.InputField()
    sky: Literal["sunny", "cloudy", "rainy"] = dspy.OutputField()


def lm_of(server: Server, key: str = "", **options: Any) -> dspy.LM:
    given: Any = {"temperature": 0, "max_tokens": LONG, "cache": False, "num_retries": 0}
    given |= {"api_base": server.openai_url, "api_key": key or server.key, **options}
    name = f"hosted_vllm/{server.model}"
    # Schemas are sent only to models that are listed as able to follow them.
    litellm.register_model({name: {"mode": "chat", "supports_response_schema": True}})
    return dspy.LM(name, engine="litellm", **given)


def direct_call_and_samples(server: Server) -> str:
    lm = lm_of(server, max_tokens=SHORT)
    first, second = lm(messages=MESSAGES), lm(messages=MESSAGES)
    expect(first == second and first[0], (first, second))
    samples = lm(messages=MESSAGES, n=3, temperature=1.0)
    expect(len(samples) == 3, samples)
    return str(first[0])


def signature_by_schema(server: Server) -> str:
    """The schema of the signature is sent, so even a tiny model fills it."""
    with dspy.context(lm=lm_of(server), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Sky)(city="Paris")
    expect(found.sky in ("sunny", "cloudy", "rainy"), found)
    return found.sky


def chain_of_thought_by_schema(server: Server) -> str:
    with dspy.context(lm=lm_of(server, max_tokens=400), adapter=dspy.JSONAdapter()):
        found = dspy.ChainOfThought(Sky)(city="Paris")
    expect(found.reasoning and found.sky, found)
    return found.sky


def log_probabilities(server: Server) -> str:
    lm = lm_of(server, max_tokens=SHORT, logprobs=True)
    (answer,) = lm(messages=MESSAGES)
    expect(answer["logprobs"], answer)
    return f"{len(answer['text'])} characters"


def evaluation(server: Server) -> str:
    names = ("Paris", "Rome", "Oslo", "Cairo")
    examples = [dspy.Example(city=name, sky="sunny").with_inputs("city") for name in names]
    with dspy.context(lm=lm_of(server), adapter=dspy.JSONAdapter()):
        judge = dspy.Evaluate(
            devset=examples,
            metric=lambda example, found, *_: example.sky == found.sky,
            num_threads=4,
            display_progress=False,
            max_errors=1,
        )
        score = judge(dspy.Predict(Sky))
    expect(len(score.results) == len(examples), score)
    return f"{score.score} of 100"


def embeddings(server: Server) -> str:
    embed = dspy.Embedder(
        f"openai/{server.model}", api_base=server.openai_url, api_key=server.key, caching=False
    )
    found = embed(["a cat", "a dog"])
    expect(found.shape[0] == 2, found)
    return f"{found.shape[1]} numbers"


def errors(server: Server) -> str:
    wrong = lm_of(server, WRONG_KEY)
    error = raises(Exception, lambda: wrong(QUESTION))
    expect("key" in str(error).lower(), error)
    return type(error).__name__


if __name__ == "__main__":
    run(
        direct_call_and_samples,
        signature_by_schema,
        chain_of_thought_by_schema,
        log_probabilities,
        evaluation,
        embeddings,
        errors,
    )
