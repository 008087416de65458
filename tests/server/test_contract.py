"""The table in docs/api.md is the contract: every example in it is sent to a server."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from headway.server.schema.chat import ChatRequest
from headway.server.schema.completions import CompletionRequest
from headway.server.schema.fields import unsupported_fields
from tests.conftest import ROOT
from tests.support.apps import check_error, serving

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
KINDS = {"chat": ChatRequest, "completions": CompletionRequest}
REQUIRED = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
}
TOGETHER_WITH = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
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
    lines = text[text.index("| Field | Endpoint |") :].split("\n\n")[0].splitlines()[2:]
    rows = []
    for line in lines:
        field, where, outcome, example, _ = [cell.strip() for cell in line.strip("|").split("|")]
        harmless = values_in(outcome) if outcome.startswith(_HARMLESS) else []
        outcome = "harmless only" if outcome.startswith(_HARMLESS) else outcome
        for endpoint in PATHS if where == "both" else [where]:
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


@pytest.mark.parametrize("endpoint", PATHS)
def test_the_table_has_every_field_of_the_official_client(endpoint) -> None:
    """One the client can send and we have not thought about would be refused as a misspelling."""
    params = chat_create_params if endpoint == "chat" else completion_create_params
    kinds = [value for name, value in vars(params).items() if name.startswith("CompletionCreate")]
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


async def send(made: Any, row: Row, value: Any) -> Any:
    body = {"max_tokens": 3, **REQUIRED[row.endpoint], **TOGETHER_WITH.get(row.field, {})}
    return await made.public.post(PATHS[row.endpoint], json={**body, row.field: value})


@pytest.mark.parametrize("row", TABLE, ids=name_of)
async def test_every_row_is_true(local, row: Row) -> None:
    async with serving(local) as made:
        assert (await send(made, row, None)).status_code == (
            400 if row.field in REQUIRED[row.endpoint] else 200
        )
        for value in row.harmless:
            assert (await send(made, row, value)).status_code == 200
        response = await send(made, row, row.example)
        if row.outcome == "honoured":
            assert response.status_code == 200, response.text
            assert made.process.added
        else:
            error = check_error(response, 400)
            assert error["param"] == row.field and row.field in error["message"]
        assert made.engine.num_requests == 0


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("field", ["temprature", "guided_json", "chat_template", "", "n\n"])
async def test_an_unknown_field_is_refused(local, endpoint, field) -> None:
    async with serving(local) as made:
        body = {**REQUIRED[endpoint], field: 1}
        response = await made.public.post(PATHS[endpoint], json=body)
        assert check_error(response, 400)["param"] == field


async def outcome(made: Any, path: str, **body: Any) -> str:
    """The field a body is refused for; nothing was tokenized by then."""
    response = await made.public.post(path, json=body)
    return check_error(response, 400)["param"]


async def test_limits_are_checked_before_tokenization(local, monkeypatch) -> None:
    async with serving(local, max_num_samples=4, max_output_tokens_per_request=100) as made:

        def fail(*_args: Any, **_options: Any) -> None:
            pytest.fail("text was tokenized")

        monkeypatch.setattr(made.engine.tokenizer, "encode", fail)
        chat, completions = PATHS.values()
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
