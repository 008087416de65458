"""The table in docs/api.md is the contract: every example in it is sent to a server."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NamedTuple

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from headway.server.schema.chat import ChatRequest
from headway.server.schema.completions import CompletionRequest
from headway.server.schema.fields import unsupported_fields
from headway.server.schema.messages import MessagesRequest
from headway.server.schema.responses import ResponsesRequest
from tests.conftest import ROOT
from tests.support.apps import check_error, serving

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
KINDS = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
REQUIRED: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}
PARAMS = {
    "chat": chat_create_params,
    "completions": completion_create_params,
    "responses": response_create_params,
}
BOTH = ("chat", "completions")
TOGETHER_WITH = {
    "chat": {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}},
    "completions": {"stream_options": {"stream": True}},
    "responses": {"stream_options": {"stream": True}},
    "messages": {},
}
_HARMLESS = "harmless only: "


class Row(NamedTuple):
    field: str
    endpoint: str
    outcome: str
    harmless: tuple[Any, ...]
    example: Any


def values_in(cell: str) -> list[Any]:
    return [json.loads(text) for text in re.findall(r"`([^`]*)`", cell)]


def read_table() -> list[Row]:
    text = (ROOT / "docs" / "api.md").read_text()
    tables = text.split("| Field | Endpoint |")[1:]
    lines = [line for table in tables for line in table.split("\n\n")[0].splitlines()[2:]]
    rows = []
    for line in lines:
        field, where, outcome, example, _ = [cell.strip() for cell in line.strip("|").split("|")]
        harmless = values_in(outcome) if outcome.startswith(_HARMLESS) else []
        outcome = "harmless only" if outcome.startswith(_HARMLESS) else outcome
        for endpoint in BOTH if where == "both" else [where]:
            parts = (field.strip("`"), endpoint, outcome, tuple(harmless), values_in(example)[0])
            rows.append(Row(*parts))
    return rows


TABLE = read_table()


def name_of(row: Row) -> str:
    return f"{row.endpoint}-{row.field}"


def test_the_outcomes_are_the_three_that_are_explained() -> None:
    assert {row.outcome for row in TABLE} == {"honoured", "refused", "harmless only"}


@pytest.mark.parametrize("endpoint", PATHS)
def test_the_table_names_exactly_the_fields_of_the_models(endpoint) -> None:
    find_named = [row.field for row in TABLE if row.endpoint == endpoint]
    assert sorted(find_named) == sorted(KINDS[endpoint].model_fields)


@pytest.mark.parametrize("endpoint", PARAMS)
def test_the_table_has_every_field_of_the_official_client(endpoint) -> None:
    """One the client can send and we have not thought about would be refused as a misspelling."""
    prefixes = ("CompletionCreate", "ResponseCreate")
    kinds = [kind for name, kind in vars(PARAMS[endpoint]).items() if name.startswith(prefixes)]
    known = {name for kind in kinds for name in getattr(kind, "__annotations__", {})}
    assert {"model", "stream", "stream_options"} <= known
    assert known <= {row.field for row in TABLE if row.endpoint == endpoint}


@pytest.mark.parametrize("endpoint", PATHS)
def test_the_table_says_what_is_harmless(endpoint) -> None:
    documented = {
        row.field: row.harmless
        for row in TABLE
        if row.endpoint == endpoint and row.outcome != "honoured"
    }
    marks = unsupported_fields(KINDS[endpoint])
    assert documented == {name: mark.values for name, mark in marks.items()}


def check_refusal(response: Any, endpoint: str, field: str) -> str:
    """Check that a field is refused by name; return the message."""
    if endpoint == "messages":
        assert response.status_code == 400 and response.json()["type"] == "error"
        return response.json()["error"]["message"]
    error = check_error(response, 400)
    assert error["param"] == field
    return error["message"]


async def send(made: Any, row: Row, value: Any) -> Any:
    limit = "max_output_tokens" if row.endpoint == "responses" else "max_tokens"
    more = TOGETHER_WITH[row.endpoint].get(row.field, {})
    body = {limit: 3, **REQUIRED[row.endpoint], **more}
    return await made.public.post(PATHS[row.endpoint], json={**body, row.field: value})


OWN_ROWS = [row for row in TABLE if row.endpoint in BOTH]


@pytest.mark.parametrize("row", OWN_ROWS, ids=name_of)
async def test_every_row_is_true(local, row: Row) -> None:
    async with serving(local) as made:
        await check_row(made, row)


@pytest.mark.parametrize("endpoint", ["responses", "messages"])
async def test_every_row_of_other_apis_is_true(local, endpoint: str) -> None:
    async with serving(local) as made:
        for row in TABLE:
            if row.endpoint == endpoint:
                await check_row(made, row)


async def check_row(made: Any, row: Row) -> None:
    assert (await send(made, row, None)).status_code == (
        400 if row.field in REQUIRED[row.endpoint] else 200
    )
    for value in row.harmless:
        assert (await send(made, row, value)).status_code == 200
    num_before = len(made.process.added)
    response = await send(made, row, row.example)
    if row.outcome == "honoured":
        assert response.status_code == 200, response.text
        assert len(made.process.added) > num_before
    else:
        assert row.field in check_refusal(response, row.endpoint, row.field)
    if row.field == "background":  # its response goes on after the answer
        async with asyncio.timeout(5):
            while made.engine.num_requests:
                await asyncio.sleep(0.01)
    assert made.engine.num_requests == 0


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("field", ["temprature", "guided_json", "chat_template", "", "n\n"])
async def test_an_unknown_field_is_refused(local, endpoint, field) -> None:
    async with serving(local) as made:
        body = {**REQUIRED[endpoint], field: 1}
        response = await made.public.post(PATHS[endpoint], json=body)
        assert field in check_refusal(response, endpoint, field)


async def outcome(made: Any, path: str, **body: Any) -> str:
    """The field a body is refused for; nothing was tokenized by then."""
    response = await made.public.post(path, json=body)
    return check_error(response, 400)["param"]


async def test_limits_are_checked_before_tokenization(local, monkeypatch) -> None:
    async with serving(local, max_num_samples=4, max_output_tokens_per_request=100) as made:

        def fail(*_args: Any, **_options: Any) -> None:
            pytest.fail("text was tokenized")

        monkeypatch.setattr(made.engine.tokenizer, "encode", fail)
        chat, completions = (PATHS[name] for name in BOTH)
        messages = REQUIRED["chat"]["messages"]
        for path, required in ((chat, {"messages": messages}), (completions, {"prompt": "hi"})):
            for field, value in (
                ("n", 5),
                ("max_tokens", 101),
                ("stop", ["x"] * 17),
                ("logit_bias", {str(i): 1 for i in range(1025)}),
                ("stop_token_ids", [1] * 129),
                ("temperature", 101),
            ):
                assert await outcome(made, path, **required, **{field: value}) == field
            assert await outcome(made, path, **required, n=4, max_tokens=26) == "n"
        assert await outcome(made, chat, messages=messages, top_logprobs=21) == "top_logprobs"
        name = "max_completion_tokens"
        assert await outcome(made, chat, messages=messages, **{name: 101}) == name
        assert await outcome(made, completions, prompt="hi", logprobs=21) == "logprobs"
        assert await outcome(made, completions, prompt=["hi"] * 65) == "prompt"
        assert await outcome(made, completions, prompt=["hi"] * 64, max_tokens=2) == "n"
        assert await outcome(made, completions, prompt=["hi"] * 7) == "n"  # 16 tokens by default
        assert made.process.added == []


async def test_what_is_just_within_the_limits(local) -> None:
    async with serving(local, max_num_samples=4, max_output_tokens_per_request=100) as made:
        for body in ({"n": 4, "max_tokens": 25}, {"max_tokens": 100}):
            response = await made.public.post(PATHS["completions"], json={"prompt": "x", **body})
            assert response.status_code == 200, response.text
        body = {"messages": REQUIRED["chat"]["messages"], "n": 2}  # an open end is not counted
        assert (await made.public.post(PATHS["chat"], json=body)).status_code == 200
