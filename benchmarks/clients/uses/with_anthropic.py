# pyright: basic, reportMissingImports=false
"""anthropic-python: Messages whole, streamed, with tools, by a schema; tokens; errors."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

from benchmarks.clients.uses.checks import WRONG_KEY, Server, expect, raises, run
from benchmarks.clients.uses.tools import FUNCTION, LONG, MESSAGES, PARAMETERS, RESULT, SHORT

TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": PARAMETERS,
}


class Weather(BaseModel):
    """Without strings of any length: the client drops their bounds from the schema."""

    sky: Literal["sunny", "cloudy", "rainy"]
    is_warm: bool


def client_of(server: Server, **options: Any) -> Any:
    given = {"api_key": server.key, "timeout": 120, "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=server.url, **given)


def whole_and_streamed(server: Server) -> str:
    client = client_of(server)
    fields: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": SHORT}
    fields |= {"extra_body": {"temperature": 0}, "system": "Be brief."}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text and text == whole.content[0].text, (text, whole))
    expect(final.usage.output_tokens == whole.usage.output_tokens, final.usage)
    expect(whole.stop_reason == final.stop_reason == "max_tokens", final)
    return text


def raw_events(server: Server) -> str:
    events = client_of(server).messages.create(
        model=server.model, messages=MESSAGES, max_tokens=SHORT, stream=True
    )
    kinds = [event.type for event in events]
    expect(kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds)
    return ", ".join(dict.fromkeys(kinds))


def tool_loop(server: Server) -> str:
    create = client_of(server).messages.create
    fields: Any = {"model": server.model, "tools": [TOOL]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    first = create(messages=MESSAGES, tool_choice=choice, max_tokens=LONG, **fields)
    expect(first.stop_reason == "tool_use", first)
    (use,) = first.content
    expect(set(use.input) == {"city"}, use)
    answer = {"type": "tool_result", "tool_use_id": use.id, "content": RESULT}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [answer]},
    ]
    second = create(messages=history, max_tokens=SHORT, **fields)
    expect(second.content[0].text, second)
    return str(use.input)


def tool_named_and_streamed(server: Server) -> str:
    asked = client_of(server).messages.stream(
        model=server.model,
        messages=MESSAGES,
        max_tokens=LONG,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    with asked as stream:
        kinds = {event.type for event in stream}
        (use,) = stream.get_final_message().content
    expect("input_json" in kinds and set(use.input) == {"city"}, (kinds, use))
    return str(use.input)


def parsed(server: Server) -> str:
    answer = client_of(server).messages.parse(
        model=server.model, messages=MESSAGES, max_tokens=LONG, output_format=Weather
    )
    expect(isinstance(answer.parsed_output, Weather), answer)
    return repr(answer.parsed_output)


def counted_tokens(server: Server) -> str:
    client = client_of(server)
    counted = client.messages.count_tokens(model=server.model, messages=MESSAGES)
    usage = client.messages.create(model=server.model, messages=MESSAGES, max_tokens=1).usage
    num_prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    expect(counted.input_tokens == num_prompt, (counted, usage))
    return str(num_prompt)


def stop_sequences_and_prefill(server: Server) -> str:
    history: Any = [*MESSAGES, {"role": "assistant", "content": "The weather in Paris is"}]
    fields: Any = {"model": server.model, "messages": history, "max_tokens": 60}
    fields |= {"extra_body": {"temperature": 0}}
    create = client_of(server).messages.create
    stop = create(**fields).content[0].text.split()[2]
    answer = create(**fields, stop_sequences=[stop])
    expect(answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop, answer)
    return repr(answer.content[0].text)


def models(server: Server) -> str:
    names = [model.id for model in client_of(server).models.list()]
    expect(server.model in names, names)
    return ", ".join(names)


async def many_at_once(server: Server) -> str:
    fields: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": SHORT}
    fields |= {"extra_body": {"temperature": 0}}
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=server.key) as client:
        asked = [client.messages.create(**fields) for _ in range(8)]
        texts = {answer.content[0].text for answer in await asyncio.gather(*asked)}
    expect(len(texts) == 1, texts)
    return "8 equal answers"


def keys(server: Server) -> str:
    fields: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    bearer = client_of(server, api_key=None, auth_token=server.key)
    expect(bearer.messages.create(**fields).content, "auth_token")
    wrong = client_of(server, api_key=WRONG_KEY).messages.create
    raises(anthropic.AuthenticationError, lambda: wrong(**fields))
    return "api_key, auth_token, 401"


def errors(server: Server) -> str:
    fields: Any = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    create = client_of(server).messages.create
    raises(anthropic.NotFoundError, lambda: create(**{**fields, "model": "other"}))
    bad = raises(anthropic.BadRequestError, lambda: create(**{**fields, "max_tokens": -1}))
    expect(bad.body["error"]["type"] == "invalid_request_error", bad.body)
    return "404, 400"


if __name__ == "__main__":
    run(
        whole_and_streamed,
        raw_events,
        tool_loop,
        tool_named_and_streamed,
        parsed,
        counted_tokens,
        stop_sequences_and_prefill,
        models,
        many_at_once,
        keys,
        errors,
    )
