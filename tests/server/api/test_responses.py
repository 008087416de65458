"""/v1/responses over a scripted engine: items, events, refusals by name."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.server.api.test_tools import CALLS, SCRIPT, THINKS, prompt_of
from tests.support.apps import FIXED_ID, FIXED_TIME, check_error, serving

PATH = "/v1/responses"
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
NOW = {"type": "function", "name": "now"}
TOOLS: Any = [ADD, NOW]


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream: each is named by its type, and [DONE] is the end."""
    *parts, last, rest = text.split("\n\n")
    assert last == "data: [DONE]" and rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of the events; return the response that they end with."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    begin = ["created", "in_progress"]
    if events[1]["type"] == "response.queued":
        begin = ["created", "queued", "in_progress"]
    num_first = len(begin)
    assert [event["type"] for event in events[:num_first]] == [f"response.{one}" for one in begin]
    assert all(event["response"]["output"] == [] for event in events[:num_first])
    items: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    text = ""
    is_in_part = False
    for event in events[num_first:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "error":
            continue
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert open_item is None and event["item"]["status"] == "in_progress"
            open_item, text = event["item"], ""
            continue
        assert open_item is not None
        assert event.get("item_id", open_item["id"]) == open_item["id"]
        if kind == "content_part.added":
            assert not is_in_part and event["part"]["text"] == ""
            is_in_part = True
        elif kind == "content_part.done":
            assert is_in_part and event["part"]["text"] == text
            is_in_part = False
        elif kind.endswith(".delta"):
            assert event["delta"] and is_in_part == ("text" in kind)
            text += event["delta"]
        elif kind == "output_item.done":
            assert not is_in_part and event["item"]["id"] == open_item["id"]
            items.append(event["item"])
            open_item = None
        else:
            name = kind.removesuffix(".done")
            fields = {"function_call_arguments": "arguments", "custom_tool_call_input": "input"}
            assert event[fields.get(name, "text")] == text
    assert open_item is None
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}" and last["output"] == items
    return last


def plain(item: dict[str, Any]) -> Any:
    """An item without its ids."""
    if item["type"] in ("message", "reasoning"):
        return item["type"], item["status"], "".join(part["text"] for part in item["content"])
    return item["type"], item["status"], item["name"], item.get("arguments", item.get("input"))


