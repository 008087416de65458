"""What may still be promised, as the API process sees it.

The scheduler decides that, but it listens between steps only, and a step can take longer than a
refusal should. So the same question is asked here first, with the pace that the engine reported
at the end of its last step and the requests that are on their way to it or in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from headway.core.deadlines import NO_SHARES, Infeasible, Job, Pace
from headway.core.events import Finished
from headway.core.promises import Promises
from headway.core.request import FinishReason
from headway.core.terms import NO_TARGETS
from headway.core.waiting.policies import SLO_AWARE_POLICIES
from headway.engine.messages import AddRequest, EventBatch
from headway.engine.seen_prompts import SeenPrompts
from headway.engine.streams import RequestStream
from headway.errors import DeadlineError

ENDED = (FinishReason.STOP, FinishReason.LENGTH)


class Outlook:
    """Judges a request before it is sent."""

    def __init__(self) -> None:
        self._pace: Pace | None = None
        self._promises = Promises()
        self._seen = SeenPrompts()

    def observe(self, batch: EventBatch) -> None:
        """The engine ended a step, or has nothing to do."""
        if batch.stepped:
            self._pace = batch.stepped[-1].pace
        if batch.idled and self._pace is not None:  # nobody waits for what others owe
            self._pace = replace(self._pace, shares=NO_SHARES)

    def reset(self) -> None:
        """Another engine takes over; nothing is known of it."""
        self._pace = None
        self._seen = SeenPrompts()

    def note_seat(self, command: AddRequest) -> None:
        """A prompt got its seat, and will be in the prefix cache."""
        self._seen.note(command.terms.cache_group, command.token_ids)

    def num_cached(self, command: AddRequest) -> int:
        """Tokens of its prompt that are likely to be cached, if it was promised anything."""
        if command.terms.targets == NO_TARGETS:
            return 0
        return self._seen.num_cached(command.terms.cache_group, command.token_ids)

    def note_end(self, command: AddRequest, event: Finished) -> None:
        """One sample of a request ended: how long it became."""
        if event.reason in ENDED and command.terms.targets != NO_TARGETS:
            max_tokens = command.params.max_tokens or 1
            lengths, tier = self._promises.lengths, command.terms.tier
            lengths.observe(tier, event.num_output_tokens, max_tokens)

    def check(
        self,
        command: AddRequest,
        num_cached: int,
        policy: str,
        live: Iterable[RequestStream],
        now: float,
    ) -> None:
        """DeadlineError if what the request asks for cannot be promised."""
        is_asked = command.terms.targets != NO_TARGETS and policy in SLO_AWARE_POLICIES
        if not is_asked or self._pace is None:
            return
        tenant = command.terms.tenant
        jobs = [(one.command.terms.tenant, job) for one in live for job in self._jobs(one)]
        job = self._job(command, num_cached=num_cached)
        verdict = self._promises.judge(job, tenant, jobs, self._pace, now)
        if isinstance(verdict, Infeasible):
            raise DeadlineError(verdict.message, math.ceil(verdict.retry_after_s))

    def _jobs(self, stream: RequestStream) -> list[Job]:
        """One for each sample; until they begin there is one prompt to compute for them all."""
        command, first_token_at = stream.command, stream.metrics.first_token_at
        if command.terms.targets == NO_TARGETS and not stream.is_seated:
            return []  # waits behind whoever was promised something
        if first_token_at is None:
            return [self._job(command, num_cached=stream.num_cached)]
        samples = [stream.samples[name] for name in stream.unfinished_ids]
        return [self._job(command, sample.num_tokens, first_token_at) for sample in samples]

    def _job(
        self,
        command: AddRequest,
        num_output: int = 0,
        first_token_at: float | None = None,
        num_cached: int = 0,
    ) -> Job:
        num_prompt, max_tokens = len(command.token_ids), command.params.max_tokens or 1
        lengths, tier = self._promises.lengths, command.terms.tier
        num_left = max(num_prompt - num_cached, min(2, num_prompt))
        return Job(
            command.arrived_at,
            command.terms.targets,
            num_left if first_token_at is None else 0,
            num_output,
            lengths.expected_left(tier, num_output, max_tokens),
            num_prompt + num_output,
            first_token_at,
            command.params.n if first_token_at is None else 1,
        )
