"""The answer of /v1/messages: a message, or the events that add up to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.core.request import FinishReason
from headway.server.api.generate.answer import TOOL_CALLS, ChoicePart, EventStamp, GenerationJob
from headway.server.api.generate.generation import Generation
from headway.server.http import sse
from headway.server.http.errors import ErrorResponse

_REASONS = {
    FinishReason.STOP.value: "end_turn",
    FinishReason.LENGTH.value: "max_tokens",
    TOOL_CALLS: "tool_use",
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By type of block: the type of its deltas, and their field."""

Json = dict[str, Any]


@dataclass(slots=True)
class _Block:
    """A block of the content, which grows by texts."""

    kind: str
    call: Json = field(default_factory=dict[str, Any])
    """Id and name of a tool use."""
    texts: list[str] = field(default_factory=list[str])

    def opening(self) -> Json:
        return self._block("", {})

    def whole(self) -> Json:
        text = "".join(self.texts)
        return self._block(text, _read_input(text) if self.kind == "tool_use" else {})

    def _block(self, text: str, arguments: Json) -> Json:
        if self.kind == "tool_use":
            return {"type": self.kind, **self.call, "input": arguments}
        more = {"signature": ""} if self.kind == "thinking" else {}
        return {"type": self.kind, self.kind: text, **more}


def _read_input(arguments: str) -> Json:
    """Return the arguments of a call; empty if it was cut."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


class MessageForm:
    """Writes one answer; the whole answer and the events come from the same blocks."""

    headers: Mapping[str, str] = {}

    def __init__(self, job: GenerationJob, generation: Generation) -> None:
        self._job = job
        self._generation = generation
        self._blocks: list[_Block] = []
        self._end: Json = {"stop_reason": None, "stop_sequence": None}

    def begin(self, index: int, stamp: EventStamp) -> bytes:
        del index, stamp
        start = {"type": "message_start", "message": self._message([])}
        return sse.typed_event(start) + sse.typed_event({"type": "ping"})

    def write(self, piece: ChoicePart, stamp: EventStamp) -> bytes:
        del stamp
        return b"".join([sse.typed_event(event) for event in self._add(piece)])

    def end(self, stamp: EventStamp, error: ErrorResponse | None = None) -> bytes:
        del stamp
        if error is not None:
            return sse.typed_event(error.anthropic_body())
        delta = {"type": "message_delta", "delta": self._end, "usage": self._usage()}
        events = [*self._close(), delta, {"type": "message_stop"}]
        return b"".join([sse.typed_event(event) for event in events])

    def whole(self, pieces: Sequence[ChoicePart], numerics: Sequence[str]) -> Json:
        del numerics
        for piece in pieces:
            self._add(piece)
        return self._message([block.whole() for block in self._blocks])

    def _add(self, piece: ChoicePart) -> list[Json]:
        """Return the events of a part of the reply."""
        events: list[Json] = []
        for kind, text in (("thinking", piece.reasoning), ("text", piece.text)):
            if text:
                if not self._blocks or self._blocks[-1].kind != kind:
                    events += self._open(_Block(kind))
                events += self._grow(text)
        for call in piece.calls:
            if call.name is not None:
                events += self._open(_Block("tool_use", {"id": call.id, "name": call.name}))
            events += self._grow(call.arguments)
        if piece.finish_reason is not None:
            reason = _REASONS[piece.finish_reason] if piece.stop is None else "stop_sequence"
            self._end = {"stop_reason": reason, "stop_sequence": piece.stop}
        return events

    def _open(self, block: _Block) -> list[Json]:
        events = self._close()
        self._blocks.append(block)
        opening = {"type": "content_block_start", "content_block": block.opening()}
        return [*events, {**opening, "index": len(self._blocks) - 1}]

    def _grow(self, text: str) -> list[Json]:
        if not text:
            return []
        block = self._blocks[-1]
        block.texts.append(text)
        kind, name = _DELTAS[block.kind]
        delta = {"type": "content_block_delta", "delta": {"type": kind, name: text}}
        return [{**delta, "index": len(self._blocks) - 1}]

    def _close(self) -> list[Json]:
        if not self._blocks:
            return []
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": self._generation.id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": content,
            **self._end,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        """Return token counts; tokens that were found in the cache are counted apart."""
        usage = self._generation.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
        }
