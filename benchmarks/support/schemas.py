"""JSON schemas: random ones whose outputs end soon, and ones of any depth or width."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

MAX_DEPTH = 3
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
_PATTERNS = (r"^[a-c]{2,5}$", r"^\d{3}-\d{4}$", r"^(ab|cd)*x$", r"^[A-Z][a-z]{1,6}$")
_NAMES = ("name", "id", "a b", 'quo"te', "näme", "x\\y", "tags", "1", "")


def random_schema(seed: int) -> dict[str, Any]:
    """Return a schema; those that refer to themselves do so below a property."""
    draw = random.Random(f"schema {seed}")
    if draw.random() < 0.1:
        return _recursive(draw)
    return _schema(draw, 0)


def nested(depth: int) -> dict[str, Any]:
    """Return arrays in arrays."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def optional(count: int) -> dict[str, Any]:
    """Return an object with properties that need not be there."""
    return {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(count)}}


def chain(count: int) -> dict[str, Any]:
    """Return references of arrays to arrays: llguidance recurses along them."""
    names = [f"a{at}" for at in range(count)]
    arrays = {
        name: {"type": "array", "items": {"$ref": f"#/$defs/{after}"}}
        for name, after in pairwise(names)
    }
    return {"$ref": "#/$defs/a0", "$defs": {**arrays, names[-1]: {"type": "integer"}}}


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _number, _choice, _plain]
    if depth < MAX_DEPTH:
        kinds += [_object, _object, _array, _union]
    return draw.choice(kinds)(draw, depth)


def _string(draw: random.Random, _depth: int) -> dict[str, Any]:
    kind = draw.choice(("length", "pattern", "format"))
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(_PATTERNS)}
    if kind == "format":
        return {"type": "string", "format": draw.choice(_FORMATS)}
    least = draw.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(8)}


def _integer(draw: random.Random, _depth: int) -> dict[str, Any]:
    low = draw.randrange(-10_000, 10_000)
    bounds = {"minimum": low, "maximum": low + draw.randrange(1, 5000)}
    if draw.random() < 0.3:
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + draw.randrange(2, 50)}
    return {"type": "integer", **bounds}


def _number(draw: random.Random, _depth: int) -> dict[str, Any]:
    low = draw.randrange(-100, 100)
    return {"type": "number", "minimum": low, "maximum": low + draw.choice((0.5, 1.25, 40))}


def _choice(draw: random.Random, _depth: int) -> dict[str, Any]:
    values = ["red", "green", 'a "b"', "ü", 7, -1.5, True, None, {"k": [1, "x"]}, [], ""]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randrange(1, 6))}


def _plain(draw: random.Random, _depth: int) -> dict[str, Any]:
    return {"type": draw.choice(("boolean", "null", ["boolean", "null"]))}


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    least = draw.randrange(3)
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + 2}
    schema["items"] = _schema(draw, depth + 1)
    if draw.random() < 0.3:
        schema["prefixItems"] = [_schema(draw, depth + 1)]
    return schema


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(draw, depth + 1) for _ in range(draw.randrange(1, 4))]}


def _recursive(draw: random.Random) -> dict[str, Any]:
    return {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": _schema(draw, MAX_DEPTH),
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    }
