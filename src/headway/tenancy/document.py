"""YAML as sections that know the line of each entry, for error texts.

Two entries of the same name are an error here: the YAML library would silently use the last. Names
are text as written, so that a tenant may be called 007 or yes.
"""

from __future__ import annotations

from typing import Any

import yaml

from headway.errors import ConfigError

_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAPPING = "tag:yaml.org,2002:map"


class Section(dict[str, Any]):
    """The entries under one name, and the line of each entry."""

    def __init__(self, line: int = 1) -> None:
        super().__init__()
        self.line = line
        self.lines: dict[str, int] = {}

    def line_of(self, name: str) -> int:
        return self.lines.get(name, self.line)


class _Loader(_Base):
    """The library's safe loader: it constructs plain values only."""


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
    """Return the document, which must be one section; ConfigError names the line of an error."""
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
        # The library raises these for a value that does not match its tag.
        raise ConfigError(f"a value is not what its tag says: {error}") from error
    if not isinstance(content, Section):
        raise ConfigError("the file has neither 'tiers:' nor 'tenants:'")
    return content


def write(section: Section) -> str:
    """Return the document as text, without its comments and anchors."""
    return yaml.safe_dump(_plain(section), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
