"""The heaviest bodies of a given size: each asks as much work per byte as some reader can be made
to do before it refuses."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.faults.cases import CHAT, COMPLETIONS
from headway.config import ServerConfig

MAX_BODY_BYTES = ServerConfig().max_body_bytes
_CHAT = b'{"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}], '

Shape = Callable[[int], tuple[str, bytes]]


def _repeated(path: str, start: bytes, unit: bytes, end: bytes) -> Shape:
    """The unit, comma-separated, as often as fits."""

    def make(size: int) -> tuple[str, bytes]:
        count = (size - len(start) - len(end) + 1) // (len(unit) + 1)
        return path, start + b",".join([unit] * count) + end

    return make


def _filled(path: str, start: bytes, unit: bytes, end: bytes) -> Shape:
    def make(size: int) -> tuple[str, bytes]:
        return path, start + unit * ((size - len(start) - len(end)) // len(unit)) + end

    return make


def _numbered(path: str, start: bytes, value: bytes, end: bytes) -> Shape:
    """Keys that are all different."""

    def make(size: int) -> tuple[str, bytes]:
        count = (size - len(start) - len(end)) // (12 + len(value))
        return path, start + b",".join([b'"%08d":%s' % (i, value) for i in range(count)]) + end

    return make


_TEXT = b'{"max_tokens": 2, "prompt": "'
_MESSAGE = b'{"max_tokens": 2, "messages": [{"role": "user", "content": "'
_PARTS = b'{"max_tokens": 2, "messages": [{"role": "user", "content": ['

SHAPES: dict[str, Shape] = {
    "messages": _repeated(
        CHAT, b'{"max_tokens": 2, "messages": [', b'{"role":"user","content":""}', b"]}"
    ),
    "empty-messages": _repeated(CHAT, b'{"messages": [', b"{}", b"]}"),
    "one-long-message": _filled(CHAT, _MESSAGE, b"a", b'"}]}'),
    "text-parts": _repeated(CHAT, _PARTS, b'{"type":"text","text":""}', b"]}]}"),
    "tools": _repeated(CHAT, _CHAT + b'"tools": [', b"{}", b"]}"),
    "metadata": _numbered(CHAT, _CHAT + b'"metadata": {', b"[]", b"}}"),
    "unknown-fields": _numbered(CHAT, _CHAT, b"1", b"}"),
    "logit-biases": _numbered(CHAT, _CHAT + b'"logit_bias": {', b"1", b"}}"),
    "stop-strings": _repeated(CHAT, _CHAT + b'"stop": [', b'"x"', b"]}"),
    "stop-token-ids": _repeated(CHAT, _CHAT + b'"stop_token_ids": [', b"1", b"]}"),
    "one-long-text": _filled(COMPLETIONS, _TEXT, b"a", b'"}'),
    "text-of-spaces": _filled(COMPLETIONS, _TEXT, b" ", b'"}'),
    "text-of-apostrophes": _filled(COMPLETIONS, _TEXT, b"'", b'"}'),
    "text-of-escapes": _filled(COMPLETIONS, _TEXT, b"\\u0301", b'"}'),
    "prompts": _repeated(COMPLETIONS, b'{"prompt": [', b'""', b"]}"),
    "empty-prompt-lists": _repeated(COMPLETIONS, b'{"prompt": [', b"[]", b"]}"),
    "prompt-lists": _repeated(COMPLETIONS, b'{"prompt": [', b"[1,2]", b"]}"),
    "token-ids": _repeated(COMPLETIONS, b'{"prompt": [', b"1", b"]}"),
    "one-long-number": _filled(COMPLETIONS, b'{"prompt": "a", "seed": ', b"9", b"}"),
    "open-lists": _filled(COMPLETIONS, b'{"prompt": ', b"[", b""),
    "backslashes": _filled(COMPLETIONS, _TEXT, b"\\\\", b'"}'),
    "spaces-between": _filled(COMPLETIONS, b'{"prompt": "a", "max_tokens": 2', b" ", b"}"),
}
