"""The OpenAPI document: valid, complete, and true of real requests and answers."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from headway.server.app import BATCH_PATHS, UNSUPPORTED_PATHS
from headway.server.schema.chat import ChatRequest
from headway.server.schema.request import DEFAULT_LIMITS
from headway.server.schema.sampling import TOKEN_ID
from tests.server.schema.test_request import REFUSED_BY_BOTH
from tests.server.test_contract import (
    BOTH,
    KINDS,
    OWN_ROWS,
    REQUIRED,
    TABLE,
    TOGETHER_WITH,
    Row,
    name_of,
)
from tests.support.apps import routes_of, serving

SCHEMAS = {name: kind.__name__ for name, kind in KINDS.items()}
MESSAGES = [{"role": "user", "content": "hi"}]


async def document_of(local: Any, **config: Any) -> dict[str, Any]:
    async with serving(local, **config) as made:
        return (await made.public.get("/openapi.json")).json()


def validator(document: dict[str, Any], name: str) -> Any:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(schema)


async def test_every_schema_is_valid_and_every_reference_leads_somewhere(local) -> None:
    document = await document_of(local)
    for name in document["components"]["schemas"]:
        jsonschema_rs.meta.validate(document["components"]["schemas"][name])
        validator(document, name)
    text = json.dumps(document)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(document["components"]["schemas"])
    assert not any(word in text for word in ("token-id", '"prompt", "minLength"', "$defs"))


async def test_it_has_every_route_of_the_public_app(local) -> None:
    async with serving(local) as made:
        document = (await made.public.get("/openapi.json")).json()
        documented = {
            (method.upper(), path) for path, item in document["paths"].items() for method in item
        }
        routes = {
            (method, path.replace(":path}", "}"))
            for method, path in routes_of(made.apps.public)
            if path not in UNSUPPORTED_PATHS and not path.startswith(BATCH_PATHS)
            if path not in made.files
        }
        assert documented == routes


async def test_keys_are_in_it_if_they_are_asked_for(local) -> None:
    document = await document_of(local)
    assert "security" not in document
    assert "401" not in document["paths"]["/v1/models"]["get"]["responses"]
    async with serving(local, api_key=("k",)) as made:
        response = await made.public.get("/openapi.json", headers={"Authorization": "Bearer k"})
    document = response.json()
    assert document["security"] == [{"bearer": []}, {"key": []}]
    for probe in ("/health/live", "/health/ready"):
        assert document["paths"][probe]["get"]["security"] == []
    assert "401" in document["paths"]["/v1/models"]["get"]["responses"]


async def test_it_tells_the_limits_of_this_server(local) -> None:
    fields = (await document_of(local, max_num_samples=3))["components"]["schemas"]["ChatRequest"][
        "properties"
    ]
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 3}
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == 199
    assert fields["model"] == {"enum": ["tiny", "alias/tiny", None]}
    assert fields["priority"] == {"enum": [0, None]}
    ids = fields["stop_token_ids"]["anyOf"][0]["items"]
    assert ids == {"type": "integer", "minimum": 0, "maximum": 274}
    loading = await document_of(local, is_started=False)
    fields = loading["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["max_tokens"]["anyOf"][0]["maximum"] == DEFAULT_LIMITS.max_output_tokens
    waiting = await document_of(local, policy="priority")
    fields = waiting["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["priority"]["anyOf"][0]["maximum"] == 2**63 - 1


def test_making_it_changes_no_model() -> None:
    assert TOKEN_ID == {"type": "integer", "minimum": 0, "format": "token-id"}
    assert "maximum" not in ChatRequest.model_json_schema()["properties"]["n"]["anyOf"][0]


@pytest.mark.parametrize("row", OWN_ROWS, ids=name_of)
async def test_it_agrees_with_the_contract(local, row: Row) -> None:
    check_row(await document_of(local), row)


async def test_it_agrees_with_the_contract_of_other_apis(local) -> None:
    document = await document_of(local)
    for row in TABLE:
        check_row(document, row)


def check_row(document: dict[str, Any], row: Row) -> None:
    schema = validator(document, SCHEMAS[row.endpoint])
    body = {**REQUIRED[row.endpoint], **TOGETHER_WITH[row.endpoint].get(row.field, {})}
    for value in row.harmless:
        assert schema.is_valid({**body, row.field: value})
    assert schema.is_valid({**body, row.field: row.example}) == (row.outcome == "honoured")
    is_required = row.field in REQUIRED[row.endpoint]
    assert schema.is_valid({**body, row.field: None}) != is_required


# JSON Schema counts 1.0 as an integer, and the document ties no two fields together.
BEYOND_IT = [("n", float), ("stream_options", dict)]
IN_IT = [case[:2] for case in REFUSED_BY_BOTH if (case[0], type(case[1])) not in BEYOND_IT]


@pytest.mark.parametrize(("name", "value"), IN_IT)
async def test_what_is_refused_is_not_in_it(local, name, value) -> None:
    document = await document_of(local)
    for endpoint in BOTH:
        body = {**REQUIRED[endpoint], name: value}
        assert not validator(document, SCHEMAS[endpoint]).is_valid(body)


@pytest.mark.parametrize(
    ("method", "path", "body", "schema"),
    [
        ("POST", "/v1/chat/completions", {"messages": MESSAGES}, "ChatCompletion"),
        (
            "POST",
            "/v1/chat/completions",
            {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
            "ChatCompletion",
        ),
        ("POST", "/v1/chat/completions", {"messages": []}, "ErrorAnswer"),
        ("POST", "/v1/completions", {"prompt": "x", "n": 2}, "Completion"),
        ("POST", "/v1/completions", {"prompt": "x", "logprobs": 2}, "Completion"),
        ("POST", "/v1/completions", {"prompt": "x", "model": "y"}, "ErrorAnswer"),
        ("POST", "/v1/responses", {"input": "x"}, "ResponseObject"),
        ("POST", "/v1/responses", {"input": "x", "top_logprobs": 2}, "ResponseObject"),
        ("POST", "/v1/responses", {"input": "x", "max_output_tokens": 1}, "ResponseObject"),
        ("POST", "/v1/responses", {"input": []}, "ErrorAnswer"),
        ("POST", "/v1/messages", {"messages": MESSAGES, "max_tokens": 9}, "MessageObject"),
        ("POST", "/v1/messages", {"messages": MESSAGES}, "AnthropicErrorAnswer"),
        ("POST", "/v1/messages/count_tokens", {"messages": MESSAGES}, "InputTokens"),
        ("GET", "/v1/models", None, "ModelList"),
        ("GET", "/v1/models/tiny", None, "ModelDescription"),
        ("POST", "/tokenize", {"prompt": "x"}, "Tokens"),
        ("POST", "/tokenize", {"prompt": "x", "return_token_strs": True}, "Tokens"),
        ("POST", "/detokenize", {"tokens": [1]}, "DetokenizedText"),
        ("GET", "/version", None, "Version"),
        ("GET", "/health/live", None, "Health"),
        ("GET", "/health/ready", None, "Health"),
    ],
)
async def test_real_answers_are_as_it_says(local, method, path, body, schema) -> None:
    async with serving(local) as made:
        document = (await made.public.get("/openapi.json")).json()
        response = await made.public.request(method, path, json=body)
        answer = response.json()
    validator(document, schema).validate(answer)
    # The document must list every field of an answer.
    assert set(answer) <= set(document["components"]["schemas"][schema]["properties"])
    listed = path.replace("/tiny", "/{name}")
    responses = document["paths"][listed][method.lower()]["responses"]
    assert responses[str(response.status_code)]["content"]["application/json"]
