"""Reasoning ends when its budget is used up, whatever the tokens and wherever they are computed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from headway.text import Tokenizer
from headway.text.grammar import json_grammar, lark_grammar, with_notes
from headway.text.matchers import Matchers
from headway.text.reasoning import ReasoningStart
from headway.text.thinking import NOTE, ThinkingBudget, budget_of
from headway.text.tools.grammar import Markers, reply_grammar
from tests.grammar.conftest import VOCAB_SIZE
from tests.grammar.test_grammars import allowed_ids

pytestmark = pytest.mark.model

ANSWER = json_grammar({"type": "boolean"})


def grammar_of(tokenizer: Tokenizer, max_tokens: int, start: ReasoningStart) -> str:
    close_ids = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    budget = ThinkingBudget(max_tokens, close_ids, start)
    grammar = with_notes(reply_grammar(None, Markers(), start, ANSWER), {NOTE: budget.as_note()})
    assert budget_of(grammar) == budget
    return grammar


def mask_of(matchers: Matchers, grammar: str, token_ids: list[int]) -> bytes:
    matcher, mask = matchers.matcher(grammar), np.empty(VOCAB_SIZE // 32, dtype=np.int32)
    matcher.consume(token_ids)
    matcher.write_mask(mask)
    return mask.tobytes()


@pytest.mark.parametrize("start", [ReasoningStart.OPEN, ReasoningStart.OPTIONAL])
def test_the_closing_tag_is_forced(
    matchers: Matchers, smollm: Tokenizer, start: ReasoningStart
) -> None:
    close_ids = smollm.encode("</think>", add_special_tokens=False)
    for max_tokens in (0, 1, 7, 30):
        grammar = grammar_of(smollm, max_tokens, start)
        for seed in range(5):
            draw, matcher = random.Random(seed), matchers.matcher(grammar)
            token_ids: list[int] = []
            if start is ReasoningStart.OPTIONAL:
                token_ids = smollm.encode("\n<think>", add_special_tokens=False)
                matcher.consume(token_ids)
            num_open = len(token_ids)
            while b"</think>" not in b"".join(map(smollm.token_bytes, token_ids)):
                ids = allowed_ids(matcher)
                token_id = int(draw.choice(ids))
                matcher.consume([token_id])
                token_ids.append(token_id)
                # At most a character of four bytes is completed first.
                assert len(token_ids) <= max(max_tokens, num_open) + 3 + len(close_ids)
            # The state follows from the tokens: the same masks when they are read again.
            for at in range(num_open, len(token_ids), 5):
                again = matchers.matcher(grammar)
                again.consume(token_ids[:at])
                assert token_ids[at] in allowed_ids(again)
            rest = allowed_ids(matcher)
            assert {smollm.token_text(int(one)).strip() for one in rest} >= {"true", "false"}


def test_replies_without_reasoning_are_left_alone(matchers: Matchers, smollm: Tokenizer) -> None:
    grammar = grammar_of(smollm, 0, ReasoningStart.OPTIONAL)
    plain = reply_grammar(None, Markers(), ReasoningStart.OPTIONAL, ANSWER)
    for text in ("", "<th", "true"):
        token_ids = smollm.encode(text, add_special_tokens=False)
        assert mask_of(matchers, grammar, token_ids) == mask_of(matchers, plain, token_ids)


def test_a_caller_writes_no_notes() -> None:
    assert budget_of(lark_grammar('// thinking: {"max_tokens": 1}\nstart: "a"')) is None
