"""Histories of token streams, and a checker that compares them with undisturbed ones.

A history is all that a client saw of one request: the tokens of each choice in order, the end of
each choice, errors, and the time of each event. `problems` says where a history differs from the
history of the same request without a fault.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class ChoiceHistory:
    """One choice of a stream."""

    tokens: list[str] = field(default_factory=list[str])
    """Texts of the tokens; single characters if the request has no log-probabilities."""
    logprobs: list[float] = field(default_factory=list[float])
    ends: list[str] = field(default_factory=list[str])
    """Finish reasons; there must be one."""
    num_after_end: int = 0
    """Tokens that came after a finish reason."""


@dataclass
class History:
    """One stream, as its client saw it."""

    request_id: str = ""
    choices: dict[int, ChoiceHistory] = field(default_factory=dict[int, ChoiceHistory])
    num_done: int = 0
    """How often the end of the stream was announced."""
    num_tokens: int | None = None
    """Output tokens that the server counted."""
    errors: list[str] = field(default_factory=list[str])
    fingerprints: list[str] = field(default_factory=list[str])
    """The system fingerprints of the chunks, without repetitions."""
    times: list[float] = field(default_factory=list[float])

    def choice(self, index: int) -> ChoiceHistory:
        return self.choices.setdefault(index, ChoiceHistory())

    def add(self, data: str) -> None:
        """Add one event of the stream."""
        self.times.append(time.monotonic())
        if data == "[DONE]":
            self.num_done += 1
            return
        event = json.loads(data)
        if "error" in event:
            self.errors.append(event["error"]["message"])
            return
        self.request_id = event.get("id", "")
        fingerprint = event.get("system_fingerprint", "")
        if fingerprint and fingerprint not in self.fingerprints[-1:]:
            self.fingerprints.append(fingerprint)
        for choice in event["choices"]:
            _add_choice(self.choice(choice["index"]), choice)
        if event.get("usage"):
            self.num_tokens = event["usage"]["completion_tokens"]

    def longest_gap_s(self, since: float) -> float:
        """Return the longest time between two events of which the later is after `since`."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before for before, after in pairs if after > since), default=0.0)


def _add_choice(history: ChoiceHistory, choice: dict[str, Any]) -> None:
    scores = choice.get("logprobs")
    tokens = list(choice["text"]) if scores is None else scores["tokens"]
    if history.ends:
        history.num_after_end += len(tokens)
    history.tokens += tokens
    history.logprobs += [] if scores is None else scores["token_logprobs"]
    if choice["finish_reason"] is not None:
        history.ends.append(choice["finish_reason"])


async def record(
    client: httpx.AsyncClient, body: dict[str, Any], history: History | None = None
) -> History:
    """Stream a completion; return its history, also if the connection ends early."""
    history = History() if history is None else history
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json=streamed) as response:
            if response.status_code != 200:
                history.errors.append(f"{response.status_code} {(await response.aread())[:500]}")
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    history.add(line.removeprefix("data: "))
    except httpx.HTTPError as error:
        history.errors.append(f"{type(error).__name__}: {error}")
    return history


def problems(history: History, reference: History) -> list[str]:
    """Return how a history differs from that of the same request without a fault."""
    found = [f"error: {message}" for message in history.errors]
    if history.num_done != 1:
        found.append(f"the end of the stream was announced {history.num_done} times")
    if history.num_tokens != reference.num_tokens:
        found.append(f"{history.num_tokens} tokens counted, not {reference.num_tokens}")
    if history.choices.keys() != reference.choices.keys():
        found.append(f"choices {sorted(history.choices)}, not {sorted(reference.choices)}")
    for index in sorted(history.choices.keys() & reference.choices.keys()):
        differences = _compare(history.choices[index], reference.choices[index])
        found += [f"choice {index}: {difference}" for difference in differences]
    return found


def _compare(history: ChoiceHistory, reference: ChoiceHistory) -> list[str]:
    found = []
    if history.num_after_end:
        found.append(f"{history.num_after_end} tokens after the end")
    if history.ends != reference.ends or len(history.ends) != 1:
        found.append(f"ends {history.ends}, not {reference.ends}")
    if history.tokens != reference.tokens:
        found.append(_difference(history.tokens, reference.tokens))
    elif history.logprobs != reference.logprobs:
        found.append("the tokens are the same, their log-probabilities are not")
    return found


def _difference(tokens: list[str], expected: list[str]) -> str:
    """Name the first position that differs, and what happened there."""
    pairs = enumerate(zip(tokens, expected, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(expected)))
    if sorted(tokens) == sorted(expected):
        kind = "reordered"
    elif len(tokens) > len(expected):
        kind = "doubled" if at and tokens[at] == tokens[at - 1] else "added"
    elif len(tokens) < len(expected):
        kind = "dropped"
    else:
        kind = "changed"
    return f"position {at}: {kind} ({tokens[at : at + 3]}, not {expected[at : at + 3]})"
