"""Who is suspected of taking engines down: the culprit is found, nobody else, in few engines."""

from __future__ import annotations

from math import ceil, inf, log2

import pytest

from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.core.params import SamplingParams
from headway.engine.client.streams import RequestStream
from headway.engine.client.suspects import CALM_S, Suspects
from headway.engine.process.messages import AddRequest
from headway.engine.supervise.loss import NUM_CLEARING_TOKENS, EngineLoss
from headway.engine.supervise.restart_policy import RestartLimits
from headway.text import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("suspects") / "tokenizer.gguf"
    return Tokenizer.from_gguf(write_byte_level(path, pre="gpt-2"))


class Engines:
    """Engines one after another, all with the same requests, one of which may be deadly."""

    def __init__(self, tokenizer: Tokenizer, num_requests: int, num_tokens_in_engine: int) -> None:
        params = SamplingParams(max_tokens=100)
        commands = [AddRequest(f"r{at}", [1, 2], params, 0, 0.0) for at in range(num_requests)]
        self.streams = [RequestStream(command, tokenizer) for command in commands]
        self.suspects = Suspects()
        self.num_lost = 0
        self.num_trials = 0
        for stream in self.streams:
            stream.num_cached_tokens = 0
            self.send(stream)
            self.gain(stream, num_tokens_in_engine)

    def send(self, stream: RequestStream) -> None:
        stream.commands(0.0)
        stream.admit(stream.request_id)

    def gain(self, stream: RequestStream, num_tokens: int) -> None:
        stream.count_tokens(stream.request_id, num_tokens)

    def lose(
        self, *ids: str, has_failed: bool = False, is_shared: bool = False
    ) -> RequestStream | None:
        """An engine is lost with these in its step."""
        self.num_lost += 1
        sent = [one for one in self.streams if one.is_sent]
        loss = EngineLoss(frozenset(ids), has_failed, is_shared)
        culprit = self.suspects.lose_engine(sent, loss)
        if culprit is not None:
            self.streams.remove(culprit)
        for stream in self.streams:
            stream.lose_engine(0.0)
        return culprit

    def lose_all(self, has_failed: bool = False) -> RequestStream | None:
        ids = () if has_failed else [one.request_id for one in self.streams if one.is_sent]
        return self.lose(*ids, has_failed=has_failed)

    def recover(self, deadly: RequestStream | None = None) -> bool:
        """Send everybody to one engine. False if the deadly one ended it."""
        while True:
            group = self.suspects.begin_trial(0.0, -inf)
            self.num_trials += bool(group)
            others = [
                one
                for one in self.streams
                if not one.is_sent and one not in self.suspects and self.suspects.may_send(one)
            ]
            for stream in (*group, *others):
                self.send(stream)
            if deadly is not None and deadly.is_sent:
                return False
            if not group and not others:
                return True
            for stream in (*group, *others):
                self.gain(stream, NUM_CLEARING_TOKENS)


@pytest.mark.parametrize("has_failed", [False, True])
@pytest.mark.parametrize("num_tokens_in_engine", [0, 50])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 7, 16, 64])
def test_the_culprit_is_found_in_few_engines(
    tokenizer: Tokenizer, num_requests: int, num_tokens_in_engine: int, has_failed: bool
) -> None:
    """In a step, or between steps where the journal names nobody."""
    for at in range(num_requests):
        engines = Engines(tokenizer, num_requests, num_tokens_in_engine)
        deadly = engines.streams[at]
        culprit = engines.lose_all(has_failed)
        while culprit is None:
            assert not engines.recover(deadly)
            culprit = engines.lose_all(has_failed)
        assert culprit is deadly
        assert engines.num_lost <= 2 + ceil(log2(num_requests)) + has_failed
        assert engines.recover()
        assert all(one.is_sent and not one.num_crashes for one in engines.streams)


def test_a_newcomer_that_kills_is_found_first(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, 16, 50)
    deadly = engines.streams[-1]
    engines.send(deadly)  # has gained nothing
    assert engines.lose_all() is None
    assert not engines.recover(deadly)
    assert engines.lose_all() is deadly
    assert engines.num_lost == 2


@pytest.mark.parametrize("num_new", [0, 3, 16])
def test_without_a_culprit_few_trials_bring_everybody_back(
    tokenizer: Tokenizer, num_new: int
) -> None:
    engines = Engines(tokenizer, 16, 50)
    for stream in engines.streams[:num_new]:
        engines.send(stream)  # has gained nothing
    assert engines.lose_all() is None
    assert engines.recover()
    assert engines.num_trials == (2 if num_new == 3 else 1)
    assert all(one.is_sent for one in engines.streams)


