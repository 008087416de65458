"""Requests made from the server's own document, a few of each kind. `run_bad_inputs` makes more."""

from __future__ import annotations

import copy

import pytest

from benchmarks.faults.cases import COMPLETIONS, Target
from benchmarks.faults.schema_fuzz import NoDocument, fetch_document, fuzz

NUM_EXAMPLES = 15


def test_answers_keep_to_the_document(target: Target) -> None:
    result = fuzz(target, fetch_document(target), NUM_EXAMPLES)
    assert not result.failures
    assert result.num_operations >= 8
    assert result.num_requests >= 4 * NUM_EXAMPLES


def test_an_invalid_body_above_the_limit_may_be_refused_for_its_size(target: Target) -> None:
    document = copy.deepcopy(fetch_document(target))
    document["paths"] = {"/tokenize": document["paths"]["/tokenize"]}
    large = {"type": "string", "const": "x" * target.max_body_bytes}
    body = {"type": "object", "required": ["text", "n"], "properties": {"text": large}}
    body["properties"]["n"] = {"type": "integer"}
    operation = document["paths"]["/tokenize"]["post"]
    operation["requestBody"]["content"] = {"application/json": {"schema": body}}
    assert not fuzz(target, document, NUM_EXAMPLES).failures


def test_a_document_that_promises_too_much_is_found_out(target: Target) -> None:
    """Without this, a check that never looks would pass as well."""
    document = copy.deepcopy(fetch_document(target))
    operation = document["paths"][COMPLETIONS]
    document["paths"] = {COMPLETIONS: operation}
    for status in ("400", "404"):
        operation["post"]["responses"].pop(status, None)
    assert fuzz(target, document, NUM_EXAMPLES).failures


def test_a_server_without_a_document_is_said_to_have_none(target: Target) -> None:
    nobody = Target(target.host, 1, target.max_body_bytes)
    with pytest.raises(NoDocument):
        fetch_document(nobody)
