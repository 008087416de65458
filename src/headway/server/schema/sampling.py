"""Fields that decide how output is sampled and scheduled, whatever API they come by."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from headway.core.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from headway.errors import InvalidRequestError
from headway.server.schema.fields import Fields
from headway.server.schema.structured import StructuredOutputs
from headway.tenancy.values import MAX_TARGET_MS, MIN_TARGET_MS

MAX_STOP_CHARS = 256
MAX_SALT_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_INT64 = 2**63 - 1

_PASSED_ON = (
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

TARGET_FIELDS = ("ttft_ms", "tpot_ms", "deadline_ms")
TargetMs = Annotated[float, Field(ge=MIN_TARGET_MS, le=MAX_TARGET_MS)]


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


class SamplingFields(SharedFields):
    """Sampling fields of chat, completions and responses, and the cache salt.

    Items of long lists are checked after the length of the list, because pydantic would report each
    wrong item.
    """

    stop: Annotated[str | list[Any] | None, WithJsonSchema({"anyOf": [_STOP, _STOPS, _NULL]})] = (
        None
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[str, Any] | None, WithJsonSchema({"anyOf": [_LOGIT_BIAS, _NULL]})
    ] = None

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
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    def shared(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SamplingFields.model_fields}

    def sampling_params(self) -> dict[str, Any]:
        """Return the fields that SamplingParams has, in its form."""
        passed_on = {
            name: value for name in _PASSED_ON if (value := getattr(self, name)) is not None
        }
        stop, bias = _stop_strings(self.stop), _logit_bias(self.logit_bias)
        return {"stop": stop, "logit_bias": bias, **passed_on}


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
