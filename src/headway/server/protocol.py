"""What the two generating endpoints have in common: shared fields, and from a body to a request.

Every field is honoured or refused by name; none is accepted and ignored. `user` and
`safety_identifier` only identify the caller's own user and ask for nothing, so they are accepted.
Values out of range are refused by SamplingParams, which every way into the engine shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from headway.core.params import MAX_LOGIT_BIASES, MAX_LOGPROBS, SamplingParams
from headway.errors import InvalidRequestError

MAX_STOP_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 2**63 - 1
_MAX_REASONS = 4
_UNION_TAGS = ("str", "list[any]")
"""What the validator puts into a place to say which type of several it was trying."""

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


class Fields(BaseModel):
    """A JSON object of the API: unknown keys are errors, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Fields):
    """How a stream is to be written."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(Fields):
    """The fields both endpoints take. None always means the same as leaving the field out.

    Items of long lists are checked after their number is, not here, where each would be reported.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[Any] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    user: str | None = None

    # vLLM's additions
    priority: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are not supported, each with the values that ask for nothing."""

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what is well formed and still not something this server does."""
        for name, harmless in self.unsupported.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(f"{name} is not supported", name)
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequestError(
                    "stream_options is only allowed when stream is true", "stream_options"
                )
            if self.stream_options.include_obfuscation:
                name = "stream_options.include_obfuscation"
                raise InvalidRequestError(f"{name} is not supported", name)
        _check_bound("top_k", self.top_k, MAX_TOP_K)
        _check_bound("priority", self.priority, MAX_PRIORITY)

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The sampling fields as checked params."""
        given: dict[str, Any] = {
            name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=_stop_strings(self.stop),
            logit_bias=_logit_bias(self.logit_bias),
            **given,
        )


RequestT = TypeVar("RequestT", bound=GenerationRequest)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Read a request body. NaN and Infinity are not JSON, and nesting is bounded."""
    try:
        content = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequestError("the body must be a JSON object")
    # Before validation, which would write a complaint about every single one of them.
    unknown = next((name for name in content if name not in kind.model_fields), None)
    if unknown is not None:
        raise InvalidRequestError(f"unknown field: {unknown[:200]}", unknown[:200])
    try:
        request = kind.model_validate(content)
    except ValidationError as error:
        raise _named(error) from None
    request.check()
    return request


def check_num_logprobs(name: str, value: int | None) -> None:
    """The count of alternatives per token, under the name its endpoint has for it."""
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", name)


def _named(error: ValidationError) -> InvalidRequestError:
    """The first complaint, with the field it is about."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    kind, name = problems[0]["type"], _path(problems[0]["loc"])
    if kind == "extra_forbidden":
        return InvalidRequestError(f"unknown field: {name[:200]}", name[:200])
    if kind == "missing":
        return InvalidRequestError(f"{name} is required", name)
    # A field of several types complains once for each of them.
    reasons = dict.fromkeys(item["msg"] for item in problems if _path(item["loc"]) == name)
    return InvalidRequestError(f"{name}: {'; or '.join([*reasons][:_MAX_REASONS])}", name)


def _path(location: tuple[int | str, ...]) -> str:
    """A place in the body, such as messages[0].role."""
    path = ""
    for part in location:
        if part in _UNION_TAGS:
            break
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")


def _check_bound(name: str, value: int | None, bound: int) -> None:
    if value is not None and abs(value) > bound:
        raise InvalidRequestError(f"{name} must be between {-bound} and {bound}, got {value}", name)


def _stop_strings(stop: str | list[Any] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in stops:
        if not isinstance(text, str):
            raise InvalidRequestError("stop must be a string or a list of strings", "stop")
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"a stop string has {len(text)} characters; at most {MAX_STOP_CHARS}", "stop"
            )
    return stops


def _logit_bias(bias: dict[str, Any] | None) -> dict[int, float]:
    """JSON keys are strings, so token ids arrive as their decimal digits."""
    bias = bias or {}
    if len(bias) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIASES}", "logit_bias"
        )
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequestError(
                f"logit_bias keys are token ids, got {key[:40]!r}", "logit_bias"
            )
    return {int(key): value for key, value in bias.items()}