@pytest.mark.parametrize("has_failed", [False, True])
def test_an_engine_lost_between_steps_leaves_no_suspect(
    tokenizer: Tokenizer, has_failed: bool
) -> None:
    engines = Engines(tokenizer, 16, 50)
    assert engines.lose(has_failed=has_failed) is None
    assert not any(one in engines.suspects for one in engines.streams)
    assert engines.recover()
    assert engines.num_trials == 0


def test_only_those_in_the_step_are_suspects(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, 8, 50)
    engines.lose("r1", "r5")
    assert [one in engines.suspects for one in engines.streams] == [at in (1, 5) for at in range(8)]


def test_a_bystander_is_not_blamed_for_a_newcomer(tokenizer: Tokenizer) -> None:
    """It was in two lost engines in a row, but another new one was there too."""
    engines = Engines(tokenizer, 2, 50)
    bystander, deadly = engines.streams
    engines.lose(bystander.request_id)
    assert engines.suspects.begin_trial(0.0, -inf) == [bystander]
    for stream in (bystander, deadly):
        engines.send(stream)
    assert engines.lose_all() is None
    # Alone, it is cleared; then the other one kills again.
    assert not engines.recover(deadly)
    assert engines.lose_all() is deadly
    assert bystander.num_crashes == 0


def test_requests_that_never_ran_follow_when_every_suspect_is_sent(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, 4, 50)
    new = engines.streams.pop()
    new.num_cached_tokens = None
    engines.send(engines.streams[0])  # has gained nothing, and is tried first
    engines.lose_all()
    first = engines.suspects.begin_trial(0.0, -inf)
    assert not engines.suspects.may_send(new)
    assert engines.suspects.begin_trial(0.0, -inf) == []
    for stream in first:
        engines.send(stream)
        engines.gain(stream, 2)
    assert engines.suspects.begin_trial(0.0, -inf)
    assert engines.suspects.may_send(new)


def test_time_in_engines_counts_as_waiting_and_no_other(tokenizer: Tokenizer) -> None:
    command = AddRequest("r", [1, 2], SamplingParams(max_tokens=9), 0, arrived_at=10.0)
    stream = RequestStream(command, tokenizer)
    assert [one.waited_s for one in stream.commands(11.0)] == [None]  # since it arrived
    stream.lose_engine(15.0)
    assert [one.waited_s for one in stream.commands(40.0)] == [5.0]
    stream.lose_engine(42.0)
    assert [one.waited_s for one in stream.commands(60.0)] == [7.0]
    stream.admit("r")
    stream.lose_engine(90.0)  # it ran for half a minute
    assert [one.waited_s for one in stream.commands(99.0)] == [0.0]
    stream.admit("r")
    stream.preempt("r", 101.0)
    stream.lose_engine(104.0)
    assert [one.waited_s for one in stream.commands(110.0)] == [3.0]


def test_a_request_that_came_while_there_was_no_engine_has_not_waited(
    tokenizer: Tokenizer,
) -> None:
    command = AddRequest("r", [1, 2], SamplingParams(max_tokens=9), 0, arrived_at=10.0)
    stream = RequestStream(command, tokenizer)
    stream.is_awaiting_engine = True
    assert [one.waited_s for one in stream.commands(50.0)] == [0.0]


def test_a_long_prompt_alone_on_trial_does_not_hold_up_others_until_it_is_computed(
    tokenizer: Tokenizer,
) -> None:
    engines = Engines(tokenizer, 3, 50)
    long, second, other = engines.streams
    engines.lose(long.request_id)
    assert engines.suspects.begin_trial(0.0, -inf) == [long]
    for stream in (long, second):
        engines.send(stream)
    engines.lose(long.request_id, second.request_id)
    assert engines.suspects.begin_trial(0.0, -inf) == [long]
    engines.send(long)
    engines.suspects.record_steps(2 * NUM_CLEARING_TOKENS - 1, 0.0)
    assert engines.suspects.begin_trial(1000.0, -inf) == []
    assert not engines.suspects.may_send(other)
    engines.suspects.record_steps(1, 0.0)
    assert engines.suspects.begin_trial(1000.0, -inf) == [second]
    assert engines.suspects.may_send(other)
    assert long.num_crashes == 2, "it is not cleared"


