"""The API of this server as an OpenAPI document.

Made from the models that check request bodies, and from the facts of this server: the names and
vocabulary of its model, its limits, whether it requires keys. Rules that involve two fields are not
in the document; docs/api.md has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from headway._version import __version__
from headway.core.waiting.policies import PRIORITY_AWARE_POLICIES
from headway.server.api.batches.batches import MAX_PAGE
from headway.server.api.batches.files import MAX_PAGE as MAX_FILES_PAGE
from headway.server.api.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from headway.server.batches.records import INPUT_PURPOSE, OUTPUT_PURPOSE
from headway.server.context import ServerContext
from headway.server.http.idempotency import MAX_KEY_CHARS
from headway.server.schema import answers, other_answers
from headway.server.schema.batches import BatchRequest
from headway.server.schema.chat import ChatRequest
from headway.server.schema.completions import CompletionRequest
from headway.server.schema.embeddings import EmbeddingRequest
from headway.server.schema.messages import CountTokensRequest, MessagesRequest
from headway.server.schema.request import Fields, RequestLimits
from headway.server.schema.responses import ResponsesRequest

REQUESTS: tuple[type[Fields], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    EmbeddingRequest,
    TokenizeRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
"""Bodies of generating and tokenizing endpoints: each names a model."""
ANSWERS: tuple[type[answers.Answer], ...] = (
    answers.ErrorAnswer,
    answers.ChatCompletion,
    answers.Completion,
    other_answers.ResponseObject,
    other_answers.ResponseDeleted,
    other_answers.MessageObject,
    other_answers.InputTokens,
    other_answers.AnthropicErrorAnswer,
    answers.Embeddings,
    answers.ModelDescription,
    answers.ModelList,
    answers.Tokens,
    answers.DetokenizedText,
    answers.TokenizerInfo,
    answers.ServerLoad,
    answers.Cancelled,
    answers.Version,
    answers.Health,
    answers.Explanation,
    answers.StoredFile,
    answers.FileList,
    answers.FileDeleted,
    answers.Batch,
    answers.BatchList,
)
_REFUSALS = {
    400: "A field has a wrong value; `param` names the field.",
    401: "No valid API key.",
    403: "The tenant is disabled.",
    404: "There is no such model, or no such request.",
    409: "The request was cancelled, another one with its Idempotency-Key gets the answer, a file "
    "is in use, or a batch has ended.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "The Idempotency-Key was used with another body.",
    429: "The tenant is above a quota or a limit; Retry-After says when to try again.",
    500: "An internal error.",
    503: "The server is overloaded or has no engine; Retry-After says when to try again.",
}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer", "minimum": 0}}}
_STREAM = {
    "schema": {
        "type": "object",
        "description": "With stream: an event per chunk, its data a JSON object; then [DONE].",
        "properties": {"event": {"const": "message"}, "data": {"type": "string"}},
        "required": ["data"],
    }
}
"""One server-sent event; OpenAPI tools read the schema of a stream in this form."""

_REPEATABLE = {
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "description": "The same request again, with the same key, gets the same answer.",
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
        }
    ]
}


@dataclass(frozen=True, slots=True)
class ApiFacts:
    """Facts about one server; those of the model are 0 until it is loaded."""

    model_names: tuple[str, ...]
    limits: RequestLimits
    has_keys: bool
    has_batches: bool = False
    has_priorities: bool = False
    vocab_size: int = 0
    max_model_len: int = 0
    min_prompt_chars: int = 0


def facts_of(context: ServerContext, limits: RequestLimits, has_keys: bool) -> ApiFacts:
    """Return the facts that are known now."""
    if not context.engine.is_ready:
        return ApiFacts(context.model_names, limits, has_keys, context.batches is not None)
    info, empty = context.engine.info, context.engine.tokenizer.encode("")
    return ApiFacts(
        context.model_names,
        limits,
        has_keys,
        context.batches is not None,
        info.scheduling_policy in PRIORITY_AWARE_POLICIES,
        info.vocab_size,
        info.capacity.max_model_len,
        min_prompt_chars=0 if empty else 1,
    )


@lru_cache(maxsize=4)
def document(facts: ApiFacts) -> dict[str, Any]:
    """Return the whole document; it is cached, so the caller must not change it."""
    components: dict[str, Any] = {"schemas": _schemas(facts)}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headway", "version": __version__},
        "paths": _paths(facts),
        "components": components,
    }
    if facts.has_keys:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        result["security"] = [{"bearer": []}, {"key": []}]
    return result


def _schemas(facts: ApiFacts) -> dict[str, Any]:
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *((model, "validation") for model in (*REQUESTS, BatchRequest)),
        *((model, "validation") for model in ANSWERS),
    ]
    _, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas = _settle(definitions["$defs"], facts)
    for kind in REQUESTS:
        fields = schemas[kind.__name__]["properties"]
        fields["model"] = {"enum": [*facts.model_names, None]}
        if "stream" in fields:
            _bound(fields, facts)
    if facts.max_model_len:
        schemas["DetokenizeRequest"]["properties"]["tokens"]["maxItems"] = facts.max_model_len
    return schemas


def _bound(fields: dict[str, Any], facts: ApiFacts) -> None:
    """Write the limits of this server into their fields."""
    _set_maximum(fields, "n", facts.limits.max_num_samples)
    _set_maximum(fields, "best_of", facts.limits.max_num_samples)
    longest = facts.limits.max_output_tokens
    if facts.max_model_len:
        longest = min(longest, facts.max_model_len - 1)
    for name in ("max_tokens", "max_completion_tokens", "min_tokens", "max_output_tokens"):
        _set_maximum(fields, name, longest)
    if not facts.has_priorities:
        fields["priority"] = {"enum": [0, None]}


def _set_maximum(fields: dict[str, Any], name: str, maximum: int) -> None:
    if name in fields:
        field = fields[name]
        field.get("anyOf", [field])[0]["maximum"] = maximum


def _settle(schema: Any, facts: ApiFacts) -> Any:
    """Return a copy without titles, and with numbers in place of Headway's own formats."""
    if isinstance(schema, list):
        return [_settle(item, facts) for item in schema]
    if not isinstance(schema, dict):
        return schema
        # A title is a string; a field named title is an object and stays.
    copy = {
        name: _settle(item, facts)
        for name, item in schema.items()
        if not (name == "title" and isinstance(item, str))
    }
    kind = copy.get("format")
    if kind == "token-id":
        del copy["format"]
        copy["maximum"] = facts.vocab_size - 1 if facts.vocab_size else 2**31 - 1
    elif kind == "prompt":
        del copy["format"]
        copy["minLength"] = facts.min_prompt_chars
    return copy


