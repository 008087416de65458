"""Response bodies, for the OpenAPI document.

Answers are not made from these models; tests compare real answers with them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """An object that may gain fields in later versions."""

    model_config = ConfigDict(strict=True)


class Error(Answer):
    """What is wrong; `param` names the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The body of every refusal and every failure."""

    error: Error


class PromptTokensDetails(Answer):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: Count


class Usage(Answer):
    """Token counts; a prompt counts once, however many samples it has."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class ScoredToken(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(ScoredToken):
    """A token of the output, and the most likely tokens at its position."""

    top_logprobs: list[ScoredToken]


class ChatLogprobs(Answer):
    """One entry per token."""

    content: list[ChosenToken]
    refusal: None


class CalledFunction(Answer):
    """The function to call, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class RankedToken(Answer):
    """A token at a position of a prompt; the likeliest has rank 1."""

    logprob: float
    rank: Annotated[int, Field(ge=1)]
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class ChatMessage(Answer):
    """The output of the model; the content is null if there are only calls or reasoning."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChoice(Answer):
    """One sample."""

    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] = []


class ChatCompletion(Answer):
    """A whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str = ""
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class CompletionLogprobs(Answer):
    """Four lists of the same length, with an item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One sample; sample i of prompt p has the index p*n + i."""

    index: Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: PromptLogprobs = []


class Completion(Answer):
    """A whole answer to one prompt or several."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str = ""
    choices: list[CompletionChoice]
    usage: Usage
    prompt_token_ids: list[int] = []


class EmbeddingUsage(Answer):
    """Token counts of all inputs."""

    prompt_tokens: Count
    total_tokens: Count


class EmbeddedInput(Answer):
    """A vector of length 1; in base64, its fp32 numbers, lowest byte first."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str


class Embeddings(Answer):
    """The embeddings of all inputs, in their order."""

    object: Literal["list"]
    data: list[EmbeddedInput]
    model: str
    usage: EmbeddingUsage


class ModelDescription(Answer):
    """A served name of the model; max_model_len is there once the model is loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int = 0


class ModelList(Answer):
    """Every served name of the model."""

    object: Literal["list"]
    data: list[ModelDescription]


class Tokens(Answer):
    """A text as token ids, with the text of each token if requested."""

    count: Count
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Answer):
    """Token ids as text."""

    prompt: str


class TokenizerInfo(Answer):
    """Special tokens by name, and the chat template."""

    tokenizer_class: str
    vocab_size: Count
    bos_token_id: int | None
    eos_token_ids: list[int]
    chat_template: str | None
    bos_token: str = ""
    eos_token: str = ""
    unk_token: str = ""
    pad_token: str = ""


class ServerLoad(Answer):
    """How many requests are being answered."""

    server_load: Count


class Cancelled(Answer):
    """A request that was cancelled."""

    id: str
    object: Literal["request"]
    cancelled: Literal[True]


class StoredFile(Answer):
    """A file: the input of a batch, or its results."""

    id: str
    object: Literal["file"]
    bytes: Count
    created_at: Count
    expires_at: Count
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(Answer):
    """Files of this client."""

    object: Literal["list"]
    data: list[StoredFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    """A file that was deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchProblem(Answer):
    """What is wrong with a line of the input file."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(Answer):
    """What is wrong with an input file."""

    object: Literal["list"]
    data: list[BatchProblem]


class BatchCounts(Answer):
    """Requests of a batch: all, answered, and failed."""

    total: Count
    completed: Count
    failed: Count


class Batch(Answer):
    """The requests in a file, and how far they have come."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "failed",
        "in_progress",
        "finalizing",
        "completed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Count
    expires_at: Count
    in_progress_at: Count | None
    finalizing_at: Count | None
    completed_at: Count | None
    failed_at: Count | None
    expired_at: Count | None
    cancelling_at: Count | None
    cancelled_at: Count | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(Answer):
    """Batches of this client, newest first."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Version(Answer):
    """The release of the server."""

    version: str


class Health(Answer):
    """Whether the process is alive, or accepts requests."""

    status: str


class WaitShare(Answer):
    """Seconds of a wait with one cause."""

    cause: str
    seconds: Annotated[float, Field(ge=0)]
    held_by: str = ""


class Explanation(Answer):
    """The account of a request, in numbers and in words."""

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
