"""Tool calls and reasoning over a scripted engine: answers, streams that resume, refusals."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from headway.core.request import FinishReason
from headway.engine.client.streams import RequestStream
from headway.engine.client.transcript import Cursor
from headway.engine.process.messages import Handover, SampleRecord
from headway.server.api.generate.adopted import adopt_stream
from headway.server.api.streams import ENDPOINTS
from headway.text.thinking import budget_of
from headway.text.tools.forms import FORMS
from tests.server.api.test_answer import events_of
from tests.server.api.test_streams import Reader, choices
from tests.support.apps import FIXED_ID, check_error, serving
from tests.support.local_engine import TEMPLATE

CHAT = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [ADD, NOW]
CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
SCRIPT = f"So:\n{CALLS}"
THINKS = TEMPLATE + "{% if enable_thinking is false %}</think>{% endif %}"
JSON_OBJECT = {"type": "json_object"}
OPTIONS = {"include_usage": True, "resumable": True}


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "tools": TOOLS, **fields}


def prompt_of(made: Any) -> str:
    """The text of the last prompt that the engine got."""
    token_ids = made.process.added[-1].token_ids
    return made.engine.tokenizer.decode(token_ids, skip_special_tokens=False)


def message_of(choice_list: list[Any]) -> dict[str, Any]:
    """The message that the deltas of one choice add up to, by the rules of the OpenAI API."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for choice in choice_list:
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            for part in value:
                if part["index"] == len(calls):
                    assert part["id"] and part["type"] == "function" and part["function"]["name"]
                    calls.append({**part, "function": dict(part["function"])})
                else:
                    assert set(part) == {"index", "function"}
                    assert set(part["function"]) == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    ends = [one["finish_reason"] for one in choice_list if one["finish_reason"]]
    assert len(ends) == 1
    for call in calls:
        del call["index"]
    return {**message, "tool_calls": calls, "end": ends[0]}


async def test_whole_answers(local) -> None:
    async with serving(local, SCRIPT) as made:
        answer = (await made.public.post(CHAT, json=body(n=2))).json()
        ids = []
        for choice in answer["choices"]:
            calls = choice["message"].pop("tool_calls")
            assert choice["message"] == {"role": "assistant", "content": "So:", "refusal": None}
            assert [one["function"] for one in calls] == [
                {"name": "add", "arguments": '{"a": 1}'},
                {"name": "now", "arguments": "{}"},
            ]
            assert choice["finish_reason"] == "tool_calls"
            ids += [one["id"] for one in calls]
        assert len(set(ids)) == 4
        answer = (await made.public.post(CHAT, json=body(max_tokens=15))).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length" and "tool_calls" not in choice["message"]
        content = choice["message"]["content"]
        assert SCRIPT.startswith(content) and "<tool_call>" in content
    async with serving(local, CALLS) as made:
        answer = (await made.public.post(CHAT, json=body(max_tokens=45))).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert '{"a": 1}'.startswith(call["function"]["arguments"])
        answer = (await made.public.post(CHAT, json=body(tools=None))).json()
        assert answer["choices"][0]["message"]["content"] == CALLS  # nobody asked for calls


async def test_streams_add_up_to_whole_answers(local) -> None:
    for script in (SCRIPT, CALLS, "No call <tool", "", SCRIPT[:40]):
        async with serving(local, script) as made:
            whole = (await made.public.post(CHAT, json=body(n=2))).json()
            response = await made.public.post(CHAT, json=body(n=2, stream=True))
            events = [("", one) for one in events_of(response.text)]
            for index, choice in enumerate(whole["choices"]):
                streamed = message_of(choices(events, index))
                message = choice["message"]
                assert streamed["end"] == choice["finish_reason"]
                assert streamed["content"] == (message["content"] or "")
                assert streamed["tool_calls"] == message.get("tool_calls", [])


async def test_the_clients_own_helper_rebuilds_each_call(local) -> None:
    async with serving(local, SCRIPT) as made:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=made.public
        )
        asked = client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=TOOLS)
        async with asked as stream:
            final = await stream.get_final_completion()
        message = final.choices[0].message
        assert message.content == "So:" and final.choices[0].finish_reason == "tool_calls"
        found = [(one.function.name, one.function.arguments) for one in message.tool_calls or []]
        assert found == [("add", '{"a": 1}'), ("now", "{}")]


