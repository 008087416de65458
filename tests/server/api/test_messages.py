"""/v1/messages over a scripted engine: blocks, events, errors in Anthropic's form, refusals."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.server.api.test_tools import CALLS, SCRIPT, THINKS, prompt_of
from tests.support.apps import FIXED_ID, serving

PATH = "/v1/messages"
USER: Any = {"role": "user", "content": "hi"}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
NOW = {"name": "now", "input_schema": {"type": "object"}}
TOOLS: Any = [ADD, NOW]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [USER], "max_tokens": 100, **fields}


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each is named by its type."""
    *parts, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def check_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of the events; return the message that they add up to."""
    assert [one["type"] for one in events[:2]] == ["message_start", "ping"]
    assert [one["type"] for one in events[-2:]] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    blocks: list[dict[str, Any]] = []
    text, is_open = "", False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(event["content_block"])
            text, is_open = "", True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        block = blocks[-1]
        if event["type"] == "content_block_delta":
            names = {
                "text": ("text_delta", "text"),
                "thinking": ("thinking_delta", "thinking"),
                "tool_use": ("input_json_delta", "partial_json"),
            }
            kind, name = names[block["type"]]
            assert event["delta"]["type"] == kind and event["delta"][name]
            text += event["delta"][name]
        else:
            assert event["type"] == "content_block_stop"
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(text) if text.endswith("}") else {}
            else:
                block[block["type"]] = text
    assert not is_open
    return {**message, "content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_cached(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the split of its prompt into cached tokens and others."""
    usage = dict(message["usage"])
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return {**message, "usage": usage}


async def ask(made: Any, **fields: Any) -> dict[str, Any]:
    """The whole answer, after a check that a stream comes to the same."""
    whole = await made.public.post(PATH, json=body(**fields))
    assert whole.status_code == 200, whole.text
    streamed = await made.public.post(PATH, json=body(**fields, stream=True))
    message = check_events(events_of(streamed.text))
    assert without_cached(message) == without_cached(whole.json())
    return whole.json()


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    answer = response.json()
    assert answer.keys() == {"type", "error"} and answer["type"] == "error"
    assert answer["error"].keys() == {"type", "message"} and answer["error"]["type"] == kind
    return answer["error"]["message"]


async def test_a_text(local) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    async with serving(local, "hello") as made:
        answer = await ask(made, system=system, metadata={"user_id": "u"}, service_tier="auto")
        assert prompt_of(made) == "[system]Be brief.\n\nBe kind.[user]hi"
        num_prompt = len(made.process.added[0].token_ids)
        assert answer == {
            "id": f"msg_{FIXED_ID}",
            "type": "message",
            "role": "assistant",
            "model": "tiny",
            "content": [{"type": "text", "text": "hello"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": num_prompt,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 6,
            },
        }
        answer = await ask(made, max_tokens=3)
        assert answer["content"][0]["text"] == "hel" and answer["stop_reason"] == "max_tokens"
        await ask(made, messages=[USER, {"role": "assistant", "content": "Well,"}])
        assert prompt_of(made) == "[user]hi[assistant]Well,"
    async with serving(local, "") as made:
        assert (await ask(made))["content"] == []


async def test_the_stop_sequence_is_named(local) -> None:
    for stream in (False, True):
        async with serving(local, "hello") as made:
            asked = body(stop_sequences=["zz", "ll"], stream=stream)
            response = await made.public.post(PATH, json=asked)
            answer = check_events(events_of(response.text)) if stream else response.json()
            assert answer["content"] == [{"type": "text", "text": "he"}]
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "ll")


async def test_tool_use_and_thinking(local) -> None:
    async with serving(local, f"<think>\nhm </think>\n{SCRIPT}", template=THINKS) as made:
        answer = await ask(made, tools=TOOLS, max_tokens=150)
        blocks = answer["content"]
        assert blocks[0] == {"type": "thinking", "thinking": "hm", "signature": ""}
        assert blocks[1] == {"type": "text", "text": "So:"}
        calls = [(one["type"], one["name"], one["input"]) for one in blocks[2:]]
        assert calls == [("tool_use", "add", {"a": 1}), ("tool_use", "now", {})]
        assert answer["stop_reason"] == "tool_use"
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "r"},
            {
                "type": "tool_result",
                "tool_use_id": blocks[3]["id"],
                "content": [{"type": "text", "text": "s"}],
                "is_error": True,
            },
            {"type": "text", "text": "Go on."},
        ]
        history = [
            USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": results},
        ]
        await ask(made, tools=TOOLS, messages=history)
        expected = "[assistant]So:<tool_call>add<tool_call>now[tool]r[tool]Error: s[user]Go on."
        assert prompt_of(made) == f"2 tools [user]hi{expected}"
        await ask(made, thinking={"type": "disabled"})
        assert prompt_of(made).endswith("</think>")
        await ask(made, thinking={"type": "enabled", "budget_tokens": 20})
        assert made.process.added[-1].params.grammar
        await ask(made, thinking={"type": "adaptive"}, output_config={"effort": "high"})
        assert not prompt_of(made).endswith("</think>")
    async with serving(local, CALLS) as made:
        answer = await ask(made, tools=TOOLS, max_tokens=45)
        assert answer["stop_reason"] == "max_tokens"
        assert answer["content"][-1]["name"] == "add"


