"""Mutates valid bodies by seed, in structure or in bytes.

The server may accept a mutated body, so its output is kept short.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.cases import CHAT, COMPLETIONS
from benchmarks.faults.exchange import Answer, problems_of_answer

MAX_BODY_BYTES = 64 * 1024
SHORT = 4
"""Longest output of a mutated body, in tokens."""
GRANTABLE = 1_000_000
"""Longer than any context: the server refuses a larger limit anyway."""
LIMITS = ("max_tokens", "max_completion_tokens")
BUSY = (429, 503)
OVERLOADED = b'"code":"server_is_overloaded"'

SEEDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "ann"},
                {"role": "assistant", "content": "Hello.", "tool_calls": []},
                {"role": "user", "content": "More\u2026 \U0001f600"},
            ],
            "temperature": 0.7,
            "top_p": 0.9,
            "logprobs": True,
            "top_logprobs": 3,
            "stop": ["\n\n", "END"],
            "user": "someone",
        },
    ),
    (
        CHAT,
        {
            "messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "n": 2,
            "seed": 7,
            "max_completion_tokens": 2,
            "response_format": {"type": "text"},
            "logit_bias": {"5": -100, "6": 1.5},
        },
    ),
    (COMPLETIONS, {"prompt": "Once upon a time"}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "best_of": 2, "logprobs": 5, "stop": "x"}),
    (COMPLETIONS, {"prompt": [1, 2, 3], "ignore_eos": True, "min_tokens": 1, "top_k": 5}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "echo": True, "prompt_logprobs": 2, "max_tokens": 0}),
    (
        COMPLETIONS,
        {
            "prompt": [[1, 2], [3]],
            "stream": True,
            "presence_penalty": 1.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "min_p": 0.05,
            "priority": 3,
            "stop_token_ids": [1, 2],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "echo": True,
            "logprobs": 3,
            "suffix": "",
        },
    ),
)

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.0, -0.0, 0.5, 1.5, 2, 3, 8, 9, 20, 21, 64, 65, 128, 1025),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(1e-320, 1e30, 1e308, float("nan"), float("inf"), float("-inf")),
    *("", "x", "1", "NaN", "true", "null", "\u0000", "\ud800", "\U0010ffff", "{{ 7*7 }}", "%s"),
    *("x" * 300, " " * 5000, "'" * 5000, "\u0301" * 500, "<|im_end|>", "text", "user", "none"),
    *([], {}, [[]], [None], [1, "a"], ["a"] * 70, [0] * 3000, {"a": 1}, {"": None}),
    *({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "http://x"}}),
    *({"5": 1}, {"5": 10**400}, {str(i): 1 for i in range(1100)}),
)
ODD_KEYS = (
    "",
    "N",
    "n ",
    "tools",
    "best_of",
    "echo",
    "prompt",
    "messages",
    "__class__",
    "guided_json",
)
ODD_BYTES = (b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"\\", b"[", b"{", b"]", b"}", b",", b":")
ODD_TEXT = (
    b"\\ud800",
    b"NaN",
    b"1e999",
    b"-",
    b"9" * 400,
    b"[" * 300,
    b"\xef\xbb\xbf",
    b"/*",
    b"null",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutated body; seed and place in the sequence reproduce it."""

    place: int
    path: str
    body: bytes


def mutants(count: int, seed: int) -> Iterator[Mutant]:
    for place in range(count):
        path, body = Mutator(random.Random(f"{seed}/{place}")).make()
        yield Mutant(place, path, body)


def problems_of_mutant(answer: Answer) -> list[str]:
    """Return problems of an answer; the server may accept or refuse the body."""
    if not isinstance(answer.outcome, int):
        return [f"no answer: {answer.outcome}"]
    if answer.outcome >= 500 and not is_busy(answer):
        return [f"got {answer.outcome}: {answer.body[:200]!r}"]
    if answer.outcome == 200 and is_busy(answer):
        return []
    return problems_of_answer(answer)


def is_busy(answer: Answer) -> bool:
    """Whether the server was overloaded; a stream that has begun says so in an event."""
    return answer.outcome in BUSY or (answer.outcome == 200 and OVERLOADED in answer.body)


