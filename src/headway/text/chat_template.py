"""Renders chat messages into a prompt with the model's own template.

A template comes with the model, so it is code from a stranger: it runs in Jinja's immutable
sandbox, sees only plain values, and its output is bounded. Owns the template dialect; does not
tokenize.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.errors import InvalidRequestError, ModelLoadError

DEFAULT_MAX_CHARS = 4_000_000
_MAX_POWER_BITS = 4096
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """One model's template, compiled once; `source` is None for a model that has none."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int = DEFAULT_MAX_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment(max_chars, now).from_string(source)
            except (TemplateError, RecursionError) as error:
                raise ModelLoadError(f"the chat template cannot be parsed: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`variables` are further names the template may read, such as a thinking switch."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a prompt",
                param="messages",
            )
        reserved = _RESERVED.intersection(variables or ())
        if reserved:
            raise InvalidRequestError(
                f"{', '.join(sorted(reserved))} cannot be set as template variables",
                param="chat_template_kwargs",
            )
        try:
            names = {
                **self._special_tokens,
                **_plain(variables or {}),
                "messages": [_message(message) for message in messages],
                # Named even when absent: to a template, undefined is not the same as none.
                "tools": None if tools is None else _plain(tools),
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            return self._bounded(self._template.generate(names))
        except InvalidRequestError:
            raise
        except Exception as error:
            # A template can fail in any way that Python code can: it indexes, adds and calls.
            raise InvalidRequestError(
                f"the chat template refused these messages: {error}", param="messages"
            ) from error

    def _bounded(self, pieces: Iterable[str]) -> str:
        rendered, num_chars = [], 0
        for piece in pieces:
            num_chars += len(piece)
            if num_chars > self._max_chars:
                raise InvalidRequestError(
                    f"the rendered chat is longer than {self._max_chars} characters",
                    param="messages",
                )
            rendered.append(piece)
        return "".join(rendered)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = _plain(message)
    if isinstance(plain.get("content"), list):
        plain["content"] = "\n".join([_part_text(part) for part in plain["content"]])
    return plain


def _part_text(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidRequestError(
        f"message content of type {kind!r} is not supported; use text", param="messages"
    )


def _plain(value: Any) -> Any:
    """A copy made of plain JSON types only: no object with methods reaches the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # an enum member, say
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise InvalidRequestError(
        f"messages must hold plain JSON values, not {type(value).__name__}", param="messages"
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks what training learns from; to a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """The output bound comes too late for one huge value, so products are bounded as well."""

    intercepted_binops = frozenset({"*", "**"})
    max_chars = DEFAULT_MAX_CHARS

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            if isinstance(left, int) and left.bit_length() * abs(right) > _MAX_POWER_BITS:
                raise SecurityError("a power in the chat template is too large")
        else:
            for value, count in ((left, right), (right, left)):
                is_repeat = isinstance(value, (str, list, tuple)) and isinstance(count, int)
                if is_repeat and len(value) * count > self.max_chars:
                    raise SecurityError("a repetition in the chat template is too long")
        return super().call_binop(context, operator, left, right)


def _environment(max_chars: int, now: Callable[[], datetime]) -> _BoundedSandbox:
    environment = _BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.max_chars = max_chars
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    del environment.globals["lipsum"]
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
