"""Response bodies of /v1/responses and /v1/messages, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from headway.server.schema.answers import Answer, ChosenToken, Count

ItemStatus = Literal["completed", "incomplete", "in_progress"]
"""An item is in progress only in a background response that runs."""


class MessageText(Answer):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChosenToken]


class ReasoningText(Answer):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    """A message of the assistant."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[MessageText]


class ReasoningItem(Answer):
    """Reasoning before the message."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    """A call of a function, with its arguments as JSON text."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CustomToolCall(Answer):
    """A call of a custom tool, with its text."""

    type: Literal["custom_tool_call"]
    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str


class InputDetails(Answer):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: Count


class OutputDetails(Answer):
    """Output tokens that are reasoning."""

    reasoning_tokens: Count


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: Count
    input_tokens_details: InputDetails
    output_tokens: Count
    output_tokens_details: OutputDetails
    total_tokens: Count


class IncompleteDetails(Answer):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseFailure(Answer):
    """Why a background response failed."""

    code: str
    message: str


class ResponseObject(Answer):
    """An answer as items, with the fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[MessageItem | ReasoningItem | FunctionCallItem | CustomToolCall]
    usage: ResponseUsage | None
    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    background: bool
    max_tool_calls: None
    previous_response_id: None
    service_tier: Literal["default"]
    store: bool
    truncation: Literal["disabled"]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    user: str | None


class ResponseDeleted(Answer):
    """A background response that is no longer kept."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class TextBlock(Answer):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """Reasoning before the text."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """Token counts; cached tokens of the prompt are counted apart."""

    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class MessageObject(Answer):
    """An answer as blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(Answer):
    """The number of tokens of a prompt."""

    input_tokens: Count


class AnthropicError(Answer):
    """What is wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(Answer):
    """The body of every refusal and every failure of /v1/messages."""

    type: Literal["error"]
    error: AnthropicError