def _paths(facts: ApiFacts) -> dict[str, Any]:
    every = (400, 401, 403, 500) if facts.has_keys else (400, 500)
    paths = _generation_paths((*every, 404, 413, 415, 503)) | _info_paths(every, facts)
    paths |= _response_paths((*every, 404))
    return {**paths, **_batch_paths(every)} if facts.has_batches else paths


def _generation_paths(refusals: tuple[int, ...]) -> dict[str, Any]:
    """Return the paths with a request body."""
    generating = _error_response(*refusals, 409, 422, 429)
    anthropic = _error_response(*refusals, 409, 422, 429, kind=other_answers.AnthropicErrorAnswer)
    chat = _post_operation("Answer a conversation.", ChatRequest)
    completion = _post_operation("Continue one prompt or several.", CompletionRequest)
    embedding = _post_operation("Embed one text or several.", EmbeddingRequest)
    tokenize = _post_operation("Text to token ids.", TokenizeRequest, TokenizeChatRequest)
    detokenize = _post_operation("Token ids to text.", DetokenizeRequest)
    operations = {
        "/v1/chat/completions": chat
        | _responses(generating, answers.ChatCompletion, _STREAM)
        | _REPEATABLE,
        "/v1/completions": completion
        | _responses(generating, answers.Completion, _STREAM)
        | _REPEATABLE,
        "/v1/responses": _post_operation("Answer items.", ResponsesRequest)
        | _responses(generating, other_answers.ResponseObject, _STREAM)
        | _REPEATABLE,
        "/v1/messages": _post_operation("Answer a conversation.", MessagesRequest)
        | _responses(anthropic, other_answers.MessageObject, _STREAM)
        | _REPEATABLE,
        "/v1/messages/count_tokens": _post_operation("Count tokens.", CountTokensRequest)
        | _responses(
            _error_response(*refusals, kind=other_answers.AnthropicErrorAnswer),
            other_answers.InputTokens,
        ),
        "/v1/embeddings": embedding
        | _responses(_error_response(*refusals, 409, 429), answers.Embeddings),
        "/tokenize": tokenize | _responses(_error_response(*refusals), answers.Tokens),
        "/detokenize": detokenize | _responses(_error_response(*refusals), answers.DetokenizedText),
    }
    return {path: {"post": operation} for path, operation in operations.items()}


