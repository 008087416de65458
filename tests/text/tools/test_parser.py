"""Replies in pieces: what was called, said and thought does not depend on how they were split."""

from __future__ import annotations

import json
import random

import pytest

from headway.text.reasoning import ReasoningStart
from headway.text.reply import TEXT_ONLY, ReplyForm, ReplyParser
from headway.text.tools.deltas import ReplyDelta
from headway.text.tools.forms import FORMS
from tests.text.tools.replies import calls_of, read, write_calls

THOUGHT = "First, <tool_call> is\n\n only {text} [TOOL_CALLS] here."
CASES = [
    (name, thought, text)
    for name, form in FORMS.items()
    for thought in ("", THOUGHT)
    for text in (("", "Let me see: 1 < 2 <tool [TOOL") if form.follows_text else ("",))
]


def cuts(text: str, seed: int) -> list[str]:
    """The text in pieces: single characters, all at once, or cut at random."""
    if seed < 2:
        return list(text) if seed else [text]
    draw = random.Random(seed)
    places = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "thought", "text"), CASES)
def test_any_split_gives_the_same_reply(name: str, thought: str, text: str) -> None:
    form = FORMS[name]
    calls = calls_of(form)
    reply = write_calls(form, calls)
    if text:
        reply = f"{text} \n\n{reply}"
    if thought:
        reply = f"\n<think>\n{thought}\n</think>\n\n{reply}"
    for seed in range(25):
        delta, is_complete = read(name, cuts(reply, seed))
        assert (delta.reasoning, delta.text, is_complete) == (thought, text, True)
        found = tuple((one.name, json.loads(one.arguments)) for one in delta.calls)
        assert found == calls, seed


@pytest.mark.parametrize("name", [*FORMS, ""])
def test_every_prefix_of_a_reply_is_a_cut_reply(name: str) -> None:
    """Nothing is lost, invented or said twice, wherever max_tokens ends a reply."""
    form = FORMS[name or "hermes"]
    reply = f"<think>why</think>{write_calls(form, calls_of(form))}"
    whole, _ = read(name, [reply])
    for end in range(0, len(reply), 3):
        delta, is_complete = read(name, list(reply[:end]))
        assert (delta, is_complete) == read(name, [reply[:end]])
        assert not (is_complete and delta.text)
        for part, full in zip(delta.calls, whole.calls, strict=False):
            assert part.name == full.name and full.arguments.startswith(part.arguments)
        if name and not delta.calls and end > len("<think>why</think>"):
            rest = reply[len("<think>why</think>") : end]
            assert delta.text == rest  # a call without a name yet is text


def test_text_that_is_no_call_stays_text() -> None:
    for form, text in (
        ("hermes", "a <tool_call> b"),
        ("hermes", "<tool_call>\n{'name': 1}"),
        ("llama", 'see {"name": "now", "parameters": {}}'),
        ("llama", "{x}"),
        ("mistral", "[TOOL_CALLS] none"),
        ("qwen-xml", "<tool_call>{}"),
    ):
        for pieces in ([text], list(text)):
            delta, is_complete = read(form, pieces)
            assert not is_complete and not delta.calls
            assert delta.text.split() == text.split()


def test_a_marker_is_held_back_and_nothing_else() -> None:
    parser = ReplyParser(ReplyForm("hermes"))
    assert parser.feed("so <tool") == ReplyDelta(text="so")
    assert parser.feed("s are").text == " <tools are"
    assert parser.feed(" \n").text == ""
    assert parser.feed("<").text == ""
    assert parser.finish().text == " \n<"


@pytest.mark.parametrize(
    ("start", "reply", "reasoning", "text"),
    [
        ("never", "<think>a</think>b", "", "<think>a</think>b"),
        ("optional", "<think>\na\n</think>\n\nb\n", "a", "b\n"),
        ("optional", " <thin", "", " <thin"),
        ("optional", "b <think>a</think>", "", "b <think>a</think>"),
        ("optional", " " * 65 + "<think>a</think>", "", " " * 65 + "<think>a</think>"),
        ("open", "\na </thin </think>b", "a </thin", "b"),
        ("open", "a\n</thi", "a\n</thi", ""),
        ("open", "</think>b", "", "b"),
    ],
)
def test_reasoning(start: str, reply: str, reasoning: str, text: str) -> None:
    for seed in range(12):
        for form in ("", "hermes"):
            delta, _ = read(form, cuts(reply, seed), start)
            assert (delta.reasoning, delta.text) == (reasoning, text), (seed, form)


def test_forms_travel_as_plain_values() -> None:
    assert ReplyForm("", ReasoningStart("never")) == TEXT_ONLY and TEXT_ONLY.is_known
    assert ReplyForm("hermes").is_known and not ReplyForm("no such form").is_known
