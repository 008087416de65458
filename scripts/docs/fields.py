"""The page of routes and body fields, made of the schemas that check requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headway.server.api.openapi.document import ApiFacts, document
from headway.server.schema.fields import DEFAULT_LIMITS
from scripts.docs.reference import page, table

_REF = "#/components/schemas/"
_BOUNDS = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " items"),
    ("minProperties", "maxProperties", " entries"),
)
"""Words of JSON Schema for the least and the most, and what they count."""
_INT64 = 2**63 - 1
_HUGE = {_INT64, -_INT64, -_INT64 - 1, 2**31 - 1}


def fields_page() -> str:
    """Return the routes of the server, and the fields of every body."""
    facts = ApiFacts((), DEFAULT_LIMITS, has_keys=True, has_batches=True, has_priorities=True)
    api = document(facts)
    schemas = api["components"]["schemas"]
    bodies: dict[str, list[str]] = {}
    rows: list[Sequence[str]] = []
    for path, operations in api["paths"].items():
        for method, operation in operations.items():
            names = [*_refs(operation.get("requestBody", {}))]
            for name in names:
                bodies.setdefault(name, []).append(f"`{method.upper()} {path}`")
            links = ", ".join(_to_section(name) for name in names)
            rows.append((f"`{method.upper()} {path}`", operation["summary"], links))
    parts = [
        "What a body may hold, as the server checks it: types and bounds. Whether a field takes "
        "effect, and rules that join two fields, are in [api.md](../api.md). `null` is the same as "
        "no field; unknown fields are refused. `GET /openapi.json` of a server has the same with "
        "the limits of its model.",
        table(("Route", "What it does", "Body"), rows),
    ]
    for name, users in bodies.items():
        parts += [f"## {name}", f"Body of {', '.join(users)}.", _fields_table(schemas[name])]
    for name in _nested(schemas, bodies):
        parts += [f"## {name}", _about(schemas[name]), _fields_table(schemas[name])]
    return page("Which types and bounds do fields have?", "src/headway/server/schema", *parts)


def _to_section(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _about(schema: Mapping[str, Any]) -> str:
    text = schema.get("description", "").split("\n\n")[0]
    return " ".join(text.split())


def _refs(value: Any) -> Iterator[str]:
    """Yield the names of the schemas that a value refers to, each once."""
    found: dict[str, None] = {}
    pending = [value]
    while pending:
        one = pending.pop(0)
        if isinstance(one, Mapping):
            if isinstance(one.get("$ref"), str):
                found.setdefault(one["$ref"].removeprefix(_REF))
            pending += one.values()
        elif isinstance(one, list):
            pending += one
    yield from found


def _nested(schemas: Mapping[str, Any], bodies: Mapping[str, Any]) -> list[str]:
    """Return the objects within bodies, in the order in which a reader meets them."""
    seen, pending = dict.fromkeys(bodies), list(bodies)
    while pending:
        new = [name for name in _refs(schemas[pending.pop(0)]) if name not in seen]
        seen |= dict.fromkeys(new)
        pending += new
    return [name for name in seen if name not in bodies]


def _fields_table(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"`{name}`",
            "text: a served name" if name == "model" else _type_text(field),
            "yes" if name in required else "",
        )
        for name, field in schema.get("properties", {}).items()
    ]
    return table(("Field", "Type and bounds", "Required"), rows) if rows else "Any JSON."


def _type_text(schema: Mapping[str, Any]) -> str:
    """Return the types of a field in words; null, which every optional field takes, is left out."""
    if "$ref" in schema:
        return _to_section(schema["$ref"].removeprefix(_REF))
    for word in ("anyOf", "oneOf"):
        if word in schema:
            texts = [_type_text(one) for one in schema[word] if one != {"type": "null"}]
            return " or ".join(dict.fromkeys(texts))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        values = [f"`{json.dumps(value)}`" for value in schema["enum"] if value is not None]
        return ", ".join(values) or "`null` only"
    if "allOf" in schema:
        return " and ".join(map(_type_text, schema["allOf"]))
    return _with_bounds(schema, _simple_type(schema))


def _simple_type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "")
    if kind == "array":
        items = schema.get("items", {})
        return f"list of {_type_text(items)}" if items else "list"
    if kind == "object" and schema.get("properties"):
        return f"object with {', '.join(f'`{name}`' for name in schema['properties'])}"
    return {"": "any JSON", "integer": "integer", "string": "text"}.get(kind, str(kind))


def _with_bounds(schema: Mapping[str, Any], text: str) -> str:
    bounds = [bound for words in _BOUNDS if (bound := _range(schema, *words))]
    if "exclusiveMinimum" in schema:
        bounds.insert(0, f"above {_number(schema['exclusiveMinimum'])}")
    if "pattern" in schema:
        bounds.append(f"matches `{schema['pattern']}`")
    return f"{text} ({', '.join(bounds)})" if bounds else text


def _range(schema: Mapping[str, Any], least: str, most: str, unit: str) -> str:
    low, high = (None if schema.get(word) in _HUGE else schema.get(word) for word in (least, most))
    if low is not None and high is not None:
        return f"{_number(low)} to {_number(high)}{unit}"
    if high is not None:
        return f"at most {_number(high)}{unit}"
    return f"at least {_number(low)}{unit}" if low else ""


def _number(value: float) -> str:
    return str(int(value) if value == int(value) else value)