async def test_a_resumed_stream_has_the_same_calls(local) -> None:
    """After whichever event, also within a marker, a name or the arguments."""
    async with serving(local, SCRIPT) as made:
        asked = body(n=2, stream=True, stream_options=OPTIONS)
        whole = Reader(made.apps.public, CHAT, asked)
        await whole.end()
        everything = whole.events
        expected = [message_of(choices(everything, index)) for index in range(2)]
        for number, (name, _) in enumerate(everything[:-1]):
            rest = Reader(made.apps.public, f"/v1/streams/chatcmpl-{FIXED_ID}?after={name}")
            await rest.end()
            joined = everything[: number + 1] + rest.events
            assert [message_of(choices(joined, index)) for index in range(2)] == expected


@pytest.mark.parametrize("form", ["hermes", "qwen-xml"])
async def test_another_frontend_writes_the_same_calls(local, form: str) -> None:
    """It has the note and the params of the request, and the tokens; never the body."""
    script = CALLS
    if form == "qwen-xml":
        script = '<tool_call>\n<function=say>\n<parameter=a>\nx"y\n</parameter>\n</function>'
        script += "\n</tool_call>"
    say = {"name": "say", "parameters": {"properties": {"a": {"type": "string"}}}}
    tools = [*TOOLS, {"type": "function", "function": say}]
    async with serving(local, script, tool_call_parser=form) as made:
        asked = body(tools=tools, stream=True, stream_options=OPTIONS)
        whole = Reader(made.apps.public, CHAT, asked)
        await whole.end()
        expected = message_of(choices(whole.events))
        assert expected["end"] == "tool_calls"
        (command,) = made.process.added
        made.context.streams._streams.clear()
        token_ids = [*script.encode(), made.engine.tokenizer.eos_token_ids[0]]
        handover = Handover(
            command.id, command, [SampleRecord(0, token_ids, None, FinishReason.STOP)], 0
        )
        for number in range(0, len(whole.events) - 2, 7):
            found = RequestStream.adopt(handover, made.engine.tokenizer, 0.0)
            stream = await adopt_stream(made.context, found, ENDPOINTS, lambda: None)
            assert stream is not None
            cursor = Cursor.parse(whole.events[number][0].rpartition(".")[2])
            assert cursor is not None
            reader = await made.context.streams.attach(stream, cursor)
            assert reader is not None
            rest = b"".join([event async for event in stream.events(reader, cursor)]).decode()
            data = [line[6:] for line in rest.splitlines() if line.startswith("data: {")]
            joined = whole.events[: number + 1] + [("", json.loads(line)) for line in data]
            assert message_of(choices(joined)) == expected


async def test_reasoning_is_a_field_of_its_own(local) -> None:
    script = f"<think>\nhm </think>\n{SCRIPT}"
    for field in ("reasoning_content", "reasoning"):
        async with serving(local, script, template=THINKS, reasoning_field=field) as made:
            answer = (await made.public.post(CHAT, json=body())).json()
            (choice,) = answer["choices"]
            assert choice["message"][field] == "hm" and choice["message"]["content"] == "So:"
            assert len(choice["message"]["tool_calls"]) == 2
            others = {"reasoning", "reasoning_content"} - {field}
            assert not others & set(choice["message"])
            response = await made.public.post(CHAT, json=body(stream=True))
            streamed = message_of(choices([("", one) for one in events_of(response.text)]))
            assert streamed[field] == "hm" and streamed["content"] == "So:"
            answer = (await made.public.post(CHAT, json=body(max_tokens=10))).json()
            message = answer["choices"][0]["message"]
            assert message["content"] is None and message[field].startswith("hm")
    async with serving(local, "no thought", template=THINKS) as made:
        answer = (await made.public.post(CHAT, json=body(tools=None))).json()
        assert answer["choices"][0]["message"] == {
            "role": "assistant",
            "content": "no thought",
            "refusal": None,
        }


async def test_efforts_reach_the_template_or_are_refused(local) -> None:
    async with serving(local, template=THINKS) as made:
        for effort, is_off in (("none", True), ("minimal", True), ("low", False), (None, False)):
            response = await made.public.post(CHAT, json=body(tools=None, reasoning_effort=effort))
            assert response.status_code == 200
            assert prompt_of(made).endswith("</think>") is is_off
        both = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}
        response = await made.public.post(CHAT, json=body(**both))
        assert check_error(response, 400)["param"] == "reasoning_effort"
    async with serving(local) as made:
        response = await made.public.post(CHAT, json=body(reasoning_effort="low"))
        assert check_error(response, 400)["param"] == "reasoning_effort"


