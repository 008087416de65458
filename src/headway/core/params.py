"""Sampling parameters of one request, validated once on construction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from headway.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_SHOWN_TOKEN_IDS = 16
MIN_TEMPERATURE = 1e-5
"""A lower temperature is greedy: dividing by it would leave the range of fp32."""
_MAX_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, named as in the OpenAI API and vLLM.

    `temperature=0` is greedy. `top_k=0` is no limit. `max_tokens=None` is as many as the
    context has room for, `max_tokens=0` computes the prompt only. `prompt_logprobs` is the number
    of likeliest tokens whose log-probabilities each prompt token gets beside its own; None: no
    token of the prompt gets any. `seed=None` draws a new seed when the request is accepted.
    `grammar` is a Lark grammar that the output must follow; see `headway.text.grammar`.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """The bad words as tokens; set when the request is accepted."""
    grammar: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    is_embedding: bool = False
    """Whether the request wants the last hidden state of its prompt, and no output."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: tuple[int, ...] = ()
    """Special tokens that are part of the text even if special tokens are skipped."""

    def __post_init__(self) -> None:
        self._normalize()
        self._check_counts()
        self._check_floats()
        self._check_stops()
        self._check_tokens()

    def _normalize(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words)
        object.__setattr__(self, "bad_words", words)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.top_k == -1:  # vLLM's older spelling of "no limit"
            object.__setattr__(self, "top_k", 0)

    def _check_counts(self) -> None:
        _check_int("n", self.n, 1, MAX_SAMPLES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
        _check_int("min_tokens", self.min_tokens, 0)
        _check_int("top_k", self.top_k, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than the {self.max_tokens} tokens that "
                "the output may have",
                "min_tokens",
            )
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.is_embedding and (self.max_tokens != 0 or self.n != 1):
            raise InvalidRequestError("an embedding has no output: max_tokens must be 0", "n")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)

    def _check_floats(self) -> None:
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be greater than 0", "top_p")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise InvalidRequestError(
                f"logit_bias must have at most {MAX_LOGIT_BIASES} entries, "
                f"got {len(self.logit_bias)}",
                "logit_bias",
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_float("logit_bias", bias, -100.0, 100.0)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", "stop"
            )
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain an empty string", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids must have at most {MAX_STOP_TOKEN_IDS} ids, "
                f"got {len(self.stop_token_ids)}",
                "stop_token_ids",
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)

    def _check_tokens(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None:
            if not 0 < len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
                raise InvalidRequestError(
                    f"allowed_token_ids must have 1 to {MAX_ALLOWED_TOKEN_IDS} ids, "
                    f"got {len(allowed)}",
                    "allowed_token_ids",
                )
            for token_id in allowed:
                _check_int("allowed_token_ids", token_id, 0)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(
                f"bad_words must have at most {MAX_BAD_WORDS} words, got {len(self.bad_words)}",
                "bad_words",
            )
        for word in self.bad_words:
            if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARS:  # pyright: ignore
                raise InvalidRequestError(
                    f"bad_words must be texts of 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words"
                )
        if len(self.bad_words_token_ids) > 2 * MAX_BAD_WORDS or not all(
            0 < len(ids) <= 4 * MAX_BAD_WORD_CHARS + 1 and min(ids) >= 0
            for ids in self.bad_words_token_ids
        ):
            raise InvalidRequestError("bad_words_token_ids is out of range", "bad_words")
        if len(self.shown_token_ids) > MAX_SHOWN_TOKEN_IDS:
            raise InvalidRequestError("shown_token_ids is too long", "shown_token_ids")
        if self.grammar is not None and len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"the grammar has {len(self.grammar)} characters; at most {MAX_GRAMMAR_CHARS} are "
                "allowed",
                "grammar",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def resolved(self, eos_token_ids: tuple[int, ...], max_tokens: int) -> SamplingParams:
        """Return the parameters with max_tokens and the stop ids resolved.

        The end-of-sequence ids of the model join `stop_token_ids` unless `ignore_eos` is set. The
        engine core uses resolved parameters only.
        """
        limit = max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)
        if self.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than the {limit} tokens left for output",
                "min_tokens",
            )
        eos = () if self.ignore_eos else eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *self.stop_token_ids)))
        self._check_tokens_left(stop_ids)
        return replace(self, max_tokens=limit, stop_token_ids=stop_ids, ignore_eos=True)

    def _check_tokens_left(self, stop_ids: tuple[int, ...]) -> None:
        """Refuse settings that together may leave no token to sample."""
        if self.grammar is not None:
            for name in _UNFIT_FOR_GRAMMAR:
                if getattr(self, name):
                    raise InvalidRequestError(
                        f"{name} cannot be combined with a grammar (structured output, tools, "
                        "thinking_token_budget); leave it out",
                        name,
                    )
        if self.allowed_token_ids is None:
            return
        left = set(self.allowed_token_ids)
        left.difference_update(ids[0] for ids in self.bad_words_token_ids if len(ids) == 1)
        if self.min_tokens:
            left.difference_update(stop_ids)
        if not left:
            raise InvalidRequestError(
                "bad_words or min_tokens forbid all of allowed_token_ids", "allowed_token_ids"
            )


_UNFIT_FOR_GRAMMAR = ("allowed_token_ids", "bad_words", "ignore_eos", "min_tokens")
"""Each may leave no token that continues the grammar, or ends it."""


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {_short(value)}", name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {bounds}, got {_short(value)}", name)


def _check_float(name: str, value: object, low: float, high: float) -> None:
    # NaN compares false to everything, so it is refused here too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} must be a number between {low:g} and {high:g}, got {_short(value)}", name
        )


def _short(value: object) -> str:
    """Return a value for an error message, in bounded length."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "an integer of more than 128 bits"
    if isinstance(value, bool | int | float | str | bytes | None):
        text = repr(value[:_MAX_SHOWN] if isinstance(value, str | bytes) else value)
        return text[:_MAX_SHOWN]
    return f"a {type(value).__name__}"
