"""Prompt log-probabilities in the engine core: every position once, whatever the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headway.core.draft import MAX_SCORED_ROWS
from headway.core.events import Embedded, Finished, PromptScored
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.executors.fake import embedding_of, score_of
from tests.support.harness import Harness, expected_output, make_request, own_tokens


def expected_scores(prompt: Sequence[int]) -> list[TokenLogprobs]:
    return [score_of(prompt[:at], prompt[at]) for at in range(1, len(prompt))]


def scores_of(harness: Harness, request_id: str) -> list[TokenLogprobs]:
    """Return the scores of a request; raise if a position is missing or comes twice."""
    found: list[TokenLogprobs] = []
    for event in harness.events:
        if isinstance(event, PromptScored) and event.request_id == request_id:
            assert event.start == 1 + len(found)
            found += event.logprobs
    return found


def ends_of(harness: Harness) -> dict[str, FinishReason]:
    return {one.request_id: one.reason for one in harness.events if isinstance(one, Finished)}


@pytest.mark.parametrize("budget", [2, 3, 7, 32, 500])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_chunks_score_every_token_once(budget: int, max_tokens: int) -> None:
    harness = Harness(max_num_batched_tokens=budget)
    for request_id, length in (("a", 1), ("b", 2), ("c", 21)):
        harness.add(request_id, length, max_tokens=max_tokens, prompt_logprobs=0)
    harness.run()
    for request_id, length in (("a", 1), ("b", 2), ("c", 21)):
        prompt = own_tokens(request_id, length)
        assert scores_of(harness, request_id) == expected_scores(prompt)
        assert harness.output(request_id) == expected_output(prompt, max_tokens)
    assert set(ends_of(harness).values()) == {FinishReason.LENGTH}


def test_a_scored_token_takes_two_of_the_budget() -> None:
    harness = Harness(max_num_batched_tokens=32)
    harness.add("a", 100, prompt_logprobs=0)
    plan = harness.begin()
    assert plan is not None
    assert (plan.num_tokens, plan.num_scored_rows) == (16, 16)
    harness.end()


def test_a_step_scores_a_bounded_number_of_tokens() -> None:
    harness = Harness(num_blocks=2000, max_num_batched_tokens=4000)
    harness.add("a", 300, prompt_logprobs=0, max_tokens=1)
    harness.add("b", 300, prompt_logprobs=0, max_tokens=1)
    harness.add("c", 300, max_tokens=1)
    plan = harness.begin()
    assert plan is not None
    lengths = {item.request_id: len(item.token_ids) for item in plan.scheduled}
    assert lengths == {"a": MAX_SCORED_ROWS, "c": 300}
    harness.end()
    harness.run()
    for request_id in "ab":
        assert scores_of(harness, request_id) == expected_scores(own_tokens(request_id, 300))


def test_the_prefix_cache_is_written_and_not_read() -> None:
    harness = Harness()
    prompt = list(range(40))
    harness.add("a", prompt, max_tokens=1)
    harness.run()
    harness.add("b", prompt, max_tokens=1, prompt_logprobs=0)
    assert harness.step()["b"].start == 0
    harness.run()
    assert scores_of(harness, "b") == expected_scores(prompt)
    other = list(range(100, 140))
    harness.add("c", other, max_tokens=0, prompt_logprobs=0)
    harness.run()
    harness.add("d", other, max_tokens=1)
    assert harness.step()["d"].start == 36


@pytest.mark.parametrize("method", ["auto", "recompute", "checkpoint"])
def test_preempted_prompts_are_scored_once(method: str) -> None:
    """Requests that preempt come at every step of a prompt in chunks."""
    for num_steps in range(12):
        harness = Harness(
            num_blocks=14,
            max_num_batched_tokens=8,
            scheduling_policy="fair",
            preemption_method=method,
            num_slots=0 if method == "recompute" else 8,
        )
        spot = Terms("spot", is_spot=True)
        harness.add("a", 40, max_tokens=3, prompt_logprobs=0, terms=spot)
        harness.steps(num_steps)
        harness.add("b", 30, max_tokens=3, terms=Terms("paid"))
        harness.run()
        assert scores_of(harness, "a") == expected_scores(own_tokens("a", 40))
        assert harness.output("a") == expected_output(own_tokens("a", 40), 3)


def test_samples_share_the_scores_of_their_prompt() -> None:
    harness = Harness()
    harness.add("a", 9, n=3, max_tokens=2, prompt_logprobs=0)
    harness.run()
    assert scores_of(harness, "a") == expected_scores(own_tokens("a", 9))
    assert not scores_of(harness, "a#1")
    for index in range(3):
        name = "a" if index == 0 else f"a#{index}"
        assert harness.output(name) == expected_output(own_tokens("a", 9), 2, index=index)


@pytest.mark.parametrize("num_scored", [1, 2, 4, 5, 17, 39, 40])
def test_a_resent_request_is_scored_from_where_it_was(num_scored: int) -> None:
    """The cache is read as far as tokens are scored, and no further."""
    harness = Harness()
    prompt = list(range(40))
    harness.add("a", prompt, max_tokens=1)
    harness.run()
    resent = make_request("b", prompt, max_tokens=1, prompt_logprobs=0, num_scored=num_scored)
    harness.core.add(resent, is_resent=True)
    assert harness.step()["b"].start == (num_scored - 1) // 4 * 4
    harness.run()
    events = [one for one in harness.events if isinstance(one, PromptScored)]
    found = [score for one in events for score in one.logprobs]
    assert found == expected_scores(prompt)[num_scored - 1 :]
    assert not events or events[0].start == num_scored


def test_scored_tokens_count_double_in_fair_shares() -> None:
    harness = Harness(scheduling_policy="fair")
    harness.add("a", 20, max_tokens=0, prompt_logprobs=0, terms=Terms("scored"))
    harness.add("b", 20, max_tokens=0, terms=Terms("plain"))
    harness.run()
    accounts = harness.scheduler.accounts
    scored, plain = accounts.get("scored"), accounts.get("plain")
    assert scored is not None and plain is not None
    assert scored.served == 2 * plain.served


def test_a_prompt_without_output_holds_no_blocks_after_its_end() -> None:
    harness = Harness(num_blocks=10)
    harness.add("a", 40, max_tokens=0)
    harness.run()
    assert ends_of(harness) == {"a": FinishReason.LENGTH}
    assert harness.scheduler.kv.pool.num_used == 0


@pytest.mark.parametrize("budget", [3, 7, 500])
def test_an_embedding_comes_once_with_the_last_chunk(budget: int) -> None:
    """Also from a prefix cache that has all but the last token."""
    harness = Harness(max_num_batched_tokens=budget)
    prompt = list(range(21))
    for request_id in "ab":
        harness.add(request_id, prompt, max_tokens=0, is_embedding=True)
        harness.run()
        (event,) = harness.seen(Embedded, request_id)
        assert event.values == embedding_of(prompt).values
        assert harness.finish(request_id).reason is FinishReason.LENGTH
        assert harness.output(request_id) == []
