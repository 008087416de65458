"""Renders chat messages into a prompt with the template of the model.

A template is untrusted code: it runs in a sandbox that counts its work, sees only plain values, and
has bounded output. This module does not tokenize.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from headway.errors import InvalidRequestError, ModelLoadError
from headway.text.sandbox import MAX_SOURCE_CHARS, BoundedSandbox

DEFAULT_MAX_CHARS = 4_000_000
_RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        # Parameters of the function that others pass such variables to.
        *("chat_template", "tokenize", "conversation", "return_tensors", "return_dict"),
    }
)
_CUT_HERE = "CONTINUE_FROM_HERE "
"""Ends the message to continue, with a space: templates may trim it."""


class ChatTemplate:
    """The compiled template of a model; `source` is None for a model without one."""

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str],
        *,
        max_chars: int = DEFAULT_MAX_CHARS,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source or ""
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._template: jinja2.Template | None = None
        self._environment = _environment(max_chars, now)
        if source is not None:
            if len(source) > MAX_SOURCE_CHARS:
                raise ModelLoadError(
                    f"the chat template has {len(source)} characters; {MAX_SOURCE_CHARS} are read"
                )
            try:
                self._template = self._environment.from_string(source)
            except (TemplateError, RecursionError) as error:
                raise ModelLoadError(f"the chat template cannot be parsed: {error}") from error

    def variables(self) -> frozenset[str]:
        """Return the names that the template reads and does not set itself."""
        return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages; `variables` are further names for the template.

        With `continue_final_message` the result ends with the text of the last message.
        """
        if continue_final_message:
            return self._render_open(messages, tools, variables)
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
                # Set even when absent: templates distinguish undefined from none.
                "tools": None if tools is None else _plain(tools),
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            with self._environment.rendering(_num_chars(names)):
                return self._bounded(self._template.generate(names))
        except InvalidRequestError:
            raise
        except Exception as error:
            # A template can raise any exception that Python code can.
            raise InvalidRequestError(
                f"the chat template refused these messages: {error}", param="messages"
            ) from error

    def _render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> str:
        """Render messages without what the template writes after the last one's text."""
        *before, last = [_message(message) for message in messages]
        marked = {**last, "content": f"{last.get('content') or ''}{_CUT_HERE}"}
        text = self.render(
            [*before, marked], add_generation_prompt=False, tools=tools, variables=variables
        )
        at = text.rfind(_CUT_HERE.strip())
        if at < 0:
            raise InvalidRequestError(
                "the chat template does not write the last message, so it cannot be continued",
                param="continue_final_message",
            )
        is_trimmed = text[at : at + len(_CUT_HERE)] != _CUT_HERE
        return text[:at].rstrip() if is_trimmed else text[:at]

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
    """Return a copy of plain JSON types: no object with methods reaches the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):  # for example an enum member
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise InvalidRequestError(
        f"messages must hold plain JSON values, not {type(value).__name__}", param="messages"
    )


class _GenerationTag(Extension):
    """`{% generation %}` marks text for training; rendering ignores the tag."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment(max_chars: int, now: Callable[[], datetime]) -> BoundedSandbox:
    environment = BoundedSandbox(
        max_chars,
        now,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, loopcontrols],
    )
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _num_chars(value: Any) -> int:
    """Return the approximate size of plain JSON."""
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, Mapping):
        return 1 + sum(len(key) + _num_chars(item) for key, item in value.items())
    return 1 + sum(map(_num_chars, value)) if isinstance(value, list) else 1


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
