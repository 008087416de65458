"""The offline engine: prompts in, finished outputs out, in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from headway.clock import Clock
from headway.core.engine import EngineCore
from headway.core.events import (
    Admitted,
    Event,
    Finished,
    Preempted,
    PromptScored,
    Sink,
    TokensEmitted,
)
from headway.core.params import SamplingParams
from headway.core.request import FinishReason, Request, sample_id
from headway.engine.client.inputs import draw_seed, resolve_params, with_bad_words
from headway.engine.client.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    sample_streams,
)
from headway.engine.process.messages import EngineInfo
from headway.errors import EngineError, InvalidRequestError
from headway.text import ChatTemplate, Tokenizer
from headway.text.matchers import Matchers

Prompt = str | Sequence[int]
Message = Mapping[str, object]
Progress = Callable[[int, int], None]


class _LiveRequest:
    """A request that has unfinished samples."""

    def __init__(self, output: RequestOutput, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.output = output
        self.streams = sample_streams(params, tokenizer, output.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class OfflineParts:
    """The parts that an offline engine is built from."""

    make_core: Callable[[Sink], EngineCore]
    info: EngineInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    clock: Clock
    matchers: Matchers | None = None
    """Compiles grammars; None if requests cannot have one."""


class OfflineEngine:
    """Runs an engine core until all prompts are complete."""

    def __init__(self, parts: OfflineParts) -> None:
        self.info = parts.info
        self.tokenizer = parts.tokenizer
        self.core = parts.make_core(self._consume)
        self._chat_template = parts.chat_template
        self._clock = parts.clock
        self._matchers = parts.matchers
        self._ids = count(1)
        self._live: dict[str, tuple[_LiveRequest, int]] = {}
        self._stopped_ids: list[str] = []
        self._num_finished = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt, given as text or token ids.

        `params` is one value for all prompts or one per prompt. `progress` is called with (samples
        finished, samples in total).
        """
        batch = _as_batch(prompts)
        per_prompt = _per_prompt(params, len(batch))
        encoded = [self._encode(prompt) for prompt in batch]
        # Every request is checked before the first is added: an invalid one starts none.
        resolved = [
            self._resolve(requested, token_ids)
            for requested, (_, token_ids) in zip(per_prompt, encoded, strict=True)
        ]
        outputs = [
            self._add(text, token_ids, requested)
            for (text, token_ids), requested in zip(encoded, resolved, strict=True)
        ]
        self._run(sum(requested.n for requested in resolved), progress)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several."""
        conversations: list[Sequence[Message]] = (
            [messages] if _is_conversation(messages) else list(messages)  # pyright: ignore
        )
        prompts = [self._encode_chat(conversation) for conversation in conversations]
        return self.generate(prompts, params, progress)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Yield the answer to one conversation piece by piece; leaving early aborts it."""
        token_ids = self._encode_chat(messages)
        output = self._add(None, token_ids, self._resolve(params or SamplingParams(), token_ids))
        num_sent = 0
        try:
            while self.core.has_work:
                self._step()
                text = output.outputs[0].text
                if len(text) > num_sent:
                    yield text[num_sent:]
                    num_sent = len(text)
        finally:
            self._drop_live()

    def close(self) -> None:
        self.core.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, list(prompt)

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        # A rendered conversation already contains its special tokens.
        return self.tokenizer.encode(self._chat_template.render(messages), add_special_tokens=False)

    def _resolve(self, params: SamplingParams, token_ids: Sequence[int]) -> SamplingParams:
        params = with_bad_words(params, self.tokenizer)
        resolved = resolve_params(params, token_ids, self.info, self.tokenizer.eos_token_ids)
        if params.grammar is not None:
            if self._matchers is None:
                raise InvalidRequestError("this engine has no grammars", "grammar")
            self._matchers.check(params.grammar)
        return resolved

    def _add(self, text: str | None, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        request_id = str(next(self._ids))
        now = self._clock.now()
        samples = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(request_id, text, token_ids, samples, RequestMetrics(now))
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        live = _LiveRequest(output, params, self.tokenizer)
        for index in range(params.n):
            self._live[sample_id(request_id, index)] = (live, index)
        self.core.add(
            Request(
                id=request_id,
                token_ids=list(token_ids),
                params=params,
                seed=draw_seed(params),
                arrived_at=now,
            )
        )
        return output

    def _run(self, num_samples: int, progress: Progress | None) -> None:
        self._num_finished = 0
        try:
            while self.core.has_work:
                self._step()
                if progress is not None:
                    progress(self._num_finished, num_samples)
        finally:
            self._drop_live()

    def _step(self) -> None:
        self.core.step()
        while self._stopped_ids:
            self.core.abort(self._stopped_ids.pop(), FinishReason.STOP)

    def _drop_live(self) -> None:
        """Abort all live requests, after an error, Ctrl-C or an abandoned stream."""
        for request_id in list(self._live):
            self.core.abort(request_id)
        self._live.clear()

    def _consume(self, events: Sequence[Event]) -> None:
        at = self._clock.now()
        for event in events:
            if isinstance(event, TokensEmitted):
                self._emit(event, at)
            elif isinstance(event, Finished):
                self._finish(event)
            elif isinstance(event, Admitted) and event.request_id in self._live:
                metrics = self._live[event.request_id][0].output.metrics
                if metrics.admitted_at is None:
                    metrics.admitted_at = event.at
                    metrics.num_cached_tokens = event.num_cached_tokens
            elif isinstance(event, PromptScored):
                scores = self._live[event.request_id][0].output.prompt_logprobs
                if scores is not None:
                    scores.extend(event.logprobs)
            elif isinstance(event, Preempted) and event.request_id in self._live:
                self._live[event.request_id][0].output.metrics.num_preemptions += 1

    def _emit(self, event: TokensEmitted, at: float) -> None:
        live, index = self._live[event.request_id]
        if live.output.metrics.first_token_at is None:
            live.output.metrics.first_token_at = at
        delta = live.streams[index].push(event)
        live.output.outputs[index].add(delta)
        if delta.finish_reason is not None:
            self._stopped_ids.append(event.request_id)

    def _finish(self, event: Finished) -> None:
        live, index = self._live[event.request_id]
        # A prompt forks at its first token: if it ends before, all its samples end with it.
        is_unforked = index == 0 and not live.output.outputs[0].token_ids
        for ended in range(len(live.streams)) if is_unforked else (index,):
            self._finish_sample(live, ended, event)

    def _finish_sample(self, live: _LiveRequest, index: int, event: Finished) -> None:
        del self._live[sample_id(live.output.request_id, index)]
        self._num_finished += 1
        live.output.metrics.finished_at = event.at
        stream = live.streams[index]
        if not stream.is_finished:
            delta = stream.finish(event)
            live.output.outputs[index].add(delta)
            if delta.message:
                raise EngineError(f"request {event.request_id} failed: {delta.message}")


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # pyright: ignore[reportReturnType]
    return list(prompts)  # pyright: ignore[reportReturnType]


def _is_conversation(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> bool:
    return not messages or isinstance(messages[0], Mapping)


def _per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequestError(
            f"params has {len(params)} entries for {num_prompts} prompts; give one per prompt",
            "params",
        )
    return list(params)