@pytest.mark.parametrize("num_requests", [1, 2, 16])
@pytest.mark.parametrize("num_steps", [1, 20, 100, 250])
def test_a_long_prompt_that_kills_late_is_found_within_the_restart_budget(
    tokenizer: Tokenizer, num_steps: int, num_requests: int
) -> None:
    """The first request takes its engine down after some chunks; others keep arriving."""
    engines = Engines(tokenizer, num_requests, 50)
    deadly, culprit = engines.streams[0], engines.lose_all()
    num_arrived = 0
    while culprit is None:
        num_left = num_steps
        while num_left:
            group = engines.suspects.begin_trial(0.0, -inf)
            rest = [one for one in engines.streams if one not in group and not one.is_sent]
            may_send = engines.suspects.may_send
            rest = [one for one in rest if one not in engines.suspects and may_send(one)]
            for stream in (*group, *rest):
                engines.send(stream)
            num_left -= deadly.is_sent
            for stream in engines.streams:
                if stream.is_sent and stream is not deadly:
                    engines.gain(stream, 1)
            engines.suspects.record_steps(1, 0.0)
            num_arrived += 1
            if num_arrived % 4 == 0:
                command = AddRequest(f"n{num_arrived}", [1], SamplingParams(), 0, 0.0)
                engines.streams.append(RequestStream(command, tokenizer))
        culprit = engines.lose_all()
    assert culprit is deadly
    assert engines.num_lost <= RestartLimits().max_restarts


def test_a_request_is_tried_alone_only_when_no_engine_was_lost_lately(
    tokenizer: Tokenizer,
) -> None:
    engines = Engines(tokenizer, 1, 0)
    (stream,) = engines.streams
    for _ in range(2):
        assert engines.lose(has_failed=True) is None
        engines.send(stream)
    stream.lose_engine(0.0)
    suspects = engines.suspects
    assert suspects.begin_trial(10.0 + 0.9 * CALM_S, unexplained_at=10.0) == []
    assert suspects.is_under_way
    # An engine that is lost meanwhile, without the request, is no proof.
    assert suspects.lose_engine([], EngineLoss(has_failed=True)) is None
    assert suspects.begin_trial(11.0 + CALM_S, unexplained_at=11.0) == [stream]
    engines.send(stream)
    assert engines.lose(has_failed=True) is stream


def test_a_failure_that_another_frontend_may_have_caused_is_no_proof(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, 1, 0)
    (stream,) = engines.streams
    engines.lose_all()
    for _ in range(3):
        assert not engines.recover(stream)
        assert engines.lose(stream.request_id, is_shared=True) is None
    assert not engines.recover(stream) and engines.suspects.is_alone
    assert engines.lose(stream.request_id) is stream


def test_a_request_that_the_process_never_had_is_not_blamed(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, 1, 0)
    (stream,) = engines.streams
    engines.lose_all()
    for _ in range(3):
        engines.recover(stream)
        held = frozenset({stream.request_id})
        loss = EngineLoss(has_failed=True, held_ids=held)
        assert engines.suspects.lose_engine([stream], loss) is None
        stream.lose_engine(0.0)
    assert stream.num_crashes == 1


def test_a_request_that_hangs_in_its_first_step_is_on_trial_until_the_engine_is_replaced(
    tokenizer: Tokenizer,
) -> None:
    """The engine reports nothing of it, not even that it has it."""
    engines = Engines(tokenizer, 1, 0)
    (stream,) = engines.streams
    engines.lose_all()
    assert engines.suspects.begin_trial(0.0, -inf) == [stream]
    stream.commands(0.0)
    assert engines.suspects.begin_trial(60.0, -inf) == []
    assert engines.lose_all() is stream


def test_an_engine_that_ends_no_step_ends_no_trial(tokenizer: Tokenizer) -> None:
    """It hangs, perhaps in the first step of the request, which it has said it has."""
    engines = Engines(tokenizer, 1, 0)
    (stream,) = engines.streams
    engines.lose_all()
    suspects = engines.suspects
    assert suspects.begin_trial(0.0, -inf) == [stream]
    stream.commands(0.0)
    stream.reach(1.0)
    suspects.record_steps(1, 1.0)
    assert suspects.begin_trial(60.0, -inf) == [] and suspects.is_under_way
    suspects.record_steps(1, 7.0)
    assert suspects.begin_trial(60.0, -inf) == [] and not suspects.is_under_way


def test_a_failure_between_steps_is_no_proof_with_another_new_request(
    tokenizer: Tokenizer,
) -> None:
    engines = Engines(tokenizer, 2, 0)
    suspect, other = engines.streams
    other.is_sent = False
    engines.lose(suspect.request_id)
    assert engines.suspects.begin_trial(0.0, -inf) == [suspect]
    engines.send(suspect)
    engines.send(other)
    assert engines.lose(has_failed=True) is None
    # Alone, it is proof.
    assert engines.suspects.begin_trial(0.0, -inf) == [suspect]
    engines.send(suspect)
    other.is_sent = False
    assert engines.lose(has_failed=True) is suspect
