"""Output of a resumable request so far, and how far a client has read it.

Positions count tokens: how events are cut depends on timing, the text after n tokens does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.events import TokensEmitted
from headway.core.params import MAX_SAMPLES
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.engine.process.messages import SampleRecord

MAX_SIZE = 2**17
"""Tokens and log-probabilities of a request that another frontend may continue."""
_POSITION = re.compile(r"(?:([0-9]{1,9})(e?))?")


class Position(NamedTuple):
    """How far one sample was delivered."""

    num_tokens: int = 0
    is_ended: bool = False
    """Whether the end was delivered too."""
    is_open: bool = True
    """Whether anything was delivered, be it without a token."""

    def __str__(self) -> str:
        if self.is_ended:
            return f"{self.num_tokens}e"
        return str(self.num_tokens) if self.is_open else ""


START = Position(is_open=False)


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a client has read a stream: a position for each sample."""

    positions: tuple[Position, ...] = ()

    def of(self, index: int) -> Position:
        return self.positions[index] if index < len(self.positions) else START

    def __str__(self) -> str:
        """Return the text form: `12e,7,` for one sample that ended, one that did not, one new."""
        return ",".join(map(str, self.positions))

    @classmethod
    def parse(cls, text: str) -> Cursor | None:
        """Return the cursor of a text; None if it is not one."""
        parts = text.split(",", MAX_SAMPLES)
        found = [_POSITION.fullmatch(part) for part in parts]
        if len(parts) > MAX_SAMPLES or None in found:
            return None
        return cls(
            tuple(
                START if one[1] is None else Position(int(one[1]), bool(one[2]))
                for one in found
                if one is not None
            )
        )


class Transcript:
    """The output of every sample of one request."""

    def __init__(self, num_samples: int, samples: Iterable[SampleRecord] = ()) -> None:
        self.num_samples = num_samples
        self.samples = {one.index: one for one in samples}
        self.size = sum(len(one.token_ids) + _num_scores(one.logprobs) for one in samples)
        """Tokens and log-probabilities, for bounds on memory."""

    @property
    def is_finished(self) -> bool:
        ends = [one.reason for one in self.samples.values()]
        return len(ends) == self.num_samples and None not in ends

    def sample(self, index: int) -> SampleRecord:
        return self.samples.setdefault(index, SampleRecord(index, []))

    def emit(self, index: int, event: TokensEmitted) -> None:
        """Add tokens of a sample."""
        sample = self.sample(index)
        sample.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            sample.logprobs = sample.logprobs or []
            sample.logprobs.extend(event.logprobs)
        self.size += len(event.token_ids) + _num_scores(event.logprobs)

    def finish(self, index: int, reason: FinishReason) -> None:
        """Record the end of a sample; a prompt that ends before its fork ends with all."""
        is_unforked = not self.samples and index == 0
        for one in range(self.num_samples) if is_unforked else (index,):
            self.sample(one).reason = reason


def _num_scores(logprobs: Sequence[TokenLogprobs] | None) -> int:
    return sum([1 + len(one.top_ids) for one in logprobs or ()])