def _info_paths(every: tuple[int, ...], facts: ApiFacts) -> dict[str, Any]:
    """Return the paths without a request body."""
    name = {"type": "string", "enum": list(facts.model_names)}
    by_name = {"name": "name", "in": "path", "required": True, "schema": name}
    model = _get_operation(
        "One model by its name, which may contain slashes.",
        answers.ModelDescription,
        (*every, 404),
    )
    by_id = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}
    reason = "What happened to a request of this client, by its id or its X-Request-Id."
    explained = _get_operation(reason, answers.Explanation, (*every, 404, 503))
    status = _success_response(answers.Health)
    either = {"200": status, "503": status}
    empty = {"200": {"description": "Ready."}, "503": {"description": "Not ready."}}
    document = {"application/json": {"schema": {"type": "object"}}}
    whole = {"200": {"description": "The document.", "content": document}}
    refused = _error_response(*every)
    operations = {
        "/v1/models": _get_operation("The names of the model.", answers.ModelList, every),
        "/v1/models/{name}": {**model, "parameters": [by_name]},
        "/v1/requests/{request_id}/explanation": {**explained, "parameters": [by_id]},
        "/v1/streams/{request_id}": {**_resumed(every), "parameters": [by_id]},
        "/version": _get_operation("The release.", answers.Version, every),
        "/health/live": {
            **_info_operation("Whether the process answers.", either | _error_response(500)),
            "security": [],
        },
        "/health/ready": {
            **_info_operation("Whether requests are accepted.", either | _error_response(500)),
            "security": [],
        },
        "/health": _info_operation("The same, by the status code alone.", refused | empty),
        "/ping": _info_operation("The same as /health.", refused | empty),
        "/load": _get_operation("The load of this server.", answers.ServerLoad, every),
        "/tokenizer_info": _get_operation("The tokenizer.", answers.TokenizerInfo, every),
        "/openapi.json": _info_operation("This document.", refused | whole),
    }
    paths = {path: {"get": operation} for path, operation in operations.items()}
    cancel = _get_operation("Cancel a request of this client.", answers.Cancelled, (*every, 404))
    return paths | {"/v1/requests/{request_id}": {"delete": {**cancel, "parameters": [by_id]}}}


def _response_paths(found: tuple[int, ...]) -> dict[str, Any]:
    """Return the paths of background responses."""
    flag, kind = {"enum": ["true", "false"]}, other_answers.ResponseObject
    by_id = _parameter("response_id", "path", {"type": "string"}, is_required=True)
    query = [
        _parameter("stream", "query", flag),
        _parameter("starting_after", "query", {"type": "integer", "minimum": 0}),
        _parameter("include_obfuscation", "query", {"const": "false"}),
    ]
    answered = _responses(_error_response(*found), kind, _STREAM)
    cancel = _get_operation("Cancel a background response.", kind, found)
    deleted = other_answers.ResponseDeleted
    delete = _get_operation("End and forget a background response.", deleted, found)
    return {
        "/v1/responses/{response_id}": {
            "get": {"summary": "A background response.", **answered, "parameters": [by_id, *query]},
            "delete": {**delete, "parameters": [by_id]},
        },
        "/v1/responses/{response_id}/cancel": {"post": {**cancel, "parameters": [by_id]}},
    }