async def test_choices_and_formats(local) -> None:
    async with serving(local, CALLS) as made:
        for choice, names, has_text, has_several in (
            ({"type": "auto"}, {"add", "now"}, True, True),
            ({"type": "any"}, {"add", "now"}, False, True),
            ({"type": "any", "disable_parallel_tool_use": True}, {"add", "now"}, False, False),
            ({"type": "tool", "name": "now"}, {"now"}, False, False),
        ):
            await ask(made, tools=TOOLS, tool_choice=choice)
            grammar = made.process.added[-1].params.grammar or ""
            assert {name for name in ("add", "now") if f'"{name}\\"' in grammar} == names
            assert ("FREE" in grammar, "{0,31}" in grammar) == (has_text, has_several)
        await ask(made, tools=TOOLS, tool_choice={"type": "none"})
        assert prompt_of(made) == "[user]hi"
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with serving(local, '{"a":1}') as made:
        await ask(made, output_config={"format": {"type": "json_schema", "schema": schema}})
        assert "integer" in (made.process.added[-1].params.grammar or "")


async def test_tokens_are_counted_as_they_will_be(local) -> None:
    async with serving(local, CALLS) as made:
        fields = {"messages": [USER], "system": "Be brief.", "tools": TOOLS, "model": "tiny"}
        response = await made.public.post(f"{PATH}/count_tokens", json=fields)
        answer = await ask(made, **fields)
        assert response.json() == {"input_tokens": answer["usage"]["input_tokens"]}
        fields = {"messages": [USER], "max_tokens": 5}
        response = await made.public.post(f"{PATH}/count_tokens", json=fields)
        assert "max_tokens" in check_error(response, 400, "invalid_request_error")
        fields = {"messages": [{"role": "user", "content": "x" * 300}]}  # more than fits
        response = await made.public.post(f"{PATH}/count_tokens", json=fields)
        assert response.json() == {"input_tokens": 306}


async def test_errors_have_the_form_of_the_api(local) -> None:
    async with serving(local, [97, 98, None], api_key=("k",)) as made:
        for headers in ({}, {"x-api-key": "x"}, {"authorization": "Basic k"}):
            response = await made.public.post(PATH, json=body(), headers=headers)
            assert "x-api-key" in check_error(response, 401, "authentication_error")
        key = {"x-api-key": "k"}
        response = await made.public.post(PATH, json=body(model="x"), headers=key)
        check_error(response, 404, "not_found_error")
        check_error(await made.public.get(PATH, headers=key), 405, "invalid_request_error")
        response = await made.public.post(f"{PATH}/batches", json={}, headers=key)
        check_error(response, 404, "not_found_error")
        response = await made.public.post(PATH, json=body(stream=True), headers=key)
        events = events_of(response.text)
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
        assert "secret" not in response.text
        check_error(await made.public.post(PATH, json=body(), headers=key), 500, "api_error")


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(content)}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{**NOW, **fields}]}


USE = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no max_tokens": ({"max_tokens": None}, "max_tokens"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "too many tokens": ({"max_tokens": 10**9}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "message a text": ({"messages": ["x"]}, "messages[0]"),
    "role system": ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    "image": (blocks({"type": "image", "source": {}}), "messages[1].content[0]"),
    "document": (blocks({"type": "document", "source": {}}), "messages[1].content[0]"),
    "unknown key": (blocks({"type": "text", "text": "a", "x": 1}), "messages[1].content[0].x"),
    "result of no call": (
        blocks({"type": "tool_result", "tool_use_id": "c"}),
        "messages[1].content[0].tool_use_id",
    ),
    "image in a result": (
        blocks({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image"}]}),
        "messages[1].content[0].content[0]",
    ),
    "call of the user": (blocks(USE), "messages[1].content[0]"),
    "call at the end": (blocks(USE, role="assistant"), "messages"),
    "call without an id": (
        {"messages": [{"role": "assistant", "content": [{**USE, "id": None}]}, USER]},
        "messages[0].content[0].id",
    ),
    "input a text": (blocks({**USE, "input": "{}"}, role="assistant"), "content[0].input"),
    "system a number": ({"system": 5}, "system"),
    "system image": ({"system": [{"type": "image"}]}, "system[0]"),
    "tool of the server": (tool(type="web_search_20250305"), "tools[0].type"),
    "tool without a schema": (tool(input_schema=None), "tools[0].input_schema"),
    "tool with a bad schema": (tool(input_schema={"not": {}}), "tools[0].input_schema"),
    "tool with a bad name": (tool(name="a b"), "tools[0].name"),
    "choice": ({**tool(), "tool_choice": {"type": "some"}}, "tool_choice.type"),
    "choice of no tool": ({**tool(), "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "parallel": (
        {**tool(), "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
        "tool_choice.disable_parallel_tool_use",
    ),
    "continued with tools": (
        {**tool(), "messages": [USER, {"role": "assistant", "content": "a"}]},
        "messages",
    ),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    "no budget": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    "budget of others": (
        {"thinking": {"type": "adaptive", "budget_tokens": 9}},
        "thinking.budget_tokens",
    ),
    "thinking": ({"thinking": {"type": "on"}}, "thinking.type"),
    "effort": ({"output_config": {"effort": "low"}}, "output_config.effort"),
    "two efforts": (
        {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
        "output_config.effort",
    ),
    "format": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format",
    ),
    "stops": ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    "metadata": ({"metadata": {"a": "b"}}, "metadata.a"),
    "tier": ({"service_tier": "priority"}, "service_tier"),
    "context": ({"context_management": {"edits": [{"type": "x"}]}}, "context_management"),
    "container": ({"container": "x"}, "container"),
    "n": ({"n": 2}, "n"),
}


async def test_what_cannot_be_honoured_is_refused_by_name(local) -> None:
    async with serving(local) as made:
        for name, (fields, param) in REFUSED.items():
            response = await made.public.post(PATH, json=body(**fields))
            message = check_error(response, 400, "invalid_request_error")
            assert param in message, (name, message)
        assert made.engine.num_requests == 0 and not made.process.added
