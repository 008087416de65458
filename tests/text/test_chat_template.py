from __future__ import annotations

import time
import tracemalloc
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


BOMBS = [
    "{{ 'a'.ljust(40000000) }}",
    "{{ 'a'.rjust(40000000) }}",
    "{{ 'a'.center(40000000) }}",
    "{{ 'a'.zfill(40000000) }}",
    "{{ '\t'.expandtabs(40000000) }}",
    "{{ 'a'.encode('utf-8') }}",
    "{{ '%40000000d' % 1 }}",
    "{{ '%.40000000f' % 1 }}",
    "{{ '%*d' % (40000000, 1) }}",
    "{{ '%40000000d' | format(1) }}",
    "{{ '{:>40000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=40000000) }}",
    "{{ ('{0}' * 1000000).format('a' * 1000) }}",
    "{{ ('%(x)s' * 100000) % {'x': 'a' * 1000} }}",
    "{{ ('a' * 3000000).replace('a', 'b' * 1000) }}",
    "{{ ('a' * 3000000).replace('', 'b' * 1000) }}",
    "{{ ('a' * 3000000) | replace('a', 'b' * 1000) }}",
    "{{ ('b' * 1000000).join(range(100000) | map('string')) }}",
    "{{ range(100000) | join('b' * 1000000) }}",
    "{{ ('a\n' * 1000000) | indent(1000) }}",
    "{{ [1, [2]] | tojson(indent=40000000) }}",
    "{{ [1, 2] | tojson(separators=('a' * 1000000, ':')) }}",
    "{{ 1.5 | round(40000000, 'floor') }}",
    "{{ ('f' * 3000000) | int(0, 16) }}",
    "{{ 7 ** 3000 * 7 ** 3000 }}",
    "{{ (1).to_bytes(40000000, 'big') }}",
    "{{ strftime_now('%40000000d') }}",
    "{{ [0] * 1000000 }}",
    "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='a') %}"
    "{% for i in range(60) %}{% set ns.x = two(ns.x) %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}{% endset %}",
    "{% set x %}{% for i in range(99999) %}" + "a" * 10000 + "{% endfor %}{% endset %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(90000) %}{% set x = ('ab' * 99999).split('a') %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = range(99999) | list %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = ('ab' * 999999)[::2] %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = 'c' in ('ab' * 999999) %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = ('ab' * 999999).count('c') %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = range(99999) | sort %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = range(99999) | select('eq', -1) | list %}{% endfor %}",
    "{% for i in range(90000) %}{% set x = ('ab' * 99999) | upper %}{% endfor %}",
    "{{ lipsum(n=100000) }}",
    "{{ range(10) | batch(40000000, 'x') | list }}",
    "{{ 'a' | center(40000000) }}",
    "{{ ''.format.func }}{{ strftime_now.func('x') }}",
]
LAUGHS = (
    "{% set ns = namespace(x=['ha']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% endfor %}"
)
BOMBS += [
    LAUGHS + "{{ " + use + " }}"
    for use in (
        "ns.x",
        "ns",
        "ns.x | tojson",
        "ns.x | string",
        "ns.x == [ns.x[0], ns.x[1]]",
        "ns.x ~ ''",
        "'%s' % (ns.x,)",
        "'{}'.format(ns.x)",
        "[ns.x] | join",
        "[ns.x, [ns.x[0], ns.x[0]]] | sort",
        "[ns.x, [ns.x[0], ns.x[0]]] | unique | list",
        "[ns.x].index([ns.x[0], ns.x[0]])",
        "{'a': ns.x}.items()",
        "[ns.x[0], ns.x[0]] in [ns.x]",
        "[ns.x] | select('eq', [ns.x[0], ns.x[0]]) | list",
    )
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("source", BOMBS)
def test_a_template_cannot_stop_the_server(source):
    # Tracing makes a long run ten times longer.
    is_traced = "{% " not in source
    if is_traced:
        tracemalloc.start()
    started_at = time.process_time()
    try:
        with pytest.raises((InvalidRequestError, ModelLoadError)):
            render(source)
        assert not is_traced or tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()
    # A few tenths of a second where nothing else runs.
    assert time.process_time() - started_at < 10


def test_a_long_chat_may_be_gone_through_twice_for_each_message():
    messages = [{"role": "user", "content": "x" * 20}] * 300
    source = (
        "{% for a in messages %}{% for b in messages %}{% if a.role == b.role %}{% endif %}"
        "{% endfor %}{{ a.content }}{{ messages | length }}{% endfor %}"
    )
    assert len(render(source, messages)) == 300 * 23


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '%s-%03d' % ('a', 7) }}", "a-007"),
        ("{{ '{}-{:>4}'.format('a', 7) }}", "a-   7"),
        ("{{ 'a,b'.split(',') | join('+') }}", "a+b"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{{ ', '.join(['a', 'b']) }}", "a, b"),
        ("{{ 'x\ny' | indent(2) }}", "x\n  y"),
        ("{{ 'aXa' | replace('a', 'b') }}{{ 'aa'.replace('a', 'c', 1) }}", "bXbca"),
        ("{{ messages[::-1][0].role }}{{ 'abc'[1:] }}", "userbc"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}", "[('a', 2), ('b', 1)]"),
        ("{{ 'a' ~ 1 ~ none ~ undefined_name }}", "a1None"),
        ("{{ 1 < 2 <= 2 and 'b' in 'abc' and 'role' in messages[0] }}", "True"),
        ("{{ 2.567 | round(1) }}{{ '12' | int + 1 }}", "2.613"),
        ("{{ {'a': [1, {}]} | tojson(indent=1) }}", '{\n "a": [\n  1,\n  {}\n ]\n}'),
        (
            "{% for i in [1, [2]] recursive %}{{ loop(i) if i is sequence else i }}{% endfor %}",
            "12",
        ),
        ("{% for k, v in {'a': 1, 'b': 2}.items() if v > 1 %}{{ loop.length }}{% endfor %}", "1"),
        (
            "{% macro f(x) %}<{{ x }}{{ caller() }}>{% endmacro %}{% call f(1) %}y{% endcall %}",
            "<1y>",
        ),
        ("{% filter upper %}ab{{ 'c' }}{% endfilter %}", "ABC"),
    ],
)
def test_what_templates_do_is_as_it_was(source, expected):
    assert render(source) == expected


def test_a_template_that_is_too_long_fails_the_load():
    with pytest.raises(ModelLoadError, match="1000001 characters"):
        ChatTemplate("a" * 1_000_001, {})


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