def without_cached(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without the number of tokens that an earlier request has left in the cache."""
    usage = {**answer["usage"], "input_tokens_details": None}
    return {**answer, "usage": usage}


async def ask(made: Any, **fields: Any) -> dict[str, Any]:
    """The whole answer, after a check that a stream comes to the same."""
    whole = await made.public.post(PATH, json={"input": "hi", **fields})
    assert whole.status_code == 200, whole.text
    streamed = await made.public.post(PATH, json={"input": "hi", **fields, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert without_cached(check_events(events_of(streamed.text))) == without_cached(whole.json())
    name = "x-headway-ignored-tools"
    assert streamed.headers.get(name) == whole.headers.get(name)
    return whole.json()


async def test_a_text(local) -> None:
    async with serving(local, "hello") as made:
        answer = await ask(made, instructions="Be brief.", metadata={"a": "b"}, user="u")
        assert prompt_of(made) == "[system]Be brief.[user]hi"
        assert answer["id"] == f"resp_{FIXED_ID}" and answer["created_at"] == FIXED_TIME
        assert answer["status"] == "completed" and answer["error"] is None
        (item,) = answer["output"]
        assert item["id"] == f"msg_{FIXED_ID}00" and item["role"] == "assistant"
        assert plain(item) == ("message", "completed", "hello")
        num_prompt = len(made.process.added[0].token_ids)
        usage = answer["usage"]
        assert usage.pop("input_tokens_details").keys() == {"cached_tokens"}
        assert usage == {
            "input_tokens": num_prompt,
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + 6,
        }
        given = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "u", "store": False}
        assert given.items() <= answer.items()
        answer = await ask(made, max_output_tokens=3)
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert plain(answer["output"][0]) == ("message", "incomplete", "hel")
    async with serving(local, "") as made:
        assert plain((await ask(made))["output"][0]) == ("message", "completed", "")


async def test_calls_follow_text_and_reasoning(local) -> None:
    async with serving(local, f"<think>\nhm </think>\n{SCRIPT}", template=THINKS) as made:
        answer = await ask(made, tools=TOOLS)
        assert [plain(item) for item in answer["output"]] == [
            ("reasoning", "completed", "hm"),
            ("message", "completed", "So:"),
            ("function_call", "completed", "add", '{"a": 1}'),
            ("function_call", "completed", "now", "{}"),
        ]
        ids = [item["id"] for item in answer["output"]]
        assert [one.split("_")[0] for one in ids] == ["rs", "msg", "fc", "fc"]
        assert len(set(ids)) == 4
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
        history = [{"role": "user", "content": "hi"}, *answer["output"]]
        for item in answer["output"][2:]:
            kind = "function_call_output"
            history.append({"type": kind, "call_id": item["call_id"], "output": "r"})
        await ask(made, tools=TOOLS, input=history)
        expected = "[user]hi[assistant]So:<tool_call>add<tool_call>now[tool]r[tool]r"
        assert prompt_of(made) == f"2 tools {expected}"
    async with serving(local, CALLS) as made:
        answer = await ask(made, tools=TOOLS, max_output_tokens=45)
        assert plain(answer["output"][-1])[:3] == ("function_call", "incomplete", "add")


async def test_a_custom_tool_gets_text(local) -> None:
    script = '<tool_call>\n{"name": "say", "arguments": {"input": "a\\"b"}}\n</tool_call>'
    tools = [{"type": "custom", "name": "say", "description": "Says it."}]
    async with serving(local, script) as made:
        answer = await ask(made, tools=tools, tool_choice={"type": "custom", "name": "say"})
        (item,) = answer["output"]
        assert plain(item) == ("custom_tool_call", "completed", "say", 'a"b')
        result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
        await ask(made, tools=tools, input=[{"role": "user", "content": "x"}, item, result])
        answer = await ask(made, tools=tools, max_output_tokens=60)
        assert plain(answer["output"][0])[1] == "incomplete"


async def test_hosted_tools_are_named_and_not_offered(local) -> None:
    hosted = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "web_search"}]
    async with serving(local, "abc") as made:
        response = await made.public.post(PATH, json={"input": "hi", "tools": [*hosted, ADD]})
        assert response.headers["x-headway-ignored-tools"] == "web_search, mcp"
        assert [tool["name"] for tool in response.json()["tools"]] == ["add"]
        assert prompt_of(made).startswith("1 tools")
        answer = await ask(made, tools=hosted)
        assert answer["tools"] == [] and prompt_of(made) == "[user]hi"
        choice: Any = {"type": "allowed_tools", "mode": "auto"}
        choice["tools"] = [{"type": "web_search"}, {"type": "function", "name": "add"}]
        await ask(made, tools=[*hosted, ADD, NOW], tool_choice=choice)
        assert '"now\\"' not in (made.process.added[-1].params.grammar or "")


async def test_formats_and_log_probabilities(local) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    async with serving(local, '{"a":1}') as made:
        answer = await ask(made, text={"format": formats})
        assert answer["text"]["format"]["schema"] == schema
        assert "integer" in (made.process.added[-1].params.grammar or "")
        answer = await ask(made, text={"format": {"type": "json_object"}})
        assert answer["text"]["format"] == {"type": "json_object"}
        assert made.process.added[-1].params.grammar
        await ask(made, text={"format": {"type": "text"}, "verbosity": "medium"})
        assert made.process.added[-1].params.grammar is None
        answer = await ask(made, include=["message.output_text.logprobs"], top_logprobs=2)
        scores = answer["output"][0]["content"][0]["logprobs"]
        assert "".join(one["token"] for one in scores[:-1]) == '{"a":1}'
        assert len(scores[0]["top_logprobs"]) == 2


async def test_sampling_fields_of_vllm(local) -> None:
    async with serving(local, "one. two. three.") as made:
        answer = await ask(made, ignore_eos=True, max_output_tokens=20)
        assert answer["usage"]["output_tokens"] == 20 and answer["status"] == "incomplete"
        await ask(made, structured_outputs={"choice": ["a", "b"]})
        assert made.process.added[-1].params.grammar
        # Last: the engine may still have a request that a stop string has ended, by the same id.
        asked = {"input": "hi", "stop": [". t"], "min_tokens": 6, "presence_penalty": 0.5}
        answer = (await made.public.post(PATH, json=asked)).json()
        assert plain(answer["output"][0]) == ("message", "completed", "one. two")
        assert answer["presence_penalty"] == 0.5


async def test_an_error_after_the_start_is_the_end(local) -> None:
    async with serving(local, [97, 98, None]) as made:
        response = await made.public.post(PATH, json={"input": "hi", "stream": True})
        events = events_of(response.text)
        last = check_events(events)
        assert events[-2]["type"] == "error" and "secret" not in response.text
        assert last["status"] == "failed" and last["error"]["code"] == "server_error"
        assert plain(last["output"][0]) == ("message", "incomplete", "ab")
    async with serving(local, [None]) as made:
        response = await made.public.post(PATH, json={"input": "hi", "stream": True})
        check_error(response, 500)


async def test_a_repeated_request_gets_the_same_answer(local) -> None:
    async with serving(local, SCRIPT) as made:
        body = {"input": "hi", "tools": [*TOOLS, {"type": "web_search"}], "stream": True}
        headers = {"Idempotency-Key": "k"}
        first = await made.public.post(PATH, json=body, headers=headers)
        again = await made.public.post(PATH, json=body, headers=headers)
        assert len(made.process.added) == 1
        assert again.headers["x-headway-ignored-tools"] == "web_search"
        assert check_events(events_of(again.text)) == check_events(events_of(first.text))
        (stream,) = made.context.streams._streams.values()
        assert stream.num_echo_bytes > 0
        response = await made.public.get(f"/v1/streams/resp_{FIXED_ID}")
        check_error(response, 404)  # its events have no ids to resume from


async def test_the_official_client(local) -> None:
    async with serving(local, SCRIPT) as made:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=made.public
        )
        async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert final.output_text == "So:"
        calls = [(one.name, one.arguments) for one in final.output if one.type == "function_call"]
        assert calls == [("add", '{"a": 1}'), ("now", "{}")]


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, fields]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "web_search"}, {"type": "function", "name": "f", **fields}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "empty input": ({"input": []}, "input"),
    "input a number": ({"input": 5}, "input"),
    "item a text": ({"input": ["a"]}, "input[0]"),
    "item of another type": (item(type="item_reference", id="x"), "input[1]"),
    "role tool": (item(role="tool", content="x"), "input[1].role"),
    "unknown key": (item(role="user", content="x", extra=1), "input[1].extra"),
    "image": (item(role="user", content=[{"type": "input_image"}]), "input[1].content[0]"),
    "file": (item(role="user", content=[{"type": "input_file"}]), "input[1].content[0]"),
    "no content": (item(role="user"), "input[1].content"),
    "part without text": (
        item(role="user", content=[{"type": "input_text"}]),
        "input[1].content[0].text",
    ),
    "bad arguments": (
        item(type="function_call", call_id="c", name="f", arguments="{"),
        "input[1].arguments",
    ),
    "no arguments": (item(type="function_call", call_id="c", name="f"), "input[1].arguments"),
    "no call id": (item(type="function_call", name="f", arguments="{}"), "input[1].call_id"),
    "result of no call": (
        item(type="function_call_output", call_id="c", output="x"),
        "input[1].call_id",
    ),
    "only reasoning": ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    "unknown tool": ({"tools": [{"type": "x"}]}, "tools[0].type"),
    "tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "bad name": (tool(name="a b"), "tools[1].name"),
    "bad parameters": (tool(parameters={"not": {}}), "tools[1].parameters"),
    "form of chat": (tool(function={"name": "f"}), "tools[1].function"),
    "grammar of a custom tool": (
        {"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]},
        "tools[0].format",
    ),
    "choice of a hosted tool": ({**tool(), "tool_choice": {"type": "web_search"}}, "tool_choice"),
    "choice of no tool": (
        {**tool(), "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
    ),
    "required without tools": (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
    ),
    "schema without a name": (
        {"text": {"format": {"type": "json_schema", "schema": {}}}},
        "text.format.name",
    ),
    "bad schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format",
    ),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "effort": ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    "summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    "include": ({"include": ["x"]}, "include[0]"),
    "limit": ({"max_output_tokens": 10**9}, "max_output_tokens"),
    "too long": ({"max_output_tokens": 199}, "max_output_tokens"),
    "long input": ({"input": "x" * 300}, "input"),
    "stream options": ({"stream_options": {}}, "stream_options"),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    "metadata": ({"metadata": {"a": 1}}, "metadata"),
    "stop strings": ({"stop": ["x"] * 17}, "stop"),
    "least tokens": ({"min_tokens": 4, "max_output_tokens": 3}, "min_tokens"),
    "end ignored": ({"ignore_eos": 1}, "ignore_eos"),
    "ids outside of the vocabulary": ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    "two formats": (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"choice": ["a"]}},
        "structured_outputs",
    ),
    "format beside tools": (
        {**tool(), "structured_outputs": {"choice": ["a"]}},
        "structured_outputs",
    ),
    "no reasoning to bound": ({"thinking_token_budget": 5}, "thinking_token_budget"),
    "messages": ({"messages": []}, "messages"),
}


async def test_what_cannot_be_honoured_is_refused_by_name(local) -> None:
    async with serving(local) as made:
        for name, (fields, param) in REFUSED.items():
            response = await made.public.post(PATH, json={"input": "hi", **fields})
            error = check_error(response, 400)
            assert error["param"] == param, (name, error)
            assert "messages[" not in error["message"], name
        assert made.engine.num_requests == 0 and not made.process.added
