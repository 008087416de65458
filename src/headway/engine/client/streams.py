"""One live request in the API process: command, output, unread deltas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from headway.core.events import Finished, PromptScored, TokensEmitted
from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason, sample_id
from headway.engine.client.outputs import SampleDelta, SampleStream, sample_streams
from headway.engine.client.transcript import MAX_SIZE, Cursor, Transcript
from headway.engine.process.messages import AddRequest, Handover, Past, SampleRecord
from headway.engine.supervise.loss import NUM_CLEARING_TOKENS
from headway.errors import (
    HeadwayError,
    InvalidRequestError,
    ReaderReplacedError,
    SlowReaderError,
)
from headway.text import Tokenizer

MAX_UNREAD_BYTES = 2**20
"""Unread output after which a consumer counts as a slow reader."""
NUM_TRIAL_TOKENS = 2
"""Tokens after which a request has survived its prefill and a decode."""
_TOKEN_BYTES = 32
_LOGPROB_BYTES = 64


class QueueTimes:
    """Time that each sample of a request has waited in engines for admission.

    Time in which a sample ran, or in which there was no engine, does not count.
    """

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a sample waits in the current engine."""
        return bool(self._since)

    def waited_s(self, request_id: str) -> float:
        """Return the seconds that the current wait has lasted in earlier engines."""
        return self._waited_s.get(request_id, 0.0)

    def begin(self, request_id: str, at: float) -> None:
        """Start the wait of a sample that was sent to an engine or preempted there."""
        self._since[request_id] = at

    def end(self, request_id: str) -> None:
        """End the wait of a sample that was admitted or has ended."""
        self._since.pop(request_id, None)
        self._waited_s.pop(request_id, None)

    def pause(self, at: float) -> None:
        """Stop all waits because the engine is lost; they continue in the next engine."""
        for request_id, since in self._since.items():
            self._waited_s[request_id] = self.waited_s(request_id) + at - since
        self._since.clear()