async def test_a_budget_of_reasoning_is_a_note_of_the_grammar(local) -> None:
    async with serving(local, "a", template=THINKS) as made:
        for fields in ({}, {"tools": None}, {"tools": None, "response_format": JSON_OBJECT}):
            asked = body(thinking_token_budget=9, **fields)
            assert (await made.public.post(CHAT, json=asked)).status_code == 200
            budget = budget_of(made.process.added[-1].params.grammar)
            assert budget is not None and budget.max_tokens == 9
            assert made.engine.tokenizer.decode(budget.close_ids) == "</think>"
        response = await made.public.post(CHAT, json=body(thinking_token_budget=-1))
        assert check_error(response, 400)["param"] == "thinking_token_budget"
    async with serving(local) as made:
        for fields in ({}, {"tools": None}):
            response = await made.public.post(CHAT, json=body(thinking_token_budget=9, **fields))
            assert check_error(response, 400)["param"] == "thinking_token_budget"


async def test_the_template_sees_the_tools_that_may_be_called(local) -> None:
    async with serving(local, CALLS) as made:
        for fields, has_tools in (
            ({}, True),
            ({"tool_choice": "none"}, False),
            ({"tools": []}, False),
            ({"tool_choice": "required"}, True),
        ):
            assert (await made.public.post(CHAT, json=body(**fields))).status_code == 200
            assert prompt_of(made).startswith("2 tools ") is has_tools
            assert (made.process.added[-1].params.grammar is not None) is has_tools


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}, **more}


def allowed(mode: Any, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


async def test_what_a_reply_may_call(local) -> None:
    async with serving(local, CALLS) as made:
        for choice, parallel, names, has_text, has_several in (
            ("auto", None, {"add", "now"}, True, True),
            ("auto", False, {"add", "now"}, True, False),
            ("required", True, {"add", "now"}, False, True),
            (named("now"), True, {"now"}, False, False),
            (allowed("auto", named("add")), None, {"add"}, True, True),
            (allowed("required", named("now"), named("now")), None, {"now"}, False, True),
        ):
            asked = body(tool_choice=choice, parallel_tool_calls=parallel)
            assert (await made.public.post(CHAT, json=asked)).status_code == 200
            grammar = made.process.added[-1].params.grammar or ""
            assert {name for name in ("add", "now") if f'"{name}\\"' in grammar} == names
            assert ("FREE" in grammar, "{0,31}" in grammar) == (has_text, has_several)


def function(name: Any = "f", parameters: Any = None, **more: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "parameters": parameters, **more}}
    return {"tools": [ADD, made]}


