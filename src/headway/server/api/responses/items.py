"""The items of an answer: each is opened, grows and is closed before the next one opens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.server.schema.responses import CUSTOM_FIELD

Json = dict[str, Any]
COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"


@dataclass(slots=True)
class TextItem:
    """A message of the assistant, or its reasoning: an item with one part of text."""

    id: str
    is_reasoning: bool = False
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[Json] = field(default_factory=list[Json])

    @property
    def kind(self) -> str:
        return "reasoning" if self.is_reasoning else "message"

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def opening(self) -> list[Json]:
        added = {"type": "response.output_item.added", "item": self._item([], IN_PROGRESS)}
        part = {"type": "response.content_part.added", "part": self._part("", [])}
        return [added, {**part, "item_id": self.id, "content_index": 0}]

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        self.logprobs += logprobs
        if not text:
            return []
        self.texts.append(text)
        return [self._about_text("delta", {"delta": text}, logprobs)]

    def closing(self, status: str) -> list[Json]:
        text, logprobs = self.text, self.logprobs
        part = {"type": "response.content_part.done", "part": self._part(text, logprobs)}
        return [
            self._about_text("done", {"text": text}, logprobs),
            {**part, "item_id": self.id, "content_index": 0},
            {"type": "response.output_item.done", "item": self.whole(status)},
        ]

    def whole(self, status: str) -> Json:
        return self._item([self._part(self.text, self.logprobs)], status)

    def _item(self, content: list[Json], status: str) -> Json:
        item: Json = {"id": self.id, "type": self.kind, "status": status, "content": content}
        more = {"summary": []} if self.is_reasoning else {"role": "assistant"}
        return {**item, **more}

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        if self.is_reasoning:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def _about_text(self, what: str, fields: Json, logprobs: list[Json]) -> Json:
        name = "reasoning_text" if self.is_reasoning else "output_text"
        event = {"type": f"response.{name}.{what}", "item_id": self.id, "content_index": 0}
        more = {} if self.is_reasoning else {"logprobs": list(logprobs)}
        return {**event, **fields, **more}


@dataclass(slots=True)
class CallItem:
    """A call of a function."""

    id: str
    call_id: str
    name: str
    parts: list[str] = field(default_factory=list[str])

    @property
    def arguments(self) -> str:
        return "".join(self.parts)

    def opening(self) -> list[Json]:
        return [{"type": "response.output_item.added", "item": self._item("", IN_PROGRESS)}]

    def add(self, arguments: str) -> list[Json]:
        if not arguments:
            return []
        self.parts.append(arguments)
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, "item_id": self.id, "delta": arguments}]

    def closing(self, status: str) -> list[Json]:
        done = {"type": "response.function_call_arguments.done", "item_id": self.id}
        return [
            {**done, "name": self.name, "arguments": self.arguments},
            {"type": "response.output_item.done", "item": self.whole(status)},
        ]

    def whole(self, status: str) -> Json:
        return self._item(self.arguments, status)

    def _item(self, arguments: str, status: str) -> Json:
        item = {"id": self.id, "type": "function_call", "status": status}
        return {**item, "call_id": self.call_id, "name": self.name, "arguments": arguments}


class CustomCallItem(CallItem):
    """A call of a custom tool; its text is known when its arguments are complete."""

    def add(self, arguments: str) -> list[Json]:
        self.parts.append(arguments)
        return []

    def closing(self, status: str) -> list[Json]:
        text, about = self._text(), {"item_id": self.id}
        delta = {"type": "response.custom_tool_call_input.delta", **about, "delta": text}
        return [
            *([delta] if text else ()),
            {"type": "response.custom_tool_call_input.done", **about, "input": text},
            {"type": "response.output_item.done", "item": self.whole(status)},
        ]

    def whole(self, status: str) -> Json:
        return self._item(self._text(), status)

    def _text(self) -> str:
        """Return the only argument; empty if the call was cut."""
        try:
            return msgspec.json.decode(self.arguments, type=dict[str, str]).get(CUSTOM_FIELD, "")
        except msgspec.DecodeError:
            return ""

    def _item(self, arguments: str, status: str) -> Json:
        item = {"id": self.id, "type": "custom_tool_call", "status": status}
        return {**item, "call_id": self.call_id, "name": self.name, "input": arguments}


Item = TextItem | CallItem
