"""From events to output: text and tokens per sample, times per request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headway.core.events import Finished, TokensEmitted
from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FailureCause, FinishReason
from headway.engine.client.transcript import Position
from headway.engine.process.messages import SampleRecord
from headway.text import Detokenizer, OutputText, StopStrings, Tokenizer

REPLAY_TOKENS = 1024
REPLAY_SCORED_TOKENS = 64
"""Tokens in one piece of a replay, with up to 20 alternatives each."""
PROMPT_TAIL = 8
"""Prompt tokens that the detokenizer gets as context."""


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """Output of one sample since the last read; `finish_reason` is set on its last delta."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended the sample, or None."""
    message: str = ""
    """Why the sample failed; empty if it did not."""
    failure_cause: FailureCause | None = None
    numerics: str = ""
    """Numerics class of the engine that computed it; empty if unknown."""
    skipped_ids: tuple[int, ...] = ()
    """Tokens before `token_ids` that the client of a resumed stream has already."""
    skipped_text: str = ""
    """The text of the skipped tokens."""


class SampleStream:
    """Turns the events of one sample into deltas."""

    def __init__(self, index: int, text: OutputText) -> None:
        self.index = index
        self._num_to_skip = 0
        self._skips_end = False
        self.is_finished = False
        self.token_ids: list[int] = []
        self.numerics = ""
        """Numerics class of the engine that has the sample; empty if unknown."""
        self._text = text

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def push(self, event: TokensEmitted) -> SampleDelta:
        """Add tokens and return their delta; a stop string makes it the last delta."""
        self.token_ids.extend(event.token_ids)
        skipped: tuple[int, ...] = ()
        skipped_text = ""
        if self._num_to_skip:
            event, skipped, skipped_text = self._skip(event)
        delta = self._text.push(event.token_ids)
        self.is_finished = delta.stop is not None
        reason = FinishReason.STOP if self.is_finished and not self._skips_end else None
        return SampleDelta(
            self.index,
            delta.text,
            event.token_ids,
            event.logprobs,
            reason,
            delta.stop,
            numerics=self.numerics,
            skipped_ids=skipped,
            skipped_text=skipped_text,
        )

    def start_after(self, position: Position) -> None:
        """Leave out of the deltas what a client has already; before the first push."""
        self._num_to_skip, self._skips_end = position.num_tokens, position.is_ended

    def replay(self, record: SampleRecord) -> Iterator[SampleDelta]:
        """Yield the deltas of recorded output, in pieces that are quick to write."""
        size = REPLAY_TOKENS if record.logprobs is None else REPLAY_SCORED_TOKENS
        for at in range(0, len(record.token_ids), size):
            piece = slice(at, at + size)
            logprobs = None if record.logprobs is None else tuple(record.logprobs[piece])
            if not self.is_finished:
                yield self.push(TokensEmitted("", tuple(record.token_ids[piece]), logprobs))
        if record.reason is not None and not self.is_finished:
            yield self.finish(Finished("", 0.0, record.reason, len(record.token_ids)))

    def num_tokens_to_stop(self, record: SampleRecord) -> int:
        """Return how many recorded tokens count: those up to the end of a stop string."""
        for at, token_id in enumerate(record.token_ids):
            if self._text.push((token_id,)).stop is not None:
                return at + 1
        return len(record.token_ids)

    def _skip(self, event: TokensEmitted) -> tuple[TokensEmitted, tuple[int, ...], str]:
        """Return the event without the tokens that the client has, these tokens, and their text."""
        num_skipped = min(self._num_to_skip, len(event.token_ids))
        self._num_to_skip -= num_skipped
        skipped = event.token_ids[:num_skipped]
        text = self._text.push(skipped).text
        logprobs = None if event.logprobs is None else event.logprobs[num_skipped:]
        rest = event._replace(token_ids=event.token_ids[num_skipped:], logprobs=logprobs)
        return rest, skipped, text

    def finish(self, event: Finished) -> SampleDelta:
        """End the sample; return the text still buffered, with the finish reason."""
        self.is_finished = True
        delta = self._text.finish()
        reason = event.reason if delta.stop is None else FinishReason.STOP
        if self._skips_end:
            return SampleDelta(self.index, "", numerics=self.numerics)
        return SampleDelta(
            self.index,
            delta.text,
            finish_reason=reason,
            stop=delta.stop,
            message=event.message,
            failure_cause=event.failure_cause,
            numerics=self.numerics,
        )


def sample_streams(
    params: SamplingParams, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
) -> list[SampleStream]:
    """Return one SampleStream per sample of a prompt."""
    stops = StopStrings(params.stop, params.include_stop_str_in_output)
    return [
        SampleStream(
            index,
            OutputText(
                output_detokenizer(params, tokenizer, prompt_token_ids),
                stops.fresh(),
                params.min_tokens,
            ),
        )
        for index in range(params.n)
    ]


def output_detokenizer(
    params: SamplingParams, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
) -> Detokenizer:
    """Return a detokenizer for one sample of a prompt."""
    # Some tokenizers drop a space at the start of a text; the prompt's last tokens prevent that.
    tail = prompt_token_ids[-PROMPT_TAIL:]
    return tokenizer.detokenizer(
        params.skip_special_tokens, after=tail, shown_ids=params.shown_token_ids
    )


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request on the engine's clock, in seconds, and its counts."""

    arrived_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_at is None else self.finished_at - self.arrived_at


@dataclass(slots=True)
class CompletionOutput:
    """One sample, finished or growing."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None

    def add(self, delta: SampleDelta) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = str(delta.finish_reason)
            self.stop_reason = delta.stop


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One per prompt token, None for the first; None if the request asked for none."""
