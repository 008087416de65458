# pyright: basic, reportMissingImports=false
"""litellm: its providers for vLLM and for OpenAI's API, and its fields of Anthropic's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
from pydantic import BaseModel, Field

from benchmarks.clients.uses.checks import WRONG_KEY, Server, expect, raises, run
from benchmarks.clients.uses.tools import LONG, MESSAGES, RESULT, SHORT, TOOL

PROVIDERS = ("hosted_vllm", "openai")


class City(BaseModel):
    name: str = Field(max_length=16)
    population: int = Field(ge=0, le=99_999_999)


def fields_of(server: Server, provider: str = "hosted_vllm", **fields: Any) -> dict[str, Any]:
    common = {"api_base": server.openai_url, "api_key": server.key, "timeout": 120}
    return {"model": f"{provider}/{server.model}", "num_retries": 0, **common, **fields}


def whole_and_streamed(server: Server) -> str:
    texts = []
    for provider in PROVIDERS:
        fields = fields_of(server, provider, messages=MESSAGES, temperature=0, max_tokens=SHORT)
        whole: Any = litellm.completion(**fields)
        usage = {"stream_options": {"include_usage": True}}
        chunks: list[Any] = list(litellm.completion(**fields, stream=True, **usage))
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        )
        expect(streamed == whole.choices[0].message.content, (streamed, whole))
        expect(chunks[-1].usage.total_tokens == whole.usage.total_tokens, chunks[-1])
        texts.append(streamed)
    expect(len(set(texts)) == 1, texts)
    return texts[0]


def sampled_with_log_probabilities(server: Server) -> str:
    more: Any = {"n": 2, "seed": 3, "temperature": 0.9, "top_k": 40, "logprobs": True}
    fields = fields_of(server, messages=MESSAGES, max_tokens=SHORT, top_logprobs=2, **more)
    first: Any
    second: Any
    first, second = litellm.completion(**fields), litellm.completion(**fields)
    texts = [choice.message.content for choice in first.choices]
    expect(texts == [choice.message.content for choice in second.choices], texts)
    expect(len(set(texts)) == 2 and first.choices[0].logprobs.content, first)
    return f"{len(texts)} samples"


def pydantic_model(server: Server) -> str:
    fields = fields_of(server, messages=MESSAGES, response_format=City, max_tokens=LONG)
    answer: Any = litellm.completion(**fields)
    return repr(City.model_validate_json(answer.choices[0].message.content))


def tool_loop(server: Server) -> str:
    fields = fields_of(server, tools=[TOOL], max_tokens=LONG, parallel_tool_calls=False)
    first: Any = litellm.completion(messages=MESSAGES, tool_choice="required", **fields)
    message = first.choices[0].message
    (call,) = message.tool_calls
    expect(set(json.loads(call.function.arguments)) == {"city"}, call)
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    second: Any = litellm.completion(messages=[*MESSAGES, message, result], **fields)
    expect(second.choices[0].message.content, second)
    return call.function.arguments


def tool_named_and_streamed(server: Server) -> str:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    fields = fields_of(server, messages=MESSAGES, tools=[TOOL], max_tokens=LONG)
    chunks: list[Any] = list(litellm.completion(**fields, tool_choice=choice, stream=True))
    built: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    (call,) = built.choices[0].message.tool_calls
    expect(set(json.loads(call.function.arguments)) == {"city"}, call)
    return call.function.arguments


def text_completion(server: Server) -> str:
    fields = fields_of(server, prompt="One, two,", temperature=0, max_tokens=SHORT)
    answer: Any = litellm.text_completion(**fields)
    expect(answer.choices[0].text, answer)
    return answer.choices[0].text


def embedding(server: Server) -> str:
    answer: Any = litellm.embedding(**fields_of(server, input=["a cat", "a dog"]))
    expect(len(answer.data) == 2, answer)
    return f"{len(answer.data[0]['embedding'])} numbers"


def responses(server: Server) -> str:
    fields = fields_of(server, "openai", input=MESSAGES, temperature=0, max_output_tokens=SHORT)
    answer: Any = litellm.responses(**fields)
    text = answer.output[0].content[0].text
    expect(text, answer)
    return text


async def many_at_once(server: Server) -> str:
    fields = fields_of(server, messages=MESSAGES, temperature=0, max_tokens=SHORT)
    answers: list[Any] = await asyncio.gather(*(litellm.acompletion(**fields) for _ in range(8)))
    texts = {answer.choices[0].message.content for answer in answers}
    expect(len(texts) == 1, texts)
    return "8 equal answers"


def errors(server: Server) -> str:
    fields = fields_of(server, messages=MESSAGES, max_tokens=SHORT)
    wrong = {**fields, "api_key": WRONG_KEY}
    raises(litellm.AuthenticationError, lambda: litellm.completion(**wrong))
    other = {**fields, "model": "hosted_vllm/other"}
    raises(litellm.NotFoundError, lambda: litellm.completion(**other))
    raises(litellm.BadRequestError, lambda: litellm.completion(**fields, temperature=-1))
    return "401, 404, 400"


if __name__ == "__main__":
    run(
        whole_and_streamed,
        sampled_with_log_probabilities,
        pydantic_model,
        tool_loop,
        tool_named_and_streamed,
        text_completion,
        embedding,
        responses,
        many_at_once,
        errors,
    )
