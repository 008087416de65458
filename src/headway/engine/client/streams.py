"""One live request as the API process knows it: what it asked for, what it has been given, and
from there how to ask for the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from headway.core.events import Finished
from headway.core.params import SamplingParams
from headway.core.request import FinishReason, sample_id
from headway.engine.client.outputs import RequestMetrics, SampleDelta, SampleStream, sample_streams
from headway.engine.process.messages import AddRequest
from headway.errors import HeadwayError, SlowReaderError
from headway.text import Tokenizer

MAX_UNREAD_BYTES = 2**20
"""Output a consumer may be behind by, before it is taken for one that does not read."""
NUM_TRIAL_TOKENS = 2
"""Tokens that show that a request survives its prefill and a decode."""
NUM_CLEARING_TOKENS = 8
"""Tokens in one engine that clear a request of what it was suspected of."""
_TOKEN_BYTES = 32
_LOGPROB_BYTES = 64


class QueueTimes:
    """How long each sample of a request has waited in engines for a place.

    Time in which a sample ran, or in which there was no engine, does not count.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a sample waits in the engine that is running."""
        return bool(self._since)

    def waited_s(self, request_id: str) -> float:
        """How long the wait that is not over has lasted in engines before this one."""
        return self._waited_s.get(request_id, 0.0)

    def begin(self, request_id: str, at: float) -> None:
        """The sample was sent to an engine, or preempted there."""
        self._since[request_id] = at

    def end(self, request_id: str) -> None:
        """The sample was admitted, or ended."""
        self._since.pop(request_id, None)
        self._waited_s.pop(request_id, None)

    def pause(self, at: float) -> None:
        """The engine is lost; what waited there waits on in the next."""
        for request_id, since in self._since.items():
            self._waited_s[request_id] = self.waited_s(request_id) + at - since
        self._since.clear()


class RequestStream:
    """The deltas of one request on their way to its consumer."""

    def __init__(self, command: AddRequest, tokenizer: Tokenizer) -> None:
        self.command = command
        self.request_id = command.id
        self.metrics = RequestMetrics(arrived_at=command.arrived_at)
        self.samples: dict[str, SampleStream] = {
            sample_id(command.id, sample.index): sample
            for sample in sample_streams(command.params, tokenizer, command.token_ids)
        }
        self.is_sent = False
        """Whether the engine that is running now has been told of it."""
        self._is_resent = False
        """Whether one before it had been."""
        self.is_awaiting_engine = False
        """Whether it had to wait until there was an engine to send it to."""
        self.num_crashes = 0
        """Engines that went down while computing it, since it was last cleared."""
        self.is_admitted = False
        """Whether the engine that is running now has given it a seat."""
        self._queue_times = QueueTimes()
        self._num_tokens_in_engine: dict[str, int] = {}
        self._unread: list[SampleDelta] = []
        self._num_unread_bytes = 0
        self._error: HeadwayError | None = None
        self._wake = asyncio.Event()

    @property
    def params(self) -> SamplingParams:
        return self.command.params

    @property
    def unfinished_ids(self) -> list[str]:
        return [name for name, sample in self.samples.items() if not sample.is_finished]

    @property
    def has_more(self) -> bool:
        """Samples may have ended while the consumer was busy: what they left must be taken too."""
        return bool(self._unread or self._error or self.unfinished_ids)

    @property
    def num_output_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples.values())

    @property
    def num_tokens_in_engine(self) -> int:
        """Tokens that each of its samples has gained, at least, in the engine that is running."""
        return min(self._num_tokens_in_engine.values(), default=NUM_CLEARING_TOKENS)

    @property
    def is_unproven(self) -> bool:
        """The engine that is running has computed too little of it to say that it is harmless."""
        return self.num_tokens_in_engine < NUM_CLEARING_TOKENS

    @property
    def is_waiting(self) -> bool:
        """Whether a sample of it waits for a place in the engine that is running."""
        return self._queue_times.is_waiting

    @property
    def has_passed_trial(self) -> bool:
        """Enough for the next one under suspicion to be sent after it."""
        return self.num_tokens_in_engine >= (
            NUM_TRIAL_TOKENS if self.num_crashes < 2 else NUM_CLEARING_TOKENS
        )

    def commands(self, now: float) -> Sequence[AddRequest]:
        """What to send so that every unfinished sample continues from where it is."""
        command = self.command
        is_delayed = self._is_resent or self.is_awaiting_engine
        # A prompt forks at its first token: until then it is one request.
        if not self.num_output_tokens:
            waited_s = self._queue_times.waited_s(command.id) if is_delayed else None
            commands = [
                msgspec.structs.replace(command, is_resent=self._is_resent, waited_s=waited_s)
            ]
        else:
            params = replace(command.params, n=1)
            commands = [
                AddRequest(
                    id=name,
                    token_ids=[*command.token_ids, *sample.token_ids],
                    params=params,
                    seed=command.seed,
                    arrived_at=command.arrived_at,
                    priority=command.priority,
                    terms=command.terms,
                    index=sample.index,
                    num_prompt_tokens=len(command.token_ids),
                    is_resent=True,
                    waited_s=self._queue_times.waited_s(name),
                )
                for name, sample in self.samples.items()
                if not sample.is_finished
            ]
        self._num_tokens_in_engine = {one.id: 0 for one in commands}
        for one in commands:
            self._queue_times.begin(one.id, now if is_delayed else command.arrived_at)
        self.is_sent, self._is_resent, self.is_admitted = True, True, False
        return commands

    def admit(self, request_id: str) -> None:
        """The engine gave this sample a place."""
        self.is_admitted = True
        self._queue_times.end(request_id)

    def preempt(self, request_id: str, at: float) -> None:
        """The engine took the place of this sample away."""
        self._queue_times.begin(request_id, at)

    def lose_engine(self, at: float) -> None:
        """No engine has it now."""
        self.is_sent, self.is_awaiting_engine = False, True
        self._num_tokens_in_engine = dict.fromkeys(self._num_tokens_in_engine, 0)
        self._queue_times.pause(at)

    def count_tokens(self, request_id: str, num_tokens: int) -> None:
        """The engine computed tokens of this sample, and lives."""
        if request_id in self._num_tokens_in_engine:
            self._num_tokens_in_engine[request_id] += num_tokens
        self._clear()

    def finish_sample(self, request_id: str) -> None:
        """The engine ended this sample, and lives."""
        self._num_tokens_in_engine.pop(request_id, None)
        self._queue_times.end(request_id)
        self._clear()

    def finish_events(self, at: float, reason: FinishReason, message: str) -> list[Finished]:
        """The events that say that nothing more comes of it, one for each sample there is: a
        prompt that has not forked is one."""
        names = self.unfinished_ids if self.num_output_tokens else [self.request_id]
        return [
            Finished(name, at, reason, self.samples[name].num_tokens, message)
            for name in names
            if not self.samples[name].is_finished
        ]

    def _clear(self) -> None:
        if not self.is_unproven:
            self.num_crashes = 0

    def put(self, delta: SampleDelta) -> None:
        """Add output. SlowReaderError if the consumer leaves too much of it unread."""
        self._num_unread_bytes += _size(delta)
        if self._num_unread_bytes > MAX_UNREAD_BYTES:
            raise SlowReaderError(f"{self._num_unread_bytes} bytes of output have not been read")
        self._unread.append(delta)
        self._wake.set()

    def fail(self, error: HeadwayError) -> None:
        """End it, for its consumer, after what is still unread."""
        self._error = error
        self._wake.set()

    async def take(self) -> list[SampleDelta]:
        """Everything that arrived since the last call; waits for something."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        unread, self._unread = self._unread, []
        self._num_unread_bytes = 0
        return unread


def _size(delta: SampleDelta) -> int:
    num_scores = sum(1 + len(one.top_ids) for one in delta.logprobs or ())
    return len(delta.text) + _TOKEN_BYTES * len(delta.token_ids) + _LOGPROB_BYTES * num_scores