def _batch_paths(every: tuple[int, ...]) -> dict[str, Any]:
    """Return the paths of files and batches."""

    def by_id(name: str) -> dict[str, Any]:
        return {"parameters": [_parameter(name, "path", {"type": "string"}, is_required=True)]}

    storing, found = (*every, 413, 415, 429, 503), (*every, 404)
    text = {"type": "string"}
    file_page = [
        _parameter("purpose", "query", {"enum": [INPUT_PURPOSE, OUTPUT_PURPOSE]}),
        _parameter("order", "query", {"enum": ["asc", "desc"]}),
        _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_FILES_PAGE}),
        _parameter("after", "query", text),
    ]
    batch_page = [
        _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}),
        _parameter("after", "query", text),
    ]
    form = {
        "type": "object",
        "required": ["file", "purpose"],
        "properties": {"file": {"type": "string", "format": "binary"}, "purpose": text},
    }
    upload = {
        **_get_operation("Upload a file.", answers.StoredFile, storing),
        "requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}},
    }
    lines = {"200": {"description": "The file.", "content": {"application/jsonl": {}}}}
    content = _info_operation("The content of a file.", lines | _error_response(*found, 429, 503))
    create = _post_operation("Start a batch.", BatchRequest)
    delete = _get_operation("Delete a file.", answers.FileDeleted, (*found, 409, 503))
    cancel = _get_operation("Cancel a batch.", answers.Batch, (*found, 409, 503))
    files = _get_operation("Files of this client.", answers.FileList, every)
    batches = _get_operation("Batches of this client.", answers.BatchList, every)
    return {
        "/v1/files": {"post": upload, "get": {**files, "parameters": file_page}},
        "/v1/files/{file_id}": {
            "get": _get_operation("One file.", answers.StoredFile, found) | by_id("file_id"),
            "delete": delete | by_id("file_id"),
        },
        "/v1/files/{file_id}/content": {"get": content | by_id("file_id")},
        "/v1/batches": {
            "post": create | _responses(_error_response(*storing), answers.Batch),
            "get": {**batches, "parameters": batch_page},
        },
        "/v1/batches/{batch_id}": {
            "get": _get_operation("One batch.", answers.Batch, found) | by_id("batch_id")
        },
        "/v1/batches/{batch_id}/cancel": {"post": cancel | by_id("batch_id")},
    }


def _parameter(
    name: str, place: str, schema: Mapping[str, Any], is_required: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": place, "required": is_required, "schema": schema}


def _resumed(every: tuple[int, ...]) -> dict[str, Any]:
    content = {"text/event-stream": _STREAM}
    answered = {"200": {"description": "The events after Last-Event-ID.", "content": content}}
    refused = _error_response(*every, 404, 429, 503)
    return _info_operation("The rest of a resumable stream.", answered | refused)


def _info_operation(summary: str, responses: Mapping[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": responses}


def _post_operation(summary: str, *kinds: type[Fields]) -> dict[str, Any]:
    schemas = [_ref(kind) for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content = {"application/json": {"schema": schema}}
    return {"summary": summary, "requestBody": {"required": True, "content": content}}


def _get_operation(
    summary: str, kind: type[answers.Answer], refusals: tuple[int, ...]
) -> dict[str, Any]:
    return {"summary": summary, **_responses(_error_response(*refusals), kind)}


def _responses(
    refusals: Mapping[str, Any],
    kind: type[answers.Answer],
    stream: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    answered = _success_response(kind)
    if stream is not None:
        answered["content"]["text/event-stream"] = stream
    return {"responses": {"200": answered, **refusals}}


def _success_response(kind: type[answers.Answer]) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(kind)}}
    return {"description": (kind.__doc__ or "").replace("\n    ", " "), "content": content}


def _error_response(
    *statuses: int, kind: type[answers.Answer] = answers.ErrorAnswer
) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref(kind)}}
    return {
        str(status): {
            "description": _REFUSALS[status],
            "content": content,
            **({"headers": _RETRY_AFTER} if status in (429, 503) else {}),
        }
        for status in sorted(statuses)
    }


def _ref(kind: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
