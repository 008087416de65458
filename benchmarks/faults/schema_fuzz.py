"""Sends valid and invalid requests made from the server's OpenAPI document.

Checks the answers against the document too.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from benchmarks.faults.cases import CHAT, COMPLETIONS, Target
from benchmarks.faults.mutate import BUSY, LIMITS, shortened

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
MAX_FAILURES = 50
SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
TIMEOUT_S = 60
GENERATING = {
    CHAT: LIMITS,
    COMPLETIONS: LIMITS,
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Generating endpoints, and their fields that limit the output."""


class NoDocument(Exception):
    """The server has no OpenAPI document, or an unreadable one."""


@dataclass(frozen=True, slots=True)
class SchemaFailure:
    """One answer that contradicts the document."""

    operation: str
    mode: str
    request: str
    problem: str


@dataclass(slots=True)
class SchemaResult:
    num_operations: int = 0
    num_requests: int = 0
    num_busy: int = 0
    num_failures: int = 0
    failures: tuple[SchemaFailure, ...] = ()

    def add(self, failure: SchemaFailure) -> None:
        self.num_failures += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures += (failure,)


def fetch_document(target: Target) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(f"{target.url}/openapi.json", timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ValueError) as error:
        raise NoDocument(f"{target.url}/openapi.json: {error}") from error


def fuzz(
    target: Target,
    document: dict[str, Any],
    num_examples: int,
    progress: Callable[[str], None] = lambda _: None,
) -> SchemaResult:
    """Send `num_examples` requests of each mode to every operation."""
    result = SchemaResult()
    schema = schemathesis.openapi.from_dict(document)
    refusal = schema.config.checks.negative_data_rejection
    # A list with more items than allowed can be a body above the limit.
    refusal.expected_statuses = [*refusal.expected_statuses, "413"]
    for found in schema.get_all_operations():
        if not isinstance(found, Ok):
            raise NoDocument(f"an operation cannot be read: {found.err()}")
        operation = found.ok()
        result.num_operations += 1
        for mode in MODES:
            if mode is GenerationMode.NEGATIVE and not _takes_input(operation):
                continue
            progress(f"{operation.label} {mode.value}")
            _fuzz_operation(target, operation, mode, num_examples, result)
    return result


def _takes_input(operation: schemathesis.APIOperation) -> bool:
    """Whether the operation has input; without input no request is invalid."""
    return bool(operation.body or operation.path_parameters or operation.query)


def _fuzz_operation(
    target: Target,
    operation: schemathesis.APIOperation,
    mode: GenerationMode,
    num_examples: int,
    result: SchemaResult,
) -> None:
    @seed(1)
    @settings(
        max_examples=num_examples if _takes_input(operation) else 1,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=SLOW_IS_FINE,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if case.path in GENERATING:
            case.body = shortened(case.body, GENERATING[case.path])
        response = case.call(base_url=target.url, timeout=TIMEOUT_S)
        result.num_requests += 1
        if response.status_code in BUSY:
            result.num_busy += 1
            return
        try:
            case.validate_response(response, checks=CHECKS)
        except (Failure, FailureGroup) as error:
            request = f"{case.method} {case.formatted_path} {case.body!r}"[:600]
            problem = f"{response.status_code}: {_message(error)}"[:600]
            result.add(SchemaFailure(operation.label, mode.value, request, problem))

    # If the document allows every value, no request is invalid.
    with contextlib.suppress(Unsatisfiable):
        ask()


def _message(error: BaseException) -> str:
    inner = error.exceptions if isinstance(error, FailureGroup) else (error,)
    return "; ".join(str(one).replace("\n", " ") for one in inner)
