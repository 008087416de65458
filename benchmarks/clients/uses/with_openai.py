# pyright: basic, reportMissingImports=false
"""openai-python, versions 2 and 3: everything that it offers and Headway serves."""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from typing import Any

import openai
from pydantic import BaseModel, Field

from benchmarks.clients.uses.checks import WRONG_KEY, Server, expect, raises, run
from benchmarks.clients.uses.tools import LONG, MESSAGES, QUESTION, RESULT, SHORT, TOOL

RESPONSES_TOOL = {"type": "function", "strict": True, **TOOL["function"]}


class City(BaseModel):
    name: str = Field(max_length=16)
    population: int = Field(ge=0, le=99_999_999)


def client_of(server: Server, **options: Any) -> Any:
    given = {"base_url": server.openai_url, "api_key": server.key, "timeout": 120, **options}
    return openai.OpenAI(max_retries=0, **given)


def models(server: Server) -> str:
    client = client_of(server)
    names = [model.id for model in client.models.list()]
    expect(server.model in names, names)
    expect(client.models.retrieve(server.model).id == server.model, "retrieve")
    return ", ".join(names)


def chat_whole_and_streamed(server: Server) -> str:
    create = client_of(server).chat.completions.create
    fields: Any = {"model": server.model, "messages": MESSAGES, "temperature": 0}
    whole = create(**fields, max_completion_tokens=SHORT)
    chunks = list(
        create(**fields, max_tokens=SHORT, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(text and text == whole.choices[0].message.content, (text, whole))
    expect(chunks[-1].usage.total_tokens == whole.usage.total_tokens, chunks[-1].usage)
    return text


def chat_sampled(server: Server) -> str:
    create = client_of(server).chat.completions.create
    fields: Any = {"temperature": 0.9, "top_p": 0.95, "n": 3, "seed": 7, "max_tokens": SHORT}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "stop": ["\n\n"]}
    answers = [create(model=server.model, messages=MESSAGES, **fields) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    expect(texts[0] == texts[1], "a seed gives the same samples again")
    expect(len(set(texts[0])) == 3, texts[0])
    return f"{len(texts[0])} samples"


def chat_log_probabilities(server: Server) -> None:
    answer = client_of(server).chat.completions.create(
        model=server.model, messages=MESSAGES, max_tokens=SHORT, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    expect(len(content) == answer.usage.completion_tokens, answer.usage)
    expect(all(len(entry.top_logprobs) == 2 for entry in content), content)


def chat_parsed(server: Server) -> str:
    answer = client_of(server).chat.completions.parse(
        model=server.model,
        messages=[{"role": "user", "content": "A city as JSON with name and population."}],
        response_format=City,
        max_tokens=LONG,
    )
    city = answer.choices[0].message.parsed
    expect(isinstance(city, City), answer)
    return repr(city)


def chat_stream_helper(server: Server) -> str:
    asked = client_of(server).chat.completions.stream(
        model=server.model, messages=MESSAGES, response_format=City, max_tokens=LONG
    )
    with asked as stream:
        kinds = {event.type for event in stream}
        city = stream.get_final_completion().choices[0].message.parsed
    expect({"content.delta", "content.done"} <= kinds and isinstance(city, City), kinds)
    return ", ".join(sorted(kinds))


def chat_tool_loop(server: Server) -> str:
    create = client_of(server).chat.completions.create
    fields: Any = {"model": server.model, "tools": [TOOL], "parallel_tool_calls": False}
    first = create(messages=MESSAGES, tool_choice="required", max_tokens=LONG, **fields)
    expect(first.choices[0].finish_reason == "tool_calls", first)
    (call,) = first.choices[0].message.tool_calls
    expect(set(json.loads(call.function.arguments)) == {"city"}, call)
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    history = [*MESSAGES, first.choices[0].message, result]
    second = create(messages=history, max_tokens=SHORT, **fields)
    expect(second.choices[0].message.content, second)
    return call.function.arguments


def chat_tool_named_and_streamed(server: Server) -> str:
    asked = client_of(server).chat.completions.stream(
        model=server.model,
        messages=MESSAGES,
        tools=[{"type": "function", "function": {**TOOL["function"], "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=LONG,
    )
    with asked as stream:
        events = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    expect("tool_calls.function.arguments.done" in events, events)
    expect(set(call.function.parsed_arguments) == {"city"}, call)
    return call.function.arguments


def completions(server: Server) -> str:
    create = client_of(server).completions.create
    fields: Any = {"model": server.model, "temperature": 0, "max_tokens": SHORT}
    whole = create(prompt=["One, two,", "Monday, Tuesday,"], logprobs=1, **fields)
    streamed = create(prompt="One, two,", stream=True, **fields)
    text = "".join(chunk.choices[0].text for chunk in streamed)
    expect(text == whole.choices[0].text and len(whole.choices) == 2, (text, whole))
    return text


def embeddings(server: Server) -> str:
    create = client_of(server).embeddings.create
    default = create(model=server.model, input=["a cat", "a dog"])
    plain = create(model=server.model, input="a cat", encoding_format="float", dimensions=32)
    vector = default.data[0].embedding
    expect(math.isclose(sum(x * x for x in vector), 1, abs_tol=1e-3), len(vector))
    expect(len(plain.data[0].embedding) == 32, plain)
    return f"{len(vector)} numbers"


def responses_whole_and_streamed(server: Server) -> str:
    client = client_of(server)
    fields: Any = {"model": server.model, "input": QUESTION, "temperature": 0}
    whole = client.responses.create(**fields, max_output_tokens=SHORT)
    text = ""
    for event in client.responses.create(**fields, max_output_tokens=SHORT, stream=True):
        text += event.delta if event.type == "response.output_text.delta" else ""
    expect(text and text == whole.output_text, (text, whole))
    return text


def responses_parsed(server: Server) -> str:
    answer = client_of(server).responses.parse(
        model=server.model, input=QUESTION, text_format=City, max_output_tokens=LONG
    )
    expect(isinstance(answer.output_parsed, City), answer)
    return repr(answer.output_parsed)


def responses_tool_loop(server: Server) -> str:
    client = client_of(server)
    fields: Any = {"model": server.model, "tools": [RESPONSES_TOOL], "parallel_tool_calls": False}
    asked = client.responses.stream(
        input=QUESTION, tool_choice="required", max_output_tokens=LONG, **fields
    )
    with asked as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_response().output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    history: Any = [*MESSAGES, call.to_dict(), result]
    second = client.responses.create(input=history, max_output_tokens=SHORT, **fields)
    expect(second.output_text, second)
    return call.arguments


def batch(server: Server) -> str:
    client = client_of(server)
    body = {"model": server.model, "messages": MESSAGES, "max_tokens": SHORT}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [json.dumps({"custom_id": str(number), **line}) for number in range(3)]
    file = client.files.create(
        file=("input.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch"
    )
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while made.status not in ("completed", "failed", "expired") and time.monotonic() < deadline:
        time.sleep(0.2)
        made = client.batches.retrieve(made.id)
    expect(made.status == "completed" and made.request_counts.completed == 3, made)
    output = client.files.content(made.output_file_id).text.splitlines()
    expect({json.loads(one)["custom_id"] for one in output} == {"0", "1", "2"}, output)
    return f"{len(output)} of 3 lines"


async def many_at_once(server: Server) -> str:
    async with openai.AsyncOpenAI(base_url=server.openai_url, api_key=server.key) as client:
        create: Any = client.chat.completions.create
        fields: Any = {"model": server.model, "messages": MESSAGES, "temperature": 0}
        asked = [create(**fields, max_tokens=SHORT) for _ in range(16)]
        texts = {answer.choices[0].message.content for answer in await asyncio.gather(*asked)}
    expect(len(texts) == 1, texts)
    return "16 equal answers"


def raw_headers_and_early_close(server: Server) -> str:
    client = client_of(server)
    fields: Any = {"model": server.model, "messages": MESSAGES}
    raw = client.chat.completions.with_raw_response.create(**fields, max_tokens=1)
    expect(raw.headers["x-request-id"] and raw.parse().choices, raw.headers)
    stream = client.chat.completions.create(**fields, stream=True, max_tokens=500)
    next(iter(stream))
    stream.close()
    return raw.headers["x-request-id"]


def errors(server: Server) -> str:
    create = client_of(server).chat.completions.create
    wrong = client_of(server, api_key=WRONG_KEY).chat.completions.create
    fields: Any = {"model": server.model, "messages": MESSAGES}
    raises(openai.AuthenticationError, lambda: wrong(**fields))
    missing = raises(openai.NotFoundError, lambda: create(model="other", messages=MESSAGES))
    expect(missing.code == "model_not_found", missing)
    bad = raises(openai.BadRequestError, lambda: create(**fields, temperature=-1))
    expect(bad.param == "temperature", bad)
    hasty = client_of(server, timeout=0.01).chat.completions.create
    raises(openai.APITimeoutError, lambda: hasty(**fields, max_tokens=500))
    return "401, 404, 400, timeout"


if __name__ == "__main__":
    run(
        models,
        chat_whole_and_streamed,
        chat_sampled,
        chat_log_probabilities,
        chat_parsed,
        chat_stream_helper,
        chat_tool_loop,
        chat_tool_named_and_streamed,
        completions,
        embeddings,
        responses_whole_and_streamed,
        responses_parsed,
        responses_tool_loop,
        batch,
        many_at_once,
        raw_headers_and_early_close,
        errors,
    )
