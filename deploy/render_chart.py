"""Renders the Helm chart where there is no helm: python deploy/render_chart.py [NAME=VALUE...]

Knows what the templates use, and raises for anything else: values, `quote`, `if` and `if not`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "helm/headway"
ACTION = re.compile(r"(\s*\{\{-.*?\}\}|\{\{.*?\}\})", re.DOTALL)


def read_values(given: list[str]) -> dict[str, Any]:
    """Return the values of the chart, changed by NAME=VALUE."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for text in given:
        name, _, value = text.partition("=")
        *parents, last = name.split(".")
        place = values
        for parent in parents:
            place = place[parent]
        if last not in place:
            raise KeyError(f"the chart has no value {name}")
        place[last] = yaml.safe_load(value)
    return values


def render(text: str, values: dict[str, Any]) -> str:
    """Return the text of a template."""
    parts: list[str] = []
    conditions: list[bool] = []
    for part in ACTION.split(text):
        action = part.strip()
        if not action.startswith("{{"):
            parts.append(part if all(conditions) else "")
            continue
        words = action.strip("{}-").split()
        if words[0] == "if":
            is_negated = words[1] == "not"
            conditions.append(bool(look_up(words[-1], values)) != is_negated)
        elif words[0] == "end":
            conditions.pop()
        elif all(conditions):
            parts.append(value_of(words, values))
    return "".join(parts)


def value_of(words: list[str], values: dict[str, Any]) -> str:
    """Return what an action prints."""
    if words == ['"{{"']:
        return "{{"
    value = look_up(words[0], values)
    if words[1:] == ["|", "quote"]:
        return json.dumps(str(value))
    if words[1:]:
        raise ValueError(f"this renderer does not know {' '.join(words)}")
    return str(value)


def look_up(name: str, values: dict[str, Any]) -> Any:
    """Return a value by its name, as .Values.fleet.engines."""
    found: Any = {"Values": values}
    for part in name.removeprefix(".").split("."):
        found = found[part]
    return found


def main() -> int:
    """Print all objects of the chart."""
    values = read_values(sys.argv[1:])
    for path in sorted((CHART / "templates").glob("*.yaml")):
        text = render(path.read_text(), values).strip()
        if text:
            print(f"---\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
