"""The request body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, TypeGuard

from msgspec.structs import replace
from pydantic import Field, WithJsonSchema

from headway.core.params import MAX_SAMPLES, SamplingParams
from headway.errors import InvalidRequestError, NeverFitsError
from headway.server.schema.request import (
    AnswerOptions,
    GenerationRequest,
    NumLogprobs,
    Only,
    RequestLimits,
)
from headway.server.schema.sampling import TOKEN_ID

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64

Prompt = str | list[int]

TEXT_PROMPT = {"type": "string", "format": "prompt"}
"""The OpenAPI document replaces the format: for some tokenizers an empty text has no token."""
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": TOKEN_ID}


def prompts_schema(max_prompts: int) -> dict[str, Any]:
    """Return the JSON schema of a field with a prompt or several."""
    several = {"type": "array", "minItems": 1, "maxItems": max_prompts}
    texts, ids = {**several, "items": TEXT_PROMPT}, {**several, "items": _TOKEN_IDS}
    return {"anyOf": [TEXT_PROMPT, texts, _TOKEN_IDS, ids]}


class CompletionRequest(GenerationRequest):
    """One prompt or several; each is text or token ids."""

    prompt: Annotated[Any, WithJsonSchema(prompts_schema(MAX_PROMPTS))]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    best_of: int | None = None
    echo: bool | None = None

    suffix: Annotated[Any, Only(("",))] = None

    @property
    def output_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.best_of is not None and self.best_of != self.num_samples:
            raise InvalidRequestError(
                "best_of other than n is not supported; leave best_of out", "best_of"
            )
        num_prompts = len(self.prompts())
        if self.is_resumable and num_prompts > 1:
            raise InvalidRequestError(
                "a resumable stream has one prompt; send one request per prompt",
                "stream_options.resumable",
            )
        if num_prompts * self.num_samples > MAX_SAMPLES:
            raise NeverFitsError(
                f"{num_prompts} prompts with n={self.num_samples} are more than {MAX_SAMPLES} "
                "samples; lower n or the number of prompts",
                "n",
            )
        self.check_output(num_prompts, self.output_limit, limits)

    @property
    def answer_options(self) -> AnswerOptions:
        return replace(super().answer_options, echoes_prompt=bool(self.echo))

    @property
    def num_scored_top(self) -> int | None:
        numbers = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((one for one in numbers if one is not None), default=None)

    @property
    def prompt_field(self) -> str | None:
        return "echo" if self.echo else super().prompt_field

    def params(self) -> SamplingParams:
        return self.sampling(self.output_limit, self.logprobs)

    def prompts(self) -> list[Prompt]:
        """Return the prompts as a list, whichever of the four forms they came in."""
        return read_prompts(self.prompt, "prompt", MAX_PROMPTS)


def read_prompts(prompt: Any, name: str, max_prompts: int) -> list[Prompt]:
    """Return prompts as a list: a text, token ids, or several of either; `name` is the field."""
    if isinstance(prompt, str) or (prompt and _is_token_ids(prompt)):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_shape(name)
    if len(prompt) > max_prompts:
        raise InvalidRequestError(
            f"{name} has {len(prompt)} prompts; at most {max_prompts} are allowed", name
        )
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(_is_token_ids(item) for item in prompt):
        return prompt
    raise _wrong_shape(name)


def _is_token_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _wrong_shape(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} must be a string, a list of strings, a list of token ids or a list of such lists",
        name,
    )