class RequestStream:
    """One live request: its samples, its unread deltas, and what the engine has of it."""

    def __init__(self, command: AddRequest, tokenizer: Tokenizer) -> None:
        self.command = command
        self.request_id = command.id
        self.samples: dict[str, SampleStream] = {
            sample_id(command.id, sample.index): sample
            for sample in sample_streams(command.params, tokenizer, command.token_ids)
        }
        self.is_sent = False
        """Whether the current engine has this request."""
        self._is_resent = False
        """Whether an engine has had this request: the next one gets it as resent."""
        self.is_awaiting_engine = False
        """Whether this request waits, or waited, for an engine to be sent to."""
        self.lost_at: float | None = None
        """When this request lost its engine; None while it has one, or had none yet."""
        self.reached_at: float | None = None
        """When the current engine said that it has this request; None before."""
        self.numerics = ""
        """Numerics class of its tokens; empty if unknown."""
        self._num_attempts = 0
        self.num_crashes = 0
        """Engines that failed while computing this request, since it was last cleared."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission; None before it."""
        self._queue_times = QueueTimes()
        self._num_tokens_in_engine: dict[str, int] = {}
        self._unread: list[SampleDelta] = []
        self._num_unread_bytes = 0
        self._error: HeadwayError | None = None
        self._wake = asyncio.Event()
        self.transcript = Transcript(command.params.n) if command.note else None
        """Output so far, if the request is resumable."""
        self._replay: deque[SampleDelta] = deque()
        """Output that is delivered again, before what is unread."""
        self.prompt_scores: list[TokenLogprobs] = []
        """Of the prompt tokens after the first, as far as an engine has returned them."""
        self.embedding = b""
        """Of the prompt, as fp32, once it is computed and if it is wanted."""
        self.num_readers = 1
        """Readers since the request arrived; only the newest gets output."""

    @property
    def params(self) -> SamplingParams:
        return self.command.params

    @property
    def is_resumable(self) -> bool:
        """Whether another reader can get the output from any token on."""
        return self.transcript is not None and not self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the request was ended by an error, or by its client."""
        return self._error is not None

    def add_scores(self, event: PromptScored) -> None:
        """Add log-probabilities of the prompt, which come in order and once."""
        if event.start != 1 + len(self.prompt_scores):
            raise ValueError(f"scores from {event.start}, after {len(self.prompt_scores)} scores")
        self.prompt_scores.extend(event.logprobs)

    def record(self, index: int, event: TokensEmitted) -> None:
        """Record tokens of a sample if the request is resumable; too many make it not so."""
        if self.transcript is not None:
            self.transcript.emit(index, event)
            if self.transcript.size > MAX_SIZE:
                self.transcript = None

    @property
    def unfinished_ids(self) -> list[str]:
        return [name for name, sample in self.samples.items() if not sample.is_finished]

    @property
    def has_more(self) -> bool:
        """Whether deltas, an error or unfinished samples are left to read."""
        return bool(self._unread or self._replay or self._error or self.unfinished_ids)

    @property
    def num_output_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples.values())

    @property
    def num_tokens_to_send(self) -> int:
        """Size of the commands that continue this request: after its first, one per sample."""
        num_prompt = self.command.size
        if not self.num_output_tokens:
            return num_prompt
        samples = (one for one in self.samples.values() if not one.is_finished)
        return sum(num_prompt + sample.num_tokens for sample in samples)

    @property
    def num_tokens_in_engine(self) -> int:
        """Tokens that every sample has gained, at least, in the current engine."""
        return min(self._num_tokens_in_engine.values(), default=NUM_CLEARING_TOKENS)

    @property
    def is_unproven(self) -> bool:
        """Whether the current engine has computed too few tokens to clear this request."""
        return self.num_tokens_in_engine < NUM_CLEARING_TOKENS

    @property
    def was_sent(self) -> bool:
        """Whether an engine has, or had, this request."""
        return self._is_resent

    @property
    def is_admitted(self) -> bool:
        """Whether the current engine or an earlier one has admitted this request."""
        return self.num_cached_tokens is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a sample waits for admission in the current engine."""
        return self._queue_times.is_waiting

    @property
    def has_passed_trial(self) -> bool:
        """Whether this request has gained enough tokens for the next group to be sent."""
        return self.num_tokens_in_engine >= (
            NUM_TRIAL_TOKENS if self.num_crashes < 2 else NUM_CLEARING_TOKENS
        )

    def commands(self, now: float, is_alone: bool = False) -> Sequence[AddRequest]:
        """Return the commands that continue every unfinished sample after its last token.

        `is_alone` says that this request is tried alone.
        """
        command, num_crashes = self.command, self.num_crashes if is_alone else 0
        is_delayed = self._is_resent or self.is_awaiting_engine
        # A prompt forks at its first token: until then it is one request.
        if not self.num_output_tokens:
            waited_s = self._queue_times.waited_s(command.id) if is_delayed else None
            commands = [
                msgspec.structs.replace(
                    command,
                    is_resent=self._is_resent,
                    waited_s=waited_s,
                    attempt=self._num_attempts,
                    num_crashes=num_crashes,
                    num_scored=1 + len(self.prompt_scores),
                )
            ]
        else:  # all of the prompt was scored before the first token
            params = replace(command.params, n=1, prompt_logprobs=None)
            note, pasts = self._pasts()
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
                    attempt=self._num_attempts,
                    num_crashes=num_crashes,
                    note=note,
                    alias=command.alias if note else "",
                    past=pasts.get(sample.index),
                )
                for name, sample in self.samples.items()
                if not sample.is_finished
            ]
        self._num_tokens_in_engine = {one.id: 0 for one in commands}
        for one in commands:
            self._queue_times.begin(one.id, now if is_delayed else command.arrived_at)
        self.is_sent = self._is_resent = True
        self.lost_at = self.reached_at = None
        self._num_attempts += 1
        return commands

    def _pasts(self) -> tuple[bytes, dict[int, Past]]:
        """Return note and earlier output for the commands of unfinished samples, by index.

        The first has the output of the finished samples too. Too much output is not sent: then no
        other frontend can continue this request.
        """
        transcript = self.transcript
        if transcript is None or transcript.size > MAX_SIZE:
            return b"", {}
        indices = [one.index for one in self.samples.values() if not one.is_finished]
        records = {index: [transcript.sample(index)] for index in indices}
        ended = [one for one in self.samples.values() if one.is_finished]
        records[indices[0]] += [self._ended_record(transcript, one) for one in ended]
        num_samples, num_cached = transcript.num_samples, self.num_cached_tokens
        pasts = {at: Past(num_samples, one, num_cached) for at, one in records.items()}
        return self.command.note, pasts

    def _ended_record(self, transcript: Transcript, sample: SampleStream) -> SampleRecord:
        """Return the record of a sample that has ended, here or also in the engine."""
        record = transcript.sample(sample.index)
        reason = FinishReason.STOP if record.reason is None else record.reason
        return msgspec.structs.replace(record, reason=reason)

    @classmethod
    def adopt(cls, handover: Handover, tokenizer: Tokenizer, now: float) -> RequestStream:
        """Return the stream of a request that another frontend had.

        Raises InvalidRequestError if there is no such request.
        """
        command = handover.command
        if command is None:
            raise InvalidRequestError("there is no request in this handover")
        stream = cls(command, tokenizer)
        if command.params.stop:  # the engine knows no text, and went on after a stop string
            for sample in sample_streams(command.params, tokenizer, command.token_ids):
                for one in handover.samples:
                    if one.index == sample.index:
                        _cut(one, sample.num_tokens_to_stop(one))
        stream.transcript = Transcript(command.params.n, handover.samples)
        stream._num_attempts = command.attempt + 1
        stream.num_cached_tokens = handover.num_cached_tokens
        stream.is_sent = stream._is_resent = True
        stream.rewind(Cursor(), tokenizer)
        unfinished = stream.unfinished_ids if stream.num_output_tokens else [stream.request_id]
        stream._num_tokens_in_engine = dict.fromkeys(unfinished, 0)
        if handover.num_cached_tokens is None:
            stream._queue_times.begin(stream.request_id, now)
        if not handover.is_running:
            stream.lose_engine(now)
        return stream

    def rewind(self, cursor: Cursor, tokenizer: Tokenizer) -> int:
        """Have a new reader get the output after a cursor; earlier readers get no more.

        Returns the number of tokens that it gets again.
        """
        self.num_readers += 1
        self._unread, self._num_unread_bytes = [], 0
        self._replay.clear()
        command, transcript = self.command, self.transcript or Transcript(self.params.n)
        for sample in sample_streams(command.params, tokenizer, command.token_ids):
            sample.numerics = self.numerics
            sample.start_after(cursor.of(sample.index))
            record = transcript.samples.get(sample.index, SampleRecord(sample.index))
            self._replay += sample.replay(record)
            self.samples[sample_id(command.id, sample.index)] = sample
        self._wake.set()
        return sum(len(delta.token_ids) for delta in self._replay)

    def set_numerics(self, numerics: str) -> None:
        """Set the numerics class of the tokens from now on.

        A prompt that another class has scored in part is scored again from its start.
        """
        if numerics != self.numerics and not self.num_output_tokens:
            self.prompt_scores.clear()
        self.numerics = numerics
        for sample in self.samples.values():
            sample.numerics = numerics

    def reach(self, at: float) -> None:
        """Record that this request waits in the current engine."""
        self.reached_at = at if self.reached_at is None else self.reached_at

    def admit(self, request_id: str) -> None:
        """Record that the engine admitted this sample."""
        self._queue_times.end(request_id)

    def preempt(self, request_id: str, at: float) -> None:
        """Record that the engine preempted this sample."""
        self._queue_times.begin(request_id, at)

    def lose_engine(self, at: float) -> None:
        """Record that no engine has this request."""
        self.is_sent, self.is_awaiting_engine = False, True
        self.lost_at = at if self.lost_at is None else self.lost_at
        self._num_tokens_in_engine = dict.fromkeys(self._num_tokens_in_engine, 0)
        self._queue_times.pause(at)

    def count_tokens(self, request_id: str, num_tokens: int) -> None:
        """Record tokens that the engine computed for this sample without failing."""
        if request_id in self._num_tokens_in_engine:
            self._num_tokens_in_engine[request_id] += num_tokens
        self._clear()

    def finish_sample(self, request_id: str) -> None:
        """Record that the engine ended this sample without failing."""
        self._num_tokens_in_engine.pop(request_id, None)
        self._queue_times.end(request_id)
        self._clear()

    def finish_events(self, at: float, reason: FinishReason, message: str) -> list[Finished]:
        """Return a finish event for each unfinished sample; a prompt before its fork has one."""
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
        """Add a delta; raise SlowReaderError if too much output is unread."""
        self._num_unread_bytes += _size(delta)
        if self._num_unread_bytes > MAX_UNREAD_BYTES:
            raise SlowReaderError(f"{self._num_unread_bytes} bytes of output have not been read")
        self._unread.append(delta)
        self._wake.set()

    def fail(self, error: HeadwayError) -> None:
        """Have the consumer get `error` after the unread deltas."""
        self._error = error
        self._wake.set()

    async def take(self, reader: int = 1) -> list[SampleDelta]:
        """Return all unread deltas to a reader; wait until there are some.

        Raises ReaderReplacedError if there is a newer reader.
        """
        while not self._unread or self._replay or reader != self.num_readers:
            if reader != self.num_readers:
                raise ReaderReplacedError("another client reads this stream now")
            if self._replay:
                await asyncio.sleep(0)  # other streams have their turn between two pieces
                return [self._replay.popleft()] if reader == self.num_readers else []
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        unread, self._unread = self._unread, []
        self._num_unread_bytes = 0
        return unread


def _cut(record: SampleRecord, num_tokens: int) -> None:
    del record.token_ids[num_tokens:]
    if record.logprobs is not None:
        del record.logprobs[num_tokens:]


def _size(delta: SampleDelta) -> int:
    num_scores = sum(1 + len(one.top_ids) for one in delta.logprobs or ())
    return len(delta.text) + _TOKEN_BYTES * len(delta.token_ids) + _LOGPROB_BYTES * num_scores