def calls(**fields: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, fields]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"tools": "all"}, "tools"),
    "no type": ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    "web search": ({"tools": [{**named("f"), "type": "web_search"}]}, "tools[0].type"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "unknown key": ({"tools": [named("f", extra=1)]}, "tools[0].extra"),
    "129 tools": ({"tools": [named(f"f{at}") for at in range(129)]}, "tools"),
    "same name": ({"tools": [ADD, ADD]}, "tools[1].function.name"),
    "empty name": (function(""), "tools[1].function.name"),
    "long name": (function("a" * 65), "tools[1].function.name"),
    "name with a dot": (function("a.b"), "tools[1].function.name"),
    "name with a quote": (function('a"b'), "tools[1].function.name"),
    "name with a line break": (function("a\n"), "tools[1].function.name"),
    "name a number": (function(5), "tools[1].function.name"),
    "parameters a list": (function(parameters=[]), "tools[1].function.parameters"),
    "parameters no object": (
        function(parameters={"type": "string"}),
        "tools[1].function.parameters",
    ),
    "unsupported keyword": (function(parameters={"not": {}}), "tools[1].function.parameters"),
    "remote reference": (
        function(parameters={"properties": {"a": {"$ref": "http://x/y"}}}),
        "tools[1].function.parameters",
    ),
    "too many properties": (
        function(parameters={"properties": {str(at): {} for at in range(251)}}),
        "tools[1].function.parameters",
    ),
    "unknown choice": ({"tool_choice": "any"}, "tool_choice"),
    "choice a number": ({"tool_choice": 1}, "tool_choice"),
    "choice of nothing": ({"tool_choice": {}}, "tool_choice"),
    "choice of an unknown tool": ({"tool_choice": named("g")}, "tool_choice"),
    "choice with more": ({"tool_choice": named("now", extra=1)}, "tool_choice"),
    "required without tools": ({"tool_choice": "required", "tools": None}, "tool_choice"),
    "named without tools": ({"tool_choice": named("now"), "tools": []}, "tool_choice"),
    "allowed without a mode": (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": []}}},
        "tool_choice.allowed_tools",
    ),
    "allowed none": ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    "allowed another mode": (
        {"tool_choice": allowed("all", named("now"))},
        "tool_choice.allowed_tools",
    ),
    "allowed a text": ({"tool_choice": allowed("auto", "now")}, "tool_choice"),
    "parallel a number": ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    "effort unknown": ({"reasoning_effort": "most"}, "reasoning_effort"),
    "structured outputs": ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "a continued message": (
        {**message(role="assistant", content="a"), "continue_final_message": True},
        "continue_final_message",
    ),
    "no generation prompt": ({"add_generation_prompt": False}, "add_generation_prompt"),
    "min_tokens": ({"min_tokens": 2}, "min_tokens"),
    "ignore_eos": ({"ignore_eos": True}, "ignore_eos"),
    "a call without an id": (calls(id=""), "messages[1].tool_calls[0].id"),
    "a call of another type": (calls(type="custom"), "messages[1].tool_calls[0].type"),
    "arguments no JSON": (
        calls(function={"name": "f", "arguments": "{"}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "arguments a list": (
        calls(function={"name": "f", "arguments": "[]"}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "arguments an object": (
        calls(function={"name": "f", "arguments": {}}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "arguments too deep": (
        calls(function={"name": "f", "arguments": '{"a":' * 40 + "1" + "}" * 40}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "calls of the user": (
        message(role="user", content="a", tool_calls=[{"id": "c", **named("f")}]),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "reasoning of the user": (
        message(role="user", content="a", reasoning="b"),
        "messages[1].reasoning",
    ),
    "a result without an id": (message(role="tool", content="a"), "messages[1].tool_call_id"),
    "a result of no call": (
        message(role="tool", content="a", tool_call_id="c"),
        "messages[1].tool_call_id",
    ),
    "an id elsewhere": (
        message(role="user", content="a", tool_call_id="c"),
        "messages[1].tool_call_id",
    ),
    "no content": (message(role="assistant", content=None), "messages[1].content"),
}


async def test_what_cannot_be_honoured_is_refused_by_name(local) -> None:
    async with serving(local, CALLS) as made:
        for name, (fields, param) in REFUSED.items():
            response = await made.public.post(CHAT, json=body(**fields))
            assert response.status_code == 400, name
            error = check_error(response, 400)
            assert error["param"] == param, (name, error)
        assert not made.process.added
        response = await made.public.post(CHAT, json=body(**function("bad", {"not": {}})))
        assert 'of bad cannot be honoured: Unimplemented keys: ["not"]' in response.text.replace(
            "\\", ""
        )


async def test_histories_of_calls_are_accepted(local) -> None:
    past = [{"id": f"c{at}", **named("now")} for at in range(2)]
    for call in past:
        call["function"]["arguments"] = ""
    for content in (None, "", "Well."):
        for result in ("x", [{"type": "text", "text": "x"}]):
            history = [
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": content,
                    "tool_calls": past,
                    "reasoning": "b",
                    "annotations": [],
                    "refusal": None,
                },
                *({"role": "tool", "tool_call_id": f"c{at}", "content": result} for at in range(2)),
            ]
            async with serving(local, "ok") as made:
                response = await made.public.post(CHAT, json=body(messages=history))
                assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", [name for name in FORMS if name != "mistral-args"])
async def test_every_setting_serves(local, name: str) -> None:
    async with serving(local, "text", tool_call_parser=name) as made:
        response = await made.public.post(CHAT, json=body())
        assert response.json()["choices"][0]["message"]["content"] == "text"
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        response = await made.public.post(CHAT, json=body(response_format=schema))
        if name == "llama":
            assert check_error(response, 400)["param"] == "response_format"
        else:
            assert response.status_code == 200
