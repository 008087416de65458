"""From events to output: text and tokens per sample, times per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.core.events import Finished, TokensEmitted
from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.text import OutputText, StopStrings, Tokenizer

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
    numerics: str = ""
    """Numerics class of the engine that computed it; empty if unknown."""


class SampleStream:
    """Turns the events of one sample into deltas."""

    def __init__(self, index: int, text: OutputText) -> None:
        self.index = index
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
        delta = self._text.push(event.token_ids)
        self.is_finished = delta.stop is not None
        reason = FinishReason.STOP if self.is_finished else None
        return SampleDelta(
            self.index,
            delta.text,
            event.token_ids,
            event.logprobs,
            reason,
            delta.stop,
            numerics=self.numerics,
        )

    def finish(self, event: Finished) -> SampleDelta:
        """End the sample; return the text still buffered, with the finish reason."""
        self.is_finished = True
        delta = self._text.finish()
        reason = event.reason if delta.stop is None else FinishReason.STOP
        return SampleDelta(
            self.index,
            delta.text,
            finish_reason=reason,
            stop=delta.stop,
            message=event.message,
            numerics=self.numerics,
        )


def sample_streams(
    params: SamplingParams, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
) -> list[SampleStream]:
    """Return one SampleStream per sample of a prompt."""
    stops = StopStrings(params.stop, params.include_stop_str_in_output)
    # Some tokenizers drop a space at the start of a text; the prompt's last tokens prevent that.
    tail = prompt_token_ids[-PROMPT_TAIL:]
    return [
        SampleStream(
            index,
            OutputText(
                tokenizer.detokenizer(params.skip_special_tokens, after=tail),
                stops.fresh(),
                params.min_tokens,
            ),
        )
        for index in range(params.n)
    ]


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
