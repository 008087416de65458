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
from pydantic import Field, ValidationError, WithJsonSchema

from headway.core.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from headway.core.terms import Terms
from headway.errors import InvalidRequestError, NeverFitsError
from headway.server.schema.fields import (
    DEFAULT_LIMITS,
    Fields,
    Only,
    RequestLimits,
    decode_object,
)
from headway.server.schema.structured import ResponseFormat, StructuredOutputs
from headway.tenancy.values import MAX_TARGET_MS, MIN_TARGET_MS, Permissions

MAX_STOP_CHARS = 256
MAX_SALT_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_PROMPT_SCORES = 2**18
"""Log-probabilities of prompt tokens in one answer."""
MAX_INT64 = 2**63 - 1
_MAX_REASONS = 4
_UNION_TAGS = ("str", "list[any]")
"""Parts of pydantic's error locations that name the type it tried, not a field."""

_PASSED_ON = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
"""Fields that SamplingParams has under the same name and checks itself."""

TOKEN_ID = {"type": "integer", "minimum": 0, "format": "token-id"}
"""The OpenAPI document replaces the format by the size of the model's vocabulary."""
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOPS = {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP}
_NULL = {"type": "null"}
_LOGIT_BIAS = {
    "type": "object",
    "maxProperties": MAX_LOGIT_BIASES,
    "patternProperties": {"^[0-9]{1,10}$": {"type": "number", "minimum": -100, "maximum": 100}},
    "additionalProperties": False,
}
_STOP_TOKEN_IDS = {"type": "array", "maxItems": MAX_STOP_TOKEN_IDS, "items": TOKEN_ID}
_ALLOWED = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_ALLOWED_TOKEN_IDS,
    "items": TOKEN_ID,
}
_BAD_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}
_BAD_WORDS = {"type": "array", "maxItems": MAX_BAD_WORDS, "items": _BAD_WORD}

MaxTokens = Annotated[int, Field(ge=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TARGET_FIELDS = ("ttft_ms", "tpot_ms", "deadline_ms")
TargetMs = Annotated[float, Field(ge=MIN_TARGET_MS, le=MAX_TARGET_MS)]


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


class SharedFields(Fields):
    """Fields that every endpoint which generates text has under the same name."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stream: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_INT64, le=MAX_INT64)] | None = None

    # Fields of Headway: targets in place of the tier's
    ttft_ms: TargetMs | None = None
    tpot_ms: TargetMs | None = None
    deadline_ms: TargetMs | None = None

    def shared(self) -> dict[str, Any]:
        """Return these fields by name."""
        return {name: getattr(self, name) for name in SharedFields.model_fields}


class GenerationRequest(SharedFields):
    """Fields of chat and completions; null means the same as leaving a field out.

    Items of long lists are checked after the length of the list, because pydantic would report each
    wrong item.
    """

    n: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[str | list[Any] | None, WithJsonSchema({"anyOf": [_STOP, _STOPS, _NULL]})] = (
        None
    )
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[str, Any] | None, WithJsonSchema({"anyOf": [_LOGIT_BIAS, _NULL]})
    ] = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    # Fields of vLLM
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[
        list[Any] | None, WithJsonSchema({"anyOf": [_STOP_TOKEN_IDS, _NULL]})
    ] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[Any] | None, WithJsonSchema({"anyOf": [_ALLOWED, _NULL]})] = (
        None
    )
    bad_words: Annotated[list[Any] | None, WithJsonSchema({"anyOf": [_BAD_WORDS, _NULL]})] = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

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
                "response_format and structured_outputs exclude each other; send one of them",
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
        fields: dict[str, Any] = {
            name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.num_scored_top,
            stop=_stop_strings(self.stop),
            logit_bias=_logit_bias(self.logit_bias),
            grammar=self.grammar(),
            **fields,
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


def _stop_strings(stop: str | list[Any] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str):
            raise InvalidRequestError("stop must be a string or a list of strings", "stop")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"a string of stop has {len(text)} characters; at most {MAX_STOP_CHARS} are "
                "allowed",
                "stop",
            )
    return stops


def _logit_bias(bias: dict[str, Any] | None) -> dict[int, float]:
    """Return the biases by token id; in JSON the ids are decimal strings."""
    bias = bias or {}
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIASES} are allowed",
            "logit_bias",
        )
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias keys are token ids, got {key[:40]!r}", "logit_bias"
            )
    return {int(key): value for key, value in bias.items()}
