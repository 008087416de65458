"""What request bodies share: common fields, parsing and limits.

Every field is honoured or refused by name; none is ignored. `user` and `safety_identifier` only
identify the caller's own user and request nothing, so they are accepted. The models contain their
bounds, so that the OpenAPI document made from them is correct. All checks come before any text is
tokenized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import Field, ValidationError

from headway.core.params import MAX_LOGPROBS, SamplingParams
from headway.core.terms import Terms
from headway.errors import InvalidRequestError, NeverFitsError
from headway.server.schema.fields import (
    DEFAULT_LIMITS,
    Fields,
    Only,
    RequestLimits,
    decode_object,
)
from headway.server.schema.sampling import TARGET_FIELDS, SamplingFields
from headway.server.schema.structured import ResponseFormat
from headway.tenancy.values import Permissions

MAX_PROMPT_SCORES = 2**18
"""Log-probabilities of prompt tokens in one answer."""
_MAX_REASONS = 4
_UNION_TAGS = ("str", "list[any]")
"""Parts of pydantic's error locations that name the type it tried, not a field."""

MaxTokens = Annotated[int, Field(ge=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class AnswerOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an answer contains beside its choices."""

    includes_usage: bool = False
    has_continuous_usage: bool = False
    returns_token_ids: bool = False
    names_tier: bool = False
    names_store: bool = False
    echoes_prompt: bool = False
    num_prompt_logprobs: int | None = None
    """Likeliest tokens in the field `prompt_logprobs`; None without the field."""
    names_tokens_by_id: bool = False

    def envelope(self) -> dict[str, object]:
        """Return the fields that say what became of a request field."""
        tier: dict[str, object] = {"service_tier": "default"} if self.names_tier else {}
        return {**tier, "store": False} if self.names_store else tier


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    resumable: bool | None = None
    include_obfuscation: Annotated[Any, Only((False,))] = None


class GenerationRequest(SamplingFields):
    """Fields of chat and completions; null means the same as leaving a field out."""

    n: Annotated[int, Field(ge=1)] | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    # Fields of vLLM
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def answer_options(self) -> AnswerOptions:
        options = self.stream_options or StreamOptions()
        return AnswerOptions(
            includes_usage=bool(options.include_usage),
            has_continuous_usage=bool(options.continuous_usage_stats),
            returns_token_ids=bool(self.return_token_ids),
            num_prompt_logprobs=self.prompt_logprobs,
            names_tokens_by_id=bool(self.return_tokens_as_token_ids),
        )

    @property
    def num_scored_top(self) -> int | None:
        """Likeliest tokens to list for each prompt token; None if none is scored."""
        return self.prompt_logprobs

    @property
    def prompt_field(self) -> str | None:
        """The field that has the answer repeat or score the prompt; None if none does."""
        return None if self.prompt_logprobs is None else "prompt_logprobs"

    def check_scores(self, num_prompt_tokens: int) -> None:
        """Refuse an answer with too many log-probabilities of prompts."""
        num_top = self.num_scored_top
        if num_top is None:
            return
        num_scores = num_prompt_tokens * (1 + num_top) * self.num_samples
        if num_scores > MAX_PROMPT_SCORES:
            raise InvalidRequestError(
                f"{num_prompt_tokens} prompt tokens with {1 + num_top} log-probabilities each, for "
                f"{self.num_samples} samples, are {num_scores}; at most {MAX_PROMPT_SCORES} are "
                "allowed: lower the number of log-probabilities, prompts or samples",
                self.prompt_field,
            )

    def truncate(self, token_ids: list[int]) -> list[int]:
        """Return the end of a prompt, as long as truncate_prompt_tokens says."""
        limit = self.truncate_prompt_tokens
        return token_ids if limit is None else token_ids[-limit:]

    @property
    def is_resumable(self) -> bool:
        return bool(self.stream_options and self.stream_options.resumable)

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.num_samples > limits.max_num_samples:
            raise NeverFitsError(
                f"n must be at most {limits.max_num_samples} (max_num_samples), "
                f"got {self.num_samples}",
                "n",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs is only allowed when stream is false", "prompt_logprobs"
            )
        if self.is_resumable and self.prompt_field is not None:
            raise InvalidRequestError(
                f"a resumable stream cannot have {self.prompt_field}; leave one of them out",
                "stream_options.resumable",
            )
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequestError(
                    "stream_options is only allowed when stream is true", "stream_options"
                )
            self.stream_options.refuse_unsupported("stream_options.")
            options = self.answer_options
            if options.has_continuous_usage and not options.includes_usage:
                raise InvalidRequestError(
                    "continuous_usage_stats needs include_usage; set both",
                    "stream_options.continuous_usage_stats",
                )

    def check_output(self, num_prompts: int, max_tokens: int | None, limits: RequestLimits) -> None:
        """Refuse more output than one request may have; no max_tokens is no limit here."""
        bound, num_samples = limits.max_output_tokens, num_prompts * self.num_samples
        if max_tokens is None or num_samples * max_tokens <= bound:
            return
        if max_tokens > bound:
            raise NeverFitsError(
                f"max_tokens must be at most {bound} (max_output_tokens_per_request), "
                f"got {max_tokens}",
                "max_tokens",
            )
        raise NeverFitsError(
            f"{num_samples} samples of up to {max_tokens} tokens are more than the {bound} tokens "
            "of max_output_tokens_per_request: lower n, max_tokens or the number of prompts",
            "n",
        )

    def check_permissions(self, permissions: Permissions, tier: str) -> None:
        """Refuse targets and priorities that the caller's tier does not allow."""
        requested_ms = {
            name: value for name in TARGET_FIELDS if (value := getattr(self, name)) is not None
        }
        permissions.check_targets(tier, requested_ms)
        if self.priority is not None:
            permissions.check_priority(tier)

    def terms(self, terms: Terms) -> Terms:
        """Return the caller's terms with the targets and the cache salt of this request."""
        in_ms = {"ttft_s": self.ttft_ms, "tpot_s": self.tpot_ms, "deadline_s": self.deadline_ms}
        in_s = {name: value / 1000 for name, value in in_ms.items() if value is not None}
        if self.cache_salt is not None:
            terms = replace(terms, cache_salt=self.cache_salt)
        return replace(terms, targets=replace(terms.targets, **in_s)) if in_s else terms

    def grammar(self) -> str | None:
        """Return the grammar that the output must follow; None without one."""
        try:
            found = None if self.response_format is None else self.response_format.grammar()
        except InvalidRequestError as error:
            error.param = error.param or "response_format"
            raise
        if self.structured_outputs is None:
            return found
        self.structured_outputs.refuse_unsupported("structured_outputs.")
        if found is not None:
            raise InvalidRequestError(
                "structured_outputs excludes any other format of the output; send one of them",
                "structured_outputs",
            )
        return self.structured_outputs.to_grammar()

    @property
    def grammar_field(self) -> str:
        """The field that the grammar comes from."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def params(self) -> SamplingParams:
        """Return what the engine needs to sample the output."""
        raise NotImplementedError

    def field_for(self, param: str | None) -> str | None:
        """Return the field of this body that a param of the engine was made from."""
        return param

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling fields as checked params."""
        return SamplingParams(
            n=self.num_samples,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.num_scored_top,
            grammar=self.grammar(),
            **self.sampling_params(),
        )


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse(kind: type[FieldsT], body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> FieldsT:
    """Return a request body as a checked request."""
    return validate(kind, decode(body), limits)


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; NaN, Infinity and deep nesting are refused."""
    return decode_object(body, "the body")


def validate(
    kind: type[FieldsT], content: dict[str, Any], limits: RequestLimits = DEFAULT_LIMITS
) -> FieldsT:
    """Return a JSON object as a checked request of this kind."""
    # Before validation, because pydantic would report every unknown field.
    unknown = next((name for name in content if name not in kind.model_fields), None)
    if unknown is not None:
        raise InvalidRequestError(f"unknown field: {unknown[:200]}", unknown[:200])
    try:
        request = kind.model_validate(content)
    except ValidationError as error:
        raise _named(error) from None
    request.check(limits)
    return request


def _named(error: ValidationError) -> InvalidRequestError:
    """Return the first error, with its field."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    kind, name = problems[0]["type"], _path(problems[0]["loc"])
    if kind == "extra_forbidden":
        return InvalidRequestError(f"unknown field: {name[:200]}", name[:200])
    if kind == "missing":
        return InvalidRequestError(f"{name} is required", name)
    # For a field of several types, pydantic reports one error per type.
    reasons = dict.fromkeys(item["msg"] for item in problems if _path(item["loc"]) == name)
    return InvalidRequestError(f"{name}: {'; or '.join([*reasons][:_MAX_REASONS])}", name)


def _path(location: tuple[int | str, ...]) -> str:
    """Return a location in the body as text, such as messages[0].role."""
    path = ""
    for part in location:
        if part in _UNION_TAGS:
            break
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")
