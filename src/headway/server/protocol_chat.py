"""The request body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import FailFast

from headway.core.params import SamplingParams
from headway.errors import InvalidRequestError
from headway.server.protocol import Fields, GenerationRequest, check_num_logprobs

ROLES = ("system", "developer", "user", "assistant")


class Message(Fields):
    """One turn. Content is text, or a list of text parts."""

    role: str
    content: Any = None
    name: str | None = None
    refusal: Any = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None

    def for_template(self, place: str) -> dict[str, Any]:
        """The message as the chat template sees it; `place` names it in a refusal."""
        for name in ("refusal", "audio", "tool_calls", "tool_call_id", "function_call"):
            if getattr(self, name) not in (None, []):
                raise InvalidRequestError(f"{place}.{name} is not supported", f"{place}.{name}")
        if self.role not in ROLES:
            raise InvalidRequestError(
                f"{place}.role must be one of {', '.join(ROLES)}, got {self.role[:40]!r}",
                f"{place}.role",
            )
        # Templates know the role by its older name.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": _content(self.content, f"{place}.content")}
        # What a name means is up to the model's template.
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(GenerationRequest):
    """Without a limit on the output, it may take all the room the prompt leaves."""

    messages: Annotated[list[Message], FailFast()]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    safety_identifier: str | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none",),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise InvalidRequestError("messages is empty", "messages")
        limits = (self.max_tokens, self.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ; give one of them", "max_tokens"
            )
        check_num_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")

    def params(self) -> SamplingParams:
        limit = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        return self.sampling(limit, (self.top_logprobs or 0) if self.logprobs else None)

    def field_for(self, param: str | None) -> str | None:
        """The field of this body that a param of the engine was made from."""
        if param == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens" if self.max_completion_tokens is not None else "messages"
        return "messages" if param == "prompt" else param

    def conversation(self) -> list[dict[str, Any]]:
        return [
            message.for_template(f"messages[{place}]")
            for place, message in enumerate(self.messages)
        ]


def _content(content: Any, place: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{place} must be text or a list of text parts", place)
    return [_text_part(part, f"{place}[{index}]") for index, part in enumerate(content)]


def _text_part(part: Any, place: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequestError(
            f"{place}: only parts of type 'text' are supported, got {str(kind)[:40]!r}", place
        )
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise InvalidRequestError(f"{place} must have a type and a text, nothing else", place)
    return part
