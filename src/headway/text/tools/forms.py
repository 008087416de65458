"""How families of models write tool calls: one description per family.

The grammar (`grammar.py`) and the parser (`parser.py`) are both made from it, so what the grammar
allows is what the parser reads.
"""

from __future__ import annotations

from dataclasses import dataclass

NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")
"""Of the name of a tool; a name ends at the first other character."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around names and arguments of tool calls.

    All calls of a reply: opening, call, separator, call, ..., closing. One call: before_name, name,
    after_name, arguments, after_arguments. The grammar writes these texts as they are; the parser
    ignores whitespace in them.
    """

    name: str
    before_name: str
    after_name: str
    after_arguments: str
    marker: str
    """Begins the calls of a reply, and is in no text before them."""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    special_texts: tuple[str, ...] = ()
    """Parts of these texts that some models have as special tokens."""
    follows_text: bool = True
    """Whether calls may come after text; otherwise a reply is text or a call."""
    has_several: bool = True
    """Whether a reply may have more than one call."""
    has_xml_arguments: bool = False
    """Whether each argument is in a tag of its own; otherwise all are one JSON object."""
    id_chars: int | None = None
    """Length that ids of calls must have; None for any."""

    @property
    def start(self) -> str:
        """The texts before the first name."""
        return self.opening + self.before_name


HERMES = CallForm(
    "hermes",
    before_name='<tool_call>\n{"name": "',
    after_name='", "arguments": ',
    after_arguments="}\n</tool_call>",
    marker="<tool_call>",
    separator="\n",
    special_texts=("<tool_call>", "</tool_call>"),
)
"""Hermes, Qwen 2.5, Qwen 3 and others; also the form for models that have none of their own."""

LLAMA = CallForm(
    "llama",
    before_name='{"name": "',
    after_name='", "parameters": ',
    after_arguments="}",
    marker="{",
    follows_text=False,
    has_several=False,
)
"""Llama 3.1 and later, in JSON: a reply that begins with a brace is a call."""

MISTRAL = CallForm(
    "mistral",
    before_name='{"name": "',
    after_name='", "arguments": ',
    after_arguments="}",
    marker="[TOOL_CALLS]",
    opening="[TOOL_CALLS] [",
    separator=", ",
    closing="]",
    special_texts=("[TOOL_CALLS]",),
    id_chars=9,
)
"""Mistral until 2024: a list of calls."""

MISTRAL_ARGS = CallForm(
    "mistral-args",
    before_name="[TOOL_CALLS]",
    after_name="[ARGS]",
    after_arguments="",
    marker="[TOOL_CALLS]",
    special_texts=("[TOOL_CALLS]", "[ARGS]"),
    id_chars=9,
)
"""Mistral from 2025: a marker before each name and each arguments."""

QWEN_XML = CallForm(
    "qwen-xml",
    before_name="<tool_call>\n<function=",
    after_name=">\n",
    after_arguments="</function>\n</tool_call>",
    marker="<tool_call>",
    separator="\n",
    special_texts=("<tool_call>", "</tool_call>"),
    has_xml_arguments=True,
)
"""Qwen3-Coder: each argument in a tag, texts without quotes."""

FORMS = {form.name: form for form in (HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML)}
