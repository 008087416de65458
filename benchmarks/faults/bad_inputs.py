"""The corpus: bad inputs, and unusual inputs that must be accepted."""

from __future__ import annotations

from collections import Counter

from benchmarks.faults.bad_inputs_adapters import adapter_cases
from benchmarks.faults.bad_inputs_background import background_cases
from benchmarks.faults.bad_inputs_batches import batch_cases
from benchmarks.faults.bad_inputs_content import content_cases
from benchmarks.faults.bad_inputs_fields import field_cases
from benchmarks.faults.bad_inputs_http import http_cases
from benchmarks.faults.bad_inputs_json import json_cases
from benchmarks.faults.bad_inputs_tools import tool_cases
from benchmarks.faults.cases import Case


def corpus() -> list[Case]:
    """Return all cases; check that their names are unique."""
    cases = [*field_cases(), *content_cases(), *json_cases(), *http_cases()]
    cases += [*tool_cases(), *batch_cases(), *adapter_cases(), *background_cases()]
    repeated = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    if repeated:
        raise ValueError(f"names used twice: {repeated}")
    return cases
