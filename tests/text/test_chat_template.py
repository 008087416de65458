from __future__ import annotations

from datetime import datetime
from enum import StrEnum

import pytest

from headway.errors import InvalidRequestError, ModelLoadError
from headway.text import ChatTemplate

USER = [{"role": "user", "content": "Hi <b>&</b> 你"}]
CHATS = [
    USER,
    [{"role": "system", "content": "Be brief."}, *USER],
    [*USER, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "  bye \n"}],
]


def render(source: str, messages=USER, **options):
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        messages, **options
    )


@pytest.mark.model
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_renders_as_the_oracle_does(smollm, oracle, messages, add_generation_prompt):
    template = ChatTemplate(smollm.chat_template, smollm.special_tokens)
    ours = template.render(messages, add_generation_prompt=add_generation_prompt)
    expected = oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert ours == expected
    ids = oracle.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert smollm.encode(ours, add_special_tokens=False) == ids


FEATURES = """
{%- for message in messages %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    {%- generation %}
{{ bos_token }}{{ message | tojson }}{{ message.content | tojson(indent=2) }}
    {%- endgeneration %}
{% endfor %}
{%- if tools is not none %}TOOLS {{ tools | tojson }}{% endif %}
{%- if documents is not none %}DOCUMENTS{% endif %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{%- if add_generation_prompt %}{{ eos_token }}{% endif %}
"""


@pytest.mark.model
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_dialect_matches_the_oracle(smollm, oracle, messages, tools):
    ours = ChatTemplate(FEATURES, smollm.special_tokens).render(messages, tools=tools)
    expected = oracle.apply_chat_template(
        messages, tools=tools, chat_template=FEATURES, tokenize=False, add_generation_prompt=True
    )
    assert ours == expected


def test_json_is_not_escaped_for_html():
    assert render("{{ messages[0].content | tojson }}") == '"Hi <b>&</b> 你"'


def test_time_comes_from_the_clock_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert template.render(USER) == "26 Jul 2024"


def test_a_scope_inside_generation_stays_inside():
    source = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(source) == "1"


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert parts[0] == {"type": "text", "text": "one"}


class Role(StrEnum):
    USER = "user"


def test_values_are_made_plain():
    messages = [{"role": Role.USER, "content": None, "calls": ({"a": 1},)}]
    assert render("{{ messages[0].role.name is defined }}", messages) == "False"
    assert render("{{ messages[0].calls }}", messages) == "[{'a': 1}]"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["text"]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": object()}],
    ],
)
def test_content_that_is_not_text_is_refused(messages):
    with pytest.raises(InvalidRequestError) as caught:
        render("{{ messages[0].content }}", messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ nothing.nothing }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_the_requests_fault(source):
    with pytest.raises(InvalidRequestError, match="refused these messages") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_caller():
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__closure__[0].cell_contents }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ messages.append({'role': 'system'}) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_the_sandbox_holds(source):
    messages = [dict(USER[0])]
    with pytest.raises(InvalidRequestError, match=r"unsafe|undefined"):
        render(source, messages)
    assert messages == USER


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
    ],
)
def test_no_attribute_leaks_into_the_prompt(source):
    try:
        rendered = render(source)
    except InvalidRequestError:
        return
    assert "class" not in rendered
    assert "module" not in rendered


def test_a_repetition_cannot_fill_memory():
    for source in (
        "{{ 'a' * 10**12 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [1] * 10**10 }}",
        "{{ 9**(9**9) }}",
    ):
        with pytest.raises(InvalidRequestError, match="too l"):
            render(source)
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}") == "---1024"


def test_output_is_bounded():
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    template = ChatTemplate(source, {}, max_chars=1000)
    with pytest.raises(InvalidRequestError, match="longer than 1000"):
        template.render(USER)
    assert ChatTemplate("{{ messages[0].content }}", {}, max_chars=13).render(USER)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% generation %}x", "{{ x | nofilter }}"])
def test_a_template_that_cannot_be_parsed_fails_the_load(source):
    with pytest.raises(ModelLoadError, match="chat template cannot be parsed"):
        ChatTemplate(source, {})


def test_a_model_without_a_template_says_so():
    template = ChatTemplate(None, {})
    with pytest.raises(InvalidRequestError, match="no chat template; use /v1/completions"):
        template.render(USER)


def test_variables_reach_the_template_but_not_its_own_names():
    assert render("{{ thinking }}", variables={"thinking": True}) == "True"
    with pytest.raises(InvalidRequestError) as caught:
        render("x", variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"
