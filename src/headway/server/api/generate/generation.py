"""The engine requests behind one HTTP request, as one set of numbered choices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FailureCause, FinishReason
from headway.core.terms import NO_TERMS, Terms
from headway.core.waiting.policies import PRIORITY_AWARE_POLICIES
from headway.engine.client.async_engine import AsyncEngine, RequestStream
from headway.engine.client.outputs import SampleDelta
from headway.engine.client.transcript import Cursor
from headway.engine.process.messages import NO_NOTE, Note
from headway.errors import HeadwayError, InvalidRequestError
from headway.observe.trace.names import prompt_id
from headway.server.http.errors import INTERNAL_ERROR, ApiError
from headway.tenancy import QuotaLease

logger = logging.getLogger(__name__)

_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """The prompts to complete, all with the same params."""

    id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int = 0
    terms: Terms = NO_TERMS
    note: Note = NO_NOTE
    """Not empty for a resumable stream; then there is one prompt."""


class Generation:
    """Live engine requests, one per prompt.

    Choice p*n + i is sample i of prompt p. The caller of `start` must call `close`.
    """

    def __init__(
        self, engine: AsyncEngine, spec: GenerationSpec, lease: QuotaLease | None = None
    ) -> None:
        self.id = spec.id
        self._engine = engine
        self._spec = spec
        self._lease = lease
        self._num_again = 0
        """Output tokens that a rewind delivers again."""
        self._streams: list[RequestStream] = []

    async def start(self) -> None:
        """Send every prompt to the engine, or none: a refusal aborts the prompts before it."""
        spec = self._spec
        try:
            policy = self._engine.info.scheduling_policy
            if spec.priority and policy not in PRIORITY_AWARE_POLICIES:
                raise InvalidRequestError(
                    f"scheduling_policy is {policy}, which ignores priorities; leave priority out",
                    "priority",
                )
            for prompt_index, token_ids in enumerate(spec.prompts):
                request_id = prompt_id(spec.id, prompt_index)
                self._streams.append(
                    await self._engine.submit(
                        request_id, token_ids, spec.params, spec.priority, spec.terms, spec.note
                    )
                )
        except BaseException:
            await self.close()
            raise

    def adopt(self, stream: RequestStream) -> None:
        """Use a request that was taken over from another frontend."""
        self._streams = [stream]

    def rewind(self, cursor: Cursor) -> None:
        """Have the next caller of `deltas` get the output after a cursor, and others no more."""
        self._num_again = self._streams[0].rewind(cursor, self._engine.tokenizer)

    @property
    def is_running(self) -> bool:
        return any(one.unfinished_ids and not one.has_failed for one in self._streams)

    @property
    def is_waiting(self) -> bool:
        """Whether a prompt has yet to be admitted to the running set."""
        return any(not stream.is_admitted for stream in self._streams)

    @property
    def is_resumable(self) -> bool:
        return all(stream.is_resumable for stream in self._streams)

    @property
    def size(self) -> int:
        """Tokens and log-probabilities that are kept for a client that comes back."""
        num_prompt = sum(len(stream.command.token_ids) for stream in self._streams)
        outputs = (one.transcript.size for one in self._streams if one.transcript is not None)
        return num_prompt + sum(outputs)

    async def cancel(self, error: HeadwayError) -> None:
        """End the request; whoever reads it gets the error."""
        for stream in self._streams:
            if stream.unfinished_ids:
                stream.fail(error)
                await self._engine.abort(stream)

    async def close(self) -> None:
        """Abort unfinished requests and settle the quota lease; a second call does nothing."""
        try:
            for stream in self._streams:
                await self._engine.abort(stream)
        finally:
            self._settle()

    def _settle(self) -> None:
        """Charge admitted prompts and all output, read or not, to the tenant's quotas."""
        if self._lease is None:
            return
        admitted = [one for one in self._streams if one.is_admitted]
        self._lease.settle(
            sum(len(stream.command.token_ids) for stream in admitted),
            sum(stream.num_output_tokens for stream in self._streams),
        )
        self._lease.release()

    def prompt_scores(self, index: int) -> Sequence[TokenLogprobs]:
        """Return the scores of a choice's prompt after its first token; empty if unwanted."""
        return self._streams[index // self._spec.params.n].prompt_scores

    def embedding(self, index: int) -> bytes:
        """Return the embedding of a prompt that is computed, as fp32."""
        return self._streams[index].embedding

    @property
    def resolved_params(self) -> SamplingParams:
        return self._streams[0].params

    def usage(self) -> dict[str, Any]:
        """Return token counts so far; a prompt counts once, however many samples it has."""
        num_prompt = sum(len(token_ids) for token_ids in self._spec.prompts)
        num_output = sum(stream.num_output_tokens for stream in self._streams)
        num_cached = sum(stream.num_cached_tokens or 0 for stream in self._streams)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    async def deltas(self) -> AsyncGenerator[list[SampleDelta], None]:
        """Yield the deltas of the choices; at most one delta per choice in each list."""
        batches = self._one() if len(self._streams) == 1 else self._all()
        async with contextlib.aclosing(batches):
            async for prompt_index, batch in batches:
                if self._lease is not None:
                    num_tokens = sum([len(delta.token_ids) for delta in batch])
                    self._lease.charge(num_tokens - self._take_again(num_tokens))
                yield [self._numbered(prompt_index, delta) for delta in coalesce(batch)]

    def _take_again(self, num_tokens: int) -> int:
        """Return how many of these tokens were charged when they were first delivered."""
        num_again = min(self._num_again, num_tokens)
        self._num_again -= num_again
        return num_again

    def _numbered(self, prompt_index: int, delta: SampleDelta) -> SampleDelta:
        if delta.finish_reason is not None and delta.finish_reason not in _GOOD_ENDS:
            if delta.failure_cause is FailureCause.GRAMMAR:
                raise InvalidRequestError(delta.message)
            logger.error("request %s: %s %s", self.id, delta.finish_reason, delta.message)
            message = f"the engine could not finish this request ({self.id})"
            raise ApiError(replace(INTERNAL_ERROR, message=message))
        if prompt_index == 0:
            return delta
        return replace(delta, index=prompt_index * self._spec.params.n + delta.index)

    async def _one(self) -> AsyncGenerator[tuple[int, list[SampleDelta]], None]:
        async with contextlib.aclosing(self._engine.deltas(self._streams[0])) as batches:
            async for batch in batches:
                yield 0, batch

    async def _all(self) -> AsyncGenerator[tuple[int, list[SampleDelta]], None]:
        queue: asyncio.Queue[tuple[int, list[SampleDelta]] | Exception | None]
        # Size one: deltas that a slow client does not read stay in their stream, which is bounded.
        queue = asyncio.Queue(1)
        tasks = [
            asyncio.create_task(self._pump(prompt_index, stream, queue))
            for prompt_index, stream in enumerate(self._streams)
        ]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, prompt_index: int, stream: RequestStream, queue: asyncio.Queue[Any]
    ) -> None:
        try:
            async with contextlib.aclosing(self._engine.deltas(stream)) as batches:
                async for batch in batches:
                    await queue.put((prompt_index, batch))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)


def coalesce(batch: list[SampleDelta]) -> list[SampleDelta]:
    """Join the deltas of each sample into one."""
    joined: dict[int, SampleDelta] = {}
    for delta in batch:
        before = joined.get(delta.index)
        joined[delta.index] = delta if before is None else _join(before, delta)
    return list(joined.values())


def _join(first: SampleDelta, then: SampleDelta) -> SampleDelta:
    logprobs = None
    if first.logprobs is not None or then.logprobs is not None:
        logprobs = (first.logprobs or ()) + (then.logprobs or ())
    return replace(
        then,
        text=first.text + then.text,
        skipped_ids=first.skipped_ids + then.skipped_ids,
        skipped_text=first.skipped_text + then.skipped_text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
    )
