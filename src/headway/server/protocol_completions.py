"""The request body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

from headway.core.params import MAX_SAMPLES, SamplingParams
from headway.errors import InvalidRequestError
from headway.server.protocol import GenerationRequest, check_num_logprobs

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64

Prompt = str | list[int]


class CompletionRequest(GenerationRequest):
    """One prompt or several; each is text or token ids."""

    prompt: Any
    max_tokens: int | None = None
    logprobs: int | None = None
    best_of: int | None = None

    echo: Any = None
    suffix: Any = None

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {"echo": (False,), "suffix": ("",)}

    def check(self) -> None:
        super().check()
        num_samples = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of != num_samples:
            raise InvalidRequestError("best_of other than n is not supported", "best_of")
        check_num_logprobs("logprobs", self.logprobs)
        num_prompts = len(self.prompts())
        if num_prompts * num_samples > MAX_SAMPLES:
            raise InvalidRequestError(
                f"{num_prompts} prompts with n={num_samples} are more than {MAX_SAMPLES} samples",
                "n",
            )

    def params(self) -> SamplingParams:
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling(limit, self.logprobs)

    def prompts(self) -> list[Prompt]:
        """The prompts, in one shape whichever of the four shapes they came in."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and _is_token_ids(prompt)):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise _wrong_shape()
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError(f"{len(prompt)} prompts; at most {MAX_PROMPTS}", "prompt")
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(_is_token_ids(item) for item in prompt):
            return prompt
        raise _wrong_shape()


def _is_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _wrong_shape() -> InvalidRequestError:
    return InvalidRequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists",
        "prompt",
    )
