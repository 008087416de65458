"""What request bodies share: common fields, parsing and limits.

Every field is honoured or refused by name; none is ignored. `user` and `safety_identifier` only
identify the caller's own user and request nothing, so they are accepted. The models contain their
bounds, so that the OpenAPI document made from them is correct. All checks come before any text is
tokenized.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
)

from headway.config import ServerConfig
from headway.core.params import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from headway.core.terms import Terms
from headway.errors import InvalidRequestError, NeverFitsError
from headway.tenancy.values import MAX_TARGET_MS, MIN_TARGET_MS, Permissions

MAX_DEPTH = 32
"""Deepest nesting of lists and objects in a body."""
MAX_STOP_CHARS = 256
MAX_TOP_K = 2**31 - 1
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

MaxTokens = Annotated[int, Field(ge=1)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
TARGET_FIELDS = ("ttft_ms", "tpot_ms", "deadline_ms")
TargetMs = Annotated[float, Field(ge=MIN_TARGET_MS, le=MAX_TARGET_MS)]


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one HTTP request may request."""

    max_num_samples: int
    max_output_tokens: int

    @classmethod
    def of(cls, config: ServerConfig) -> RequestLimits:
        samples = min(config.max_num_samples, MAX_SAMPLES)
        return cls(samples, config.max_output_tokens_per_request)


DEFAULT_LIMITS = RequestLimits.of(ServerConfig())


@dataclass(frozen=True, slots=True)
class Only:
    """Marks an unsupported field: null and `values` are accepted, other values refused."""

    values: tuple[Any, ...] = ()

    def accepts(self, value: object) -> bool:
        # Compares types too: to Python, 1 and True are equal.
        return value is None or any(
            type(value) is type(harmless) and value == harmless for harmless in self.values
        )

    def refusal(self, name: str) -> InvalidRequestError:
        choices = [msgspec.json.encode(value).decode() for value in self.values]
        instead = f" or send {' or '.join(choices)}" if choices else ""
        return InvalidRequestError(f"{name} is not supported; leave it out{instead}", name)

    def __get_pydantic_json_schema__(
        self, _schema: object, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


class Fields(BaseModel):
    """A JSON object of the API: unknown keys are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    def check(self, limits: RequestLimits) -> None:
        """Refuse values that are well formed but not supported."""
        del limits
        self.refuse_unsupported("")

    def refuse_unsupported(self, location: str) -> None:
        for name, only in unsupported_fields(type(self)).items():
            if not only.accepts(getattr(self, name)):
                raise only.refusal(location + name)


@cache
def unsupported_fields(kind: type[Fields]) -> dict[str, Only]:
    """Return the fields that are marked with Only, and their marks."""
    return {
        name: mark
        for name, info in kind.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, Only)
    }


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None
    resumable: bool | None = None
    include_obfuscation: Annotated[Any, Only((False,))] = None


class GenerationRequest(Fields):
    """Fields of both endpoints; null means the same as leaving a field out.

    Items of long lists are checked after the length of the list, because pydantic would report each
    wrong item.
    """

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Annotated[str | list[Any] | None, WithJsonSchema({"anyOf": [_STOP, _STOPS, _NULL]})] = (
        None
    )
    seed: Annotated[int, Field(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[str, Any] | None, WithJsonSchema({"anyOf": [_LOGIT_BIAS, _NULL]})
    ] = None
    user: str | None = None

    # Fields of vLLM
    priority: Annotated[int, Field(ge=-MAX_INT64, le=MAX_INT64)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop_token_ids: Annotated[
        list[Any] | None, WithJsonSchema({"anyOf": [_STOP_TOKEN_IDS, _NULL]})
    ] = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    # Fields of Headway: targets in place of the tier's
    ttft_ms: TargetMs | None = None
    tpot_ms: TargetMs | None = None
    deadline_ms: TargetMs | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

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
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequestError(
                    "stream_options is only allowed when stream is true", "stream_options"
                )
            self.stream_options.refuse_unsupported("stream_options.")

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
        """Return the caller's terms with the targets of this request."""
        in_ms = {"ttft_s": self.ttft_ms, "tpot_s": self.tpot_ms, "deadline_s": self.deadline_ms}
        in_s = {name: value / 1000 for name, value in in_ms.items() if value is not None}
        return replace(terms, targets=replace(terms.targets, **in_s)) if in_s else terms

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
            stop=_stop_strings(self.stop),
            logit_bias=_logit_bias(self.logit_bias),
            **fields,
        )


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse(kind: type[FieldsT], body: bytes, limits: RequestLimits = DEFAULT_LIMITS) -> FieldsT:
    """Return a request body as a checked request."""
    return validate(kind, decode(body), limits)


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; NaN, Infinity and deep nesting are refused."""
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if _is_too_deep(content, body):
        raise InvalidRequestError(f"the body has more than {MAX_DEPTH} levels of nesting")
    return content


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


def _is_too_deep(content: dict[str, Any], body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            for item in (outer.values() if type(outer) is dict else outer)
            if type(item) in (dict, list)
        ]
        if not level:
            return False
    return True


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
