"""Goodput: which requests with SLO targets met all of them.

A request meets its targets if it finished by itself (stop or length) within each target. A request
aborted by its client before it missed a target has no verdict.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from headway.core.request import FinishReason
from headway.core.slo.targets import met
from headway.core.terms import NO_TARGETS, Targets
from headway.observe.requests.parts import RequestPart

NUM_LATEST = 256
"""Finished requests with targets in the goodput window."""
_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Verdict(StrEnum):
    """Whether a finished request met its SLO targets."""

    MET = "met"
    MISSED = "missed"
    UNKNOWN = "unknown"
    """The request has no targets, or its client aborted it before it missed one."""


def verdict_on(part: RequestPart, targets: Targets) -> Verdict:
    """Return whether a finished prompt or sample met its targets."""
    if targets == NO_TARGETS:
        return Verdict.UNKNOWN
    ttft_s = part.ttft_s
    if ttft_s is None and part.reason in (FinishReason.ABORT, *_GOOD_ENDS):
        # Without output, the result comes at the end; before an abort, no token came at all.
        ttft_s = part.e2e_s
    if not met(targets, ttft_s, part.tpot_s, part.e2e_s):
        return Verdict.MISSED
    if part.reason in _GOOD_ENDS:
        return Verdict.MET
    return Verdict.UNKNOWN if part.reason is FinishReason.ABORT else Verdict.MISSED


class GoodputWindow:
    """Share of the latest requests with targets that met them."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=NUM_LATEST)

    def add(self, is_met: bool) -> None:
        self._latest.append(is_met)

    @property
    def share(self) -> float:
        """Share that met their targets, 0 to 1; 1 while the window is empty."""
        return sum(self._latest) / len(self._latest) if self._latest else 1.0
