"""Which form a model has is found from its template; conversations become what it reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.text import ChatTemplate, Tokenizer
from headway.text.reasoning import ReasoningStart
from headway.text.tools.dialect import ChatDialect, read_dialect

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
"""A template without tools, as SmolLM2 has."""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
_HEAD = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
_TAIL = "[{{ m.role }}]{{ m.content }}{% endfor %}"


def template(calls: str, more: str = "") -> str:
    """A template that writes tool calls in its own way."""
    loop = "{% if m.tool_calls %}{% for c in m.tool_calls %}" + calls + "{% endfor %}{% endif %}"
    return _HEAD + loop + _TAIL + more


JSON = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
TEMPLATES = {
    "hermes": template("<tool_call>\n" + JSON + "\n</tool_call>"),
    "llama": template(JSON.replace('"arguments"', '"parameters"')),
    "mistral": template("[TOOL_CALLS] [" + JSON + "]"),
    "mistral-args": template(
        "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments|tojson }}"
    ),
    "qwen-xml": template(
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items()"
        " %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
}
GENERIC = {
    "no tools": PLAIN,
    "unknown form": template("<|call|>{{ c.function.name }}"),
    "refuses calls": template("{{ raise_exception('no') }}"),
    "no template": None,
}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "When?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{at}", "type": "function", "function": {"name": "now", "arguments": {}}}
            for at in range(2)
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "one"},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "two"}]},
]


def dialect_of(tokenizer: Tokenizer, source: str | None, setting: str = "auto") -> ChatDialect:
    return read_dialect(ChatTemplate(source, {}), tokenizer, setting)


def test_the_form_is_found_from_the_template(byte_level: Tokenizer) -> None:
    for name, source in TEMPLATES.items():
        found = dialect_of(byte_level, source)
        assert (found.tools.form.name, found.tools.is_generic) == (name, False)
        assert f"tool calls: {name} (found in the chat template)" in found.describe()
    for source in GENERIC.values():
        found = dialect_of(byte_level, source)
        assert (found.tools.form.name, found.tools.is_generic) == ("hermes", True)
        assert "tool calls: generic (the chat template" in found.describe()


def test_a_setting_goes_before_what_is_found(byte_level: Tokenizer) -> None:
    for setting in ("hermes", "llama", "mistral", "qwen-xml"):
        found = dialect_of(byte_level, PLAIN, setting)
        assert found.tools.form.name == setting and not found.tools.is_generic
    assert dialect_of(byte_level, TEMPLATES["llama"], "generic").tools.is_generic
    found = dialect_of(byte_level, TEMPLATES["mistral-args"], "mistral")
    assert found.tools.form.name == "mistral-args"


def test_templates_without_tools_get_them_as_text(byte_level: Tokenizer) -> None:
    text = dialect_of(byte_level, PLAIN).render(HISTORY, [TOOL])
    system, rest = text.split("[user]When?")
    assert system.startswith("[system]# Tools") and json.dumps(TOOL) in system
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    results = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert rest == f"[assistant]{call}\n{call}[user]{results}"
    # A system message gets the tools behind its own text; without a system role, the first message.
    told = [{"role": "system", "content": "Be brief."}, *HISTORY[:1]]
    assert dialect_of(byte_level, PLAIN).render(told, [TOOL]).startswith("[system]Be brief.\n\n# T")
    text = dialect_of(byte_level, NO_SYSTEM).render(HISTORY[:1], [TOOL])
    assert text.startswith("[user]When?\n\n# Tools")


def test_templates_with_tools_get_them_as_they_are(byte_level: Tokenizer) -> None:
    text = dialect_of(byte_level, TEMPLATES["hermes"]).render(HISTORY, [TOOL])
    assert text.startswith(f"TOOLS {json.dumps([TOOL])}\n[user]When?<tool_call>\n")
    assert "[tool]one[tool]two" in text
    assert "TOOLS" not in dialect_of(byte_level, TEMPLATES["hermes"]).render(HISTORY)


def test_ids_have_the_length_that_the_template_demands(byte_level: Tokenizer) -> None:
    source = template("[TOOL_CALLS] [{{ c.id }}]" + JSON, "{{ messages[-1].tool_call_id }}")
    text = dialect_of(byte_level, source).render(HISTORY, [TOOL])
    first, second = (part.split("]")[0] for part in text.split("[TOOL_CALLS] [")[1:])
    assert len(first) == len(second) == 9 and first != second and first.isalnum()
    assert text.endswith(second)
    kept = json.loads(json.dumps(HISTORY).replace("call_0", "abcdefghi"))
    assert "[abcdefghi]" in dialect_of(byte_level, source).render(kept, [TOOL])


THINKS = PLAIN + "{% if enable_thinking is false %}<think></think>{% endif %}"
OPENS = PLAIN + "{% if add_generation_prompt %}</think><think>\n{% endif %}"


def test_reasoning_is_found_from_template_and_prompt(byte_level: Tokenizer) -> None:
    plain, thinks = dialect_of(byte_level, PLAIN), dialect_of(byte_level, THINKS)
    opens = dialect_of(byte_level, OPENS)
    messages = HISTORY[:1]
    for dialect, start in (
        (plain, ReasoningStart.NEVER),
        (thinks, ReasoningStart.OPTIONAL),
        (opens, ReasoningStart.OPEN),
    ):
        prompt = dialect.render(messages)
        assert dialect.reasoning_after(prompt, is_continued=False) is start
    assert thinks.reasoning_after("[user]a", is_continued=True) is ReasoningStart.NEVER


def test_efforts_are_variables_of_the_template(byte_level: Tokenizer) -> None:
    plain, thinks = dialect_of(byte_level, PLAIN), dialect_of(byte_level, THINKS)
    knows = dialect_of(byte_level, "{{ reasoning_effort }}</think>" + PLAIN)
    always = dialect_of(byte_level, PLAIN + "</think>")
    assert plain.effort_variables("none") == {} and plain.effort_variables("low") is None
    assert thinks.effort_variables("minimal") == {"enable_thinking": False}
    assert thinks.effort_variables("high") == {"enable_thinking": True}
    assert knows.effort_variables("low") == {"reasoning_effort": "low"}
    assert always.effort_variables("none") is None
    assert thinks.render(HISTORY[:1], variables={"enable_thinking": False}).endswith("</think>")


@pytest.mark.parametrize("is_special", [True, False])
def test_markers_that_are_special_tokens_have_ids(byte_level: Tokenizer, is_special: bool) -> None:
    class Marked:
        special_ids = frozenset({7} if is_special else ())

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [7] if text == "[TOOL_CALLS]" else [1, 2]

    dialect = read_dialect(ChatTemplate(TEMPLATES["mistral"], {}), Marked())  # type: ignore[arg-type]
    assert dialect.shown_token_ids == ((7,) if is_special else ())
    expected = '<[7]> " [{"' if is_special else '"[TOOL_CALLS] [{"'
    assert dialect.markers.text("[TOOL_CALLS] [{") == expected
