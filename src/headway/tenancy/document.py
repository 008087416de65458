"""YAML as sections that remember where each entry stood, so that errors can say so.

Two entries of one name are an error here: the library would keep the last and say nothing. Names
are taken as written, so that a tenant may be called 007 or yes.
"""

from __future__ import annotations

from typing import Any

import yaml

from headway.errors import ConfigError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAPPING = "tag:yaml.org,2002:map"


class Section(dict[str, Any]):
    """The entries under one name, and the line each is on."""

    def __init__(self, line: int = 1) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}

    def line_of(self, name: str) -> int:
        return self.lines.get(name, self.line)


class _Loader(_Base):
    """Only plain values can come of it: it is the library's safe one."""


def _construct(loader: Any, node: Any) -> Section:
    section = Section(node.start_mark.line + 1)
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"line {line}: a name must be plain text")
        if key.value in section:
            first = section.lines[key.value]
            raise ConfigError(f"line {line}: {key.value[:80]!r} is there twice, first on {first}")
        section.lines[key.value] = line
        section[key.value] = loader.construct_object(value, deep=True)
    return section


_Loader.add_constructor(_MAPPING, _construct)


def parse(text: str) -> Section:
    """The document, which must be one section. ConfigError names the line of what is wrong."""
    try:
        content = yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        location = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{location}this is not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"this is not YAML: {error}") from error
    except (LookupError, AttributeError, TypeError) as error:
        # The library's own, for a value that is not of the kind its tag says.
        raise ConfigError(f"a value is not what its tag says: {error}") from error
    if not isinstance(content, Section):
        raise ConfigError("there is no 'tiers:' and no 'tenants:' in it")
    return content


def write(section: Section) -> str:
    """The document as text. Comments and anchors are gone."""
    return yaml.safe_dump(_plain(section), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
