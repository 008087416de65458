"""How one model writes conversations: tool calls and reasoning, found from its chat template.

The template is rendered with a tool and a call that nobody asked for, and the result is searched
for the markers of each form. A template whose result does not change with the tools has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.errors import InvalidRequestError
from headway.text.chat_template import ChatTemplate
from headway.text.reasoning import CLOSE_TAG, OPEN_TAG, ReasoningStart
from headway.text.tokenizer import Tokenizer
from headway.text.tools.forms import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML, CallForm
from headway.text.tools.grammar import Markers
from headway.text.tools.prompts import (
    Message,
    as_plain_messages,
    with_short_ids,
    with_tool_prompt,
)

_NAME, _KEY, _VALUE = "probe_tool", "probe_key", "probe_value"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "A probe."}},
            "required": [_KEY],
        },
    },
}
_USER: Message = {"role": "user", "content": "A question."}
_CALL = {
    "id": "abcdef012",
    "type": "function",
    "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
}
_HISTORY: list[Message] = [
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "abcdef012", "name": _NAME, "content": "A result."},
]
_SIGNS = (
    (QWEN_XML, f"<function={_NAME}>"),
    (MISTRAL_ARGS, f"[TOOL_CALLS]{_NAME}"),
    (MISTRAL, "[TOOL_CALLS]"),
    (HERMES, "<tool_call>"),
    (LLAMA, f'{{"name": "{_NAME}", "parameters": {{'),
)
"""What a rendered call contains, the more specific first."""
_SETTINGS = {"hermes": HERMES, "llama": LLAMA, "qwen-xml": QWEN_XML, "generic": HERMES}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """The form of tool calls of a model, and why."""

    form: CallForm
    is_generic: bool
    """Whether the template knows no tools, so that messages describe them."""
    reason: str


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """How one model writes conversations."""

    template: ChatTemplate
    tools: ToolSupport
    markers: Markers
    has_reasoning: bool
    close_ids: tuple[int, ...]
    """The closing tag of the reasoning, as tokens."""
    variables: frozenset[str]
    """Names that the template reads."""
    has_system: bool
    """Whether the template takes a system message."""

    @property
    def shown_token_ids(self) -> tuple[int, ...]:
        """Special tokens that are markers, which the parser of a reply must see."""
        return tuple(self.markers.special_ids.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a conversation as the text of a prompt, with the tools that it offers."""
        form = self.tools.form
        if self.tools.is_generic:
            messages = as_plain_messages(messages)
            if tools:
                messages = with_tool_prompt(messages, tools, has_system=self.has_system)
        elif form.id_chars is not None:
            messages = with_short_ids(messages, form.id_chars)
        return self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if self.tools.is_generic or not tools else tools,
            variables=variables,
        )

    def reasoning_after(self, prompt: str, *, is_continued: bool) -> ReasoningStart:
        """Return whether a reply to a rendered prompt begins with reasoning."""
        if not self.has_reasoning:
            return ReasoningStart.NEVER
        if prompt.rstrip().endswith(OPEN_TAG):
            return ReasoningStart.OPEN
        return ReasoningStart.NEVER if is_continued else ReasoningStart.OPTIONAL

    def effort_variables(self, effort: str) -> dict[str, Any] | None:
        """Return the variables of the template for a reasoning effort; None if it has none.

        A model without reasoning has the effort `none`.
        """
        variables: dict[str, Any] = {}
        if "reasoning_effort" in self.variables:
            variables["reasoning_effort"] = effort
        if "enable_thinking" in self.variables:
            variables["enable_thinking"] = effort not in ("none", "minimal")
        if variables or (effort == "none" and not self.has_reasoning):
            return variables
        return None

    def describe(self) -> str:
        """Return what was found, in one line for the log."""
        kind = "generic" if self.tools.is_generic else self.tools.form.name
        reasoning = "split from the text" if self.has_reasoning else "none"
        return f"tool calls: {kind} ({self.tools.reason}); reasoning: {reasoning}"


def read_dialect(
    template: ChatTemplate, tokenizer: Tokenizer, tool_call_parser: str = "auto"
) -> ChatDialect:
    """Return the dialect of a model; `tool_call_parser` is the setting of that name."""
    tools = _find_tools(template)
    if tool_call_parser != "auto":
        form = _SETTINGS.get(tool_call_parser) or _mistral_form(tools)
        tools = ToolSupport(form, tool_call_parser == "generic", "set by --tool-call-parser")
    has_reasoning = CLOSE_TAG in template.source
    texts = [*tools.form.special_texts, *((OPEN_TAG, CLOSE_TAG) if has_reasoning else ())]
    special_ids = {
        text: ids[0]
        for text in texts
        if len(ids := tokenizer.encode(text, add_special_tokens=False)) == 1
        and ids[0] in tokenizer.special_ids
    }
    return ChatDialect(
        template,
        tools,
        Markers(special_ids),
        has_reasoning,
        tuple(tokenizer.encode(CLOSE_TAG, add_special_tokens=False)),
        template.variables(),
        has_system=_try(template, [{"role": "system", "content": "Be brief."}, _USER]) is not None,
    )


def _mistral_form(found: ToolSupport) -> CallForm:
    return found.form if found.form in (MISTRAL, MISTRAL_ARGS) else MISTRAL


def _find_tools(template: ChatTemplate) -> ToolSupport:
    without, offered = _try(template, [_USER]), _try(template, [_USER], [_TOOL])
    if offered is None or offered == without:
        return ToolSupport(HERMES, True, "the chat template takes no tools")
    called = _try(template, _HISTORY, [_TOOL])
    if called is None:
        return ToolSupport(HERMES, True, "the chat template refused a tool call")
    # What follows the question: the description of the tools may quote other forms.
    called = called[called.rfind(_USER["content"]) :]
    for form, sign in _SIGNS:
        if sign in called:
            return ToolSupport(form, False, "found in the chat template")
    return ToolSupport(HERMES, True, "the chat template writes calls in an unknown form")


def _try(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> str | None:
    """Return a rendered conversation; None if the template refuses it."""
    try:
        return template.render(messages, tools=tools or None)
    except InvalidRequestError:
        return None