class Mutator:
    """Applies a few random changes to one seed body."""

    def __init__(self, source: random.Random) -> None:
        self._random = source

    def make(self) -> tuple[str, bytes]:
        path, seed = self._random.choice(SEEDS)
        content = copy.deepcopy(seed)
        content.setdefault("max_tokens", 2)
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 4))):
            self._change_structure(content)
        body = self._write(shortened(content))
        if self._random.random() < 0.4:
            for _ in range(self._random.choice((1, 1, 2, 4, 8))):
                body = self._change_bytes(body)
            body = _shortened_bytes(body)
        if self._random.random() < 0.02:
            path = COMPLETIONS if path == CHAT else CHAT
        return path, body[:MAX_BODY_BYTES]

    def _write(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=self._random.random() < 0.5)
        if self._random.random() < 0.05 and text.startswith("{") and len(text) > 2:
            odd = json.dumps(self._random.choice(ODD_VALUES))
            key = json.dumps(self._random.choice([*content]))
            text = f"{{{key}: {odd}, {text[1:]}"  # a duplicate key; the last one counts
        return text.encode("utf-8", "surrogatepass")

    def _change_structure(self, content: dict[str, Any]) -> None:
        places = [*_places(content)]
        if not places:
            return
        holder, key = self._random.choice(places)
        changes = (
            *(self._replace, self._replace, self._delete, self._rename, self._nest),
            *(self._swap, self._grow, self._repeat, self._add),
        )
        change = self._random.choice(changes)
        change(content, holder, key)

    def _replace(self, _content: Any, holder: Any, key: Any) -> None:
        holder[key] = copy.deepcopy(self._random.choice(ODD_VALUES))

    def _delete(self, _content: Any, holder: Any, key: Any) -> None:
        del holder[key]

    def _rename(self, _content: Any, holder: Any, key: Any) -> None:
        if isinstance(holder, dict):
            names = (key.upper(), key + " ", key[:-1], *ODD_KEYS)
            holder[self._random.choice(names)] = holder.pop(key)

    def _nest(self, _content: Any, holder: Any, key: Any) -> None:
        for _ in range(self._random.choice((1, 1, 2, 30, 33, 60))):
            holder[key] = [holder[key]] if self._random.random() < 0.5 else {"a": holder[key]}

    def _swap(self, content: Any, holder: Any, key: Any) -> None:
        other, its_key = self._random.choice([*_places(content)])
        holder[key], other[its_key] = copy.deepcopy(other[its_key]), copy.deepcopy(holder[key])

    def _grow(self, _content: Any, holder: Any, key: Any) -> None:
        value, factor = holder[key], self._random.choice((2, 10, 100))
        if isinstance(value, (str, list)):
            holder[key] = value * min(factor, 2 + 20_000 // (1 + len(json.dumps(value))))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            holder[key] = self._random.choice((-value, value + 1, value * 10, str(value)))

    def _repeat(self, _content: Any, holder: Any, key: Any) -> None:
        if isinstance(holder, list) and len(json.dumps(holder)) < 5000:
            holder.insert(key, copy.deepcopy(holder[key]))

    def _add(self, content: Any, _holder: Any, _key: Any) -> None:
        content[self._random.choice(ODD_KEYS)] = copy.deepcopy(self._random.choice(ODD_VALUES))

    def _change_bytes(self, body: bytes) -> bytes:
        at = self._random.randrange(len(body) + 1)
        changes: tuple[Callable[[], bytes], ...] = (
            lambda: body[:at] + bytes([self._random.randrange(256)]) + body[at + 1 :],
            lambda: body[:at] + self._random.choice(ODD_BYTES) + body[at + 1 :],
            lambda: body[:at] + self._random.choice(ODD_TEXT) + body[at:],
            lambda: body[:at],
            lambda: body[:at] + body[at + self._random.randrange(1, 20) :],
            lambda: body[:at] + body[self._random.randrange(len(body) + 1) :],
            lambda: body + body[at:],
        )
        return self._random.choice(changes)()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container with each of its keys, top level first, up to a bound."""
    waiting, num_left = [value], 200
    while waiting and num_left:
        holder = waiting.pop(0)
        num_left -= 1
        keys = [*holder] if isinstance(holder, dict) else range(min(len(holder), 10))
        for key in keys:
            yield holder, key
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])


def shortened(content: Any, limits: Sequence[str] = LIMITS) -> Any:
    """Return the body, with a small limit, the first by default, if its output could be long."""
    if not isinstance(content, dict):
        return content
    for name in limits:
        limit = content.get(name)
        if type(limit) is int and SHORT < limit < GRANTABLE:
            content[name] = SHORT
    if all(content.get(name) is None for name in limits):
        content[limits[0]] = 2
    return content


def _shortened_bytes(body: bytes) -> bytes:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return body
    before = json.dumps(content)
    after = shortened(content)
    return body if json.dumps(after) == before else json.dumps(after).encode()
