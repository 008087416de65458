"""Sends cases over plain sockets and checks the responses.

An HTTP client would correct, or refuse to send, much of the corpus.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.cases import CLOSED, Case, Outcome, Target

MAX_REFUSAL_BYTES = 4096
TIMEOUT_S = 20.0
"""For an answer without a prompt to compute, and for the connection to end."""
MARGIN = 2.0
"""Of the time that a prompt may take to the time that the longest one took."""
END_OF_HEAD = b"\r\n\r\n"
TIMED_OUT = "no answer in time"
_LEAKS = (b"Traceback", b'File "', b".py", b" at 0x", b"pydantic.dev")


@dataclass(frozen=True, slots=True)
class PromptCost:
    """What the longest prompt took that the server accepts."""

    num_tokens: int = 1
    elapsed_s: float = 0.0

    def timeout_s(self, num_bytes: int) -> float:
        """Return how long to wait for the answer to a body of so many bytes.

        A prompt has at most a token for each byte of its body, and at most `num_tokens`.
        """
        return TIMEOUT_S + MARGIN * self.elapsed_s * min(1.0, num_bytes / self.num_tokens)


FREE = PromptCost()


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of an answer, or how the connection ended without one."""

    outcome: Outcome
    content_type: str
    body: bytes
    elapsed_s: float
    """Until the head of the answer; without an answer, until the connection ended."""


def exchange(case: Case, target: Target, cost: PromptCost = FREE) -> Answer:
    """Send a case and read until the connection ends; `cost` lengthens the wait."""
    pieces = case.pieces(target)
    timeout_s = cost.timeout_s(sum(map(len, pieces)))
    started_at = time.monotonic()
    received, answered_at = _send_and_read(case, pieces, target, timeout_s)
    return _read_answer(received, case.method, answered_at - started_at)


def _send_and_read(
    case: Case, pieces: Sequence[bytes], target: Target, timeout_s: float
) -> tuple[bytes | None, float]:
    """Return all received bytes, and when the head of the answer or the end came.

    The bytes are None if the connection was open at the timeout. A server that refuses a body
    unread leaves the connection open for a while, so that the client can read the refusal.
    """
    received, answered_at = bytearray(), None
    with socket.create_connection((target.host, target.port), timeout=timeout_s) as connection:
        # A server that refuses early may close while the client still sends.
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                if case.pause_s:
                    time.sleep(case.pause_s)
            if case.is_half_closed:
                connection.shutdown(socket.SHUT_WR)
        try:
            while data := connection.recv(65536):
                received += data
                if answered_at is None and _has_head(received):
                    answered_at = time.monotonic()
        except ConnectionError:
            pass
        except TimeoutError:
            return None, time.monotonic()
    return bytes(received), time.monotonic() if answered_at is None else answered_at


def _has_head(received: bytearray) -> bool:
    """Whether the head of an answer is complete; one of 100 Continue announces no answer."""
    heads = received.split(END_OF_HEAD)[:-1]
    return any(not head.startswith(b"HTTP/1.1 1") for head in heads)


class _Received:
    """The part of a socket that http.client reads an answer from."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, *_args: Any) -> io.BytesIO:
        return io.BytesIO(self._data)


def _read_answer(received: bytes | None, method: str, elapsed_s: float) -> Answer:
    if not received:
        return Answer(TIMED_OUT if received is None else CLOSED, "", b"", elapsed_s)
    stored: Any = _Received(received)
    response = http.client.HTTPResponse(stored, method=method)
    try:
        response.begin()
        kind = response.getheader("Content-Type", "")
        return Answer(response.status, kind, response.read(), elapsed_s)
    except http.client.HTTPException as error:
        return Answer(f"a broken answer: {error!r}", "", received, elapsed_s)


def problems_of(case: Case, answer: Answer) -> list[str]:
    """Return the problems of an answer to a case; empty if it is right."""
    if answer.outcome not in case.expected:
        expected = " or ".join(map(str, case.expected))
        return [f"expected {expected}, got {answer.outcome}: {answer.body[:200]!r}"]
    return problems_of_answer(answer)


def problems_of_answer(answer: Answer) -> list[str]:
    """Return problems of any answer: a wrong shape, or internal details."""
    if not isinstance(answer.outcome, int):
        return []
    if answer.outcome == 200:
        return _problems_of_success(answer)
    problems = [f"the refusal shows {leak!r}" for leak in _LEAKS if leak in answer.body]
    if len(answer.body) > MAX_REFUSAL_BYTES:
        problems.append(f"the refusal has {len(answer.body)} bytes")
    if answer.content_type == "application/json":
        problems += _problems_of_error(answer.body)
    elif answer.body and not answer.content_type.startswith("text/plain"):
        problems.append(f"the refusal is {answer.content_type!r}")
    return problems


def _problems_of_error(body: bytes) -> list[str]:
    if not body:  # to HEAD
        return []
    try:
        content = json.loads(body)
        error = content["error"]
    except (ValueError, KeyError, TypeError):
        return [f"not an error object: {body[:200]!r}"]
    # Anthropic's form has a type beside the error, and fewer fields in it.
    is_anthropic = content.get("type") == "error"
    names = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
    is_complete = error.keys() == names and error["message"]
    return [] if is_complete else [f"an incomplete error object: {body[:200]!r}"]


def _problems_of_success(answer: Answer) -> list[str]:
    if answer.content_type.startswith("text/event-stream"):
        return _problems_of_stream(answer.body)
    try:
        content = json.loads(answer.body)
    except ValueError:
        return [f"not JSON: {answer.body[:200]!r}"]
    if "choices" not in content:
        return []
    problems = _problems_of_choices(content["choices"], is_whole=True)
    usage = content.get("usage", {})
    # An answer without output tokens is that to max_tokens 0.
    if usage.get("prompt_tokens", 0) < 1 or usage.get("completion_tokens", -1) < 0:
        problems.append(f"usage is {content.get('usage')}")
    return problems


def _problems_of_stream(body: bytes) -> list[str]:
    events = body.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        return [f"the stream does not end: {body[-200:]!r}"]
    problems: list[str] = []
    for event in events[:-2]:
        try:
            chunk = json.loads(event.removeprefix("data: "))
            problems += _problems_of_choices(chunk["choices"], is_whole=False)
        except (ValueError, KeyError):
            problems.append(f"a bad event: {event[:200]!r}")
    return problems


def _problems_of_choices(choices: Sequence[dict[str, Any]], is_whole: bool) -> list[str]:
    if not is_whole:
        return []
    is_numbered = [choice["index"] for choice in choices] == list(range(len(choices)))
    if not choices or not is_numbered:
        return [f"choices are numbered wrongly or missing: {str(choices)[:200]}"]
    reasons = {choice["finish_reason"] for choice in choices}
    return [] if reasons <= {"stop", "length"} else [f"finish reasons {reasons}"]
