"""What answers look like, for the OpenAPI document. Answers are not made from these: the tests
hold real ones against them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length"]


class Answer(BaseModel):
    """An object that may gain fields in later versions."""

    model_config = ConfigDict(strict=True)


class Error(Answer):
    """What was wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """Every refusal and every failure."""

    error: Error


class PromptTokensDetails(Answer):
    """How much of the prompts was in the cache."""

    cached_tokens: Count


class Usage(Answer):
    """Token counts. A prompt counts once, however many samples it has."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class ScoredToken(Answer):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(ScoredToken):
    """A token of the answer, and the most likely ones in its place."""

    top_logprobs: list[ScoredToken]


class ChatLogprobs(Answer):
    """One entry per token."""

    content: list[ChosenToken]
    refusal: None


class ChatMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One sample."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """A whole answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(Answer):
    """Four lists of one length: an item per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One sample; sample i of prompt p has the index p*n + i."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(Answer):
    """A whole answer to one prompt or several."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelDescription(Answer):
    """A name the model goes by; its length is known once it is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int = 0


class ModelList(Answer):
    """Every name the model goes by."""

    object: Literal["list"]
    data: list[ModelDescription]


class Tokens(Answer):
    """A text as token ids; their spellings if they were asked for."""

    count: Count
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Answer):
    """Token ids as text."""

    prompt: str


class Version(Answer):
    """Which release this is."""

    version: str


class Health(Answer):
    """Whether the process lives, or takes requests."""

    status: str


class WaitShare(Answer):
    """So many seconds of a wait had this cause."""

    cause: str
    seconds: Annotated[float, Field(ge=0)]
    held_by: str = ""


class Explanation(Answer):
    """What happened to a request, in numbers and in words."""

    object: Literal["request.explanation"]
    id: str
    state: Literal["waiting", "running", "finished"]
    arrived_at: float
    duration_s: float
    queue_s: float = 0.0
    causes: list[WaitShare] = []
    num_prompt_tokens: Count = 0
    num_cached_tokens: Count = 0
    num_output_tokens: Count = 0
    num_recomputed_tokens: Count = 0
    num_preemptions: Count = 0
    num_engines_lost: Count = 0
    text: str
    timeline_text: str
