"""TTFT of a request that would arrive now, behind all that wait: a signal to scale by.

By the step-time models of the engines, as in SLO admission and in the router. The request is
typical (median of the last admissions) and the last in line, as under `fcfs`: under `fair`, a
tenant with less service than others has its first token sooner. The work is done at each scrape,
not per step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean, median

from headway.core.events import Stepped
from headway.core.request import FinishReason
from headway.core.slo.forecast import EngineSpeed
from headway.observe.requests.parts import RequestPart
from headway.observe.requests.table import Changes, RequestTable

NUM_LATEST = 256
"""Admissions and ends by which a request is typical."""
DEFAULT_PROMPT = 256
DEFAULT_OUTPUT = 128
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """What requests were like lately."""

    num_uncached: int = DEFAULT_PROMPT
    """Prompt tokens that are computed: the median."""
    uncached_share: float = 1.0
    """Share of all prompt tokens that were computed."""
    num_output: float = DEFAULT_OUTPUT
    """Output tokens: the mean."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What goes before a new request."""

    num_tokens: float = 0.0
    """Prompt tokens that are yet to be computed."""
    num_waiting: int = 0
    """Sequences that are not in the running set."""


class ExpectedTtft:
    """Observes what requests are like; predicts the TTFT of the next."""

    def __init__(self, requests: RequestTable, steps: Callable[[], Sequence[Stepped]]) -> None:
        """`steps` returns the last step of each engine that takes requests."""
        self._requests = requests
        self._steps = steps
        self._prompts: deque[tuple[int, int]] = deque(maxlen=NUM_LATEST)
        """Prompt tokens, and those of them that were computed."""
        self._outputs: deque[int] = deque(maxlen=NUM_LATEST)

    def consume(self, changes: Changes) -> None:
        """Note the lengths of prompts and outputs."""
        for one in changes.admitted:
            self._prompts.append((one.num_tokens, max(1, one.num_tokens - one.num_cached_tokens)))
        for _, part in changes.finished:
            if part.reason in _WHOLE:
                self._outputs.append(part.num_output_tokens)

    @property
    def typical(self) -> TypicalRequest:
        """The typical request; a stated one before the first admission."""
        output = fmean(self._outputs) if self._outputs else float(DEFAULT_OUTPUT)
        if not self._prompts:
            return TypicalRequest(num_output=output)
        uncached = [computed for _, computed in self._prompts]
        share = sum(uncached) / sum(length for length, _ in self._prompts)
        return TypicalRequest(round(median(uncached)), share, output)

    def seconds(self) -> float:
        """Return the prediction; 0 as long as no engine knows how long its steps take."""
        typical = self.typical
        parts = (part for _, part in self._requests.live_parts)
        return predict_ttft_s(self._steps(), backlog_of(parts, typical), typical)


def backlog_of(parts: Iterable[RequestPart], typical: TypicalRequest) -> Backlog:
    """Return what the live parts leave to be computed."""
    num_tokens, num_waiting = 0.0, 0
    for part in parts:
        num_waiting += part.waiting_since is not None
        if part.first_token_at is not None:
            continue
        if part.num_cached_tokens is None:
            num_tokens += typical.uncached_share * part.num_prompt_tokens
        else:  # about half of a prompt that is running has been computed
            num_tokens += (part.num_prompt_tokens - part.num_cached_tokens) / 2
    return Backlog(num_tokens, num_waiting)


def predict_ttft_s(steps: Sequence[Stepped], backlog: Backlog, typical: TypicalRequest) -> float:
    """Return the seconds to the first token of a typical request behind a backlog.

    The engines share the backlog by their speeds. Where all sequences or KV blocks are taken,
    requests have to end first; the prompts that are computed meanwhile delay them.
    """
    engines = [
        (step, _speed_now(step, step.forecast.speed))
        for step in steps
        if step.forecast is not None and step.forecast.speed.cost.is_known
    ]
    if not engines:
        return 0.0
    # Requests of other frontends wait in the engines too.
    num_strangers = max(0, sum(step.num_waiting for step, _ in engines) - backlog.num_waiting)
    num_tokens = backlog.num_tokens + num_strangers * typical.num_uncached
    queue_s = num_tokens / sum(_tokens_per_s(*one) for one in engines)
    num_waiting = backlog.num_waiting + num_strangers
    ends_s = _until_room_s(engines, num_waiting, typical)
    own_s = min(_own_s(*one, typical.num_uncached) for one in engines)
    return queue_s + ends_s + own_s


def _speed_now(step: Stepped, speed: EngineSpeed) -> EngineSpeed:
    """Return the speed of an engine, without decodes if its requests were aborted since."""
    return speed if step.num_running else replace(speed, decode_s=0.0, busy_s=0.0)


def _room(step: Stepped) -> int:
    """Return the prefill tokens of a step, beside the decodes."""
    return max(step.token_budget // 4, step.token_budget - step.num_running, 1)


def _tokens_per_s(step: Stepped, speed: EngineSpeed) -> float:
    """Return how many prompt tokens an engine computes per second, in full steps."""
    room = _room(step)
    return room / (speed.cost.constant_s + speed.decode_s + speed.cost.prefill_s(room))


def _own_s(step: Stepped, speed: EngineSpeed, num_tokens: int) -> float:
    """Return the rest of the running step and the steps of the request's own prefill."""
    overhead_s = speed.cost.constant_s + speed.decode_s
    num_steps = ceil(num_tokens / _room(step))
    return speed.busy_s / 2 + num_steps * overhead_s + speed.cost.prefill_s(num_tokens)


def _until_room_s(
    engines: Sequence[tuple[Stepped, EngineSpeed]], num_waiting: int, typical: TypicalRequest
) -> float:
    """Return the seconds until enough requests have ended for one more to run."""
    steps = [step for step, _ in engines]
    num_running = sum(step.num_running for step in steps)
    if not num_running:
        return 0.0
    num_over = num_running + num_waiting + 1 - sum(step.max_num_seqs for step in steps)
    num_used = sum(step.num_blocks_used for step in steps)
    per_request = num_used / num_running
    if per_request:
        num_free = sum(step.num_blocks for step in steps) - num_used
        num_over = max(num_over, (num_waiting + 1) - num_free / per_request)
    if num_over <= 0:
        return 0.0
    # By the model: a single step may be slow for reasons of its own.
    step_s = fmean(speed.busy_s for step, speed in engines if step.num_running)
    return num_over * typical.num_output * step_s / num_running
