"""Log-probabilities are the same in a whole answer and in a stream, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from headway.core.plan import TokenLogprobs
from headway.server.api.generate.logprobs import ScoredToken
from headway.server.api.responses.text_tokens import TextTokens
from headway.text.reasoning import ReasoningStart
from headway.text.reply import ReplyForm, ReplyParser
from tests.server.api import test_responses, test_tools
from tests.server.api.test_answer import events_of
from tests.server.api.test_responses import check_events
from tests.server.api.test_tools import CALLS, SCRIPT, THINKS
from tests.support.apps import serving

THOUGHT = "<think>\nhm </think>\n"
REPLIES = {
    "text": ("Héllo, 😀!", False, 100),
    "reasoning and text": (f"{THOUGHT}<b>é</b> ", False, 100),
    "reasoning, text and calls": (f"{THOUGHT}{SCRIPT}", True, 170),
    "calls": (CALLS, True, 150),
    "text that might be a call": ("No call <tool", True, 100),
    "a cut thought": (THOUGHT, False, 12),
    "a cut call": (SCRIPT, True, 30),
    "nothing": ("", False, 10),
}


@asynccontextmanager
async def on_a_socket(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app that listens on a free port of this host."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))
    running = asyncio.create_task(server.serve([listener]))
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        await running
        listener.close()


def streamed_scores(events: list[Any], index: int) -> list[Any]:
    """The log-probabilities of one choice, from all chunks."""
    choices = [one for event in events for one in event["choices"] if one["index"] == index]
    return [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]


@pytest.mark.parametrize(("script", "has_tools", "max_tokens"), REPLIES.values(), ids=REPLIES)
async def test_streams_add_up(local, script: str, has_tools: bool, max_tokens: int) -> None:
    async with (
        serving(local, script, template=THINKS) as made,
        on_a_socket(made.apps.public) as http,
    ):
        await check_chat(http, has_tools, max_tokens)
        await check_responses(http, has_tools, max_tokens)


async def check_chat(http: httpx.AsyncClient, has_tools: bool, max_tokens: int) -> None:
    asked = {"logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": max_tokens}
    asked |= {"messages": test_tools.MESSAGES, "tools": test_tools.TOOLS if has_tools else None}
    whole = (await http.post(test_tools.CHAT, json=asked)).json()
    streamed = await http.post(test_tools.CHAT, json={**asked, "stream": True})
    events = events_of(streamed.text)
    for index, choice in enumerate(whole["choices"]):
        scores = choice["logprobs"]["content"]
        assert streamed_scores(events, index) == scores
        assert 2 * len(scores) == whole["usage"]["completion_tokens"]


async def check_responses(http: httpx.AsyncClient, has_tools: bool, max_tokens: int) -> None:
    asked: dict[str, Any] = {"input": "hi", "top_logprobs": 2, "max_output_tokens": max_tokens}
    asked["tools"] = test_responses.TOOLS if has_tools else None
    whole = (await http.post(test_responses.PATH, json=asked)).json()
    for headers in ({}, {"Idempotency-Key": "k"}, {"Idempotency-Key": "k"}):
        body = {**asked, "stream": True}
        streamed = await http.post(test_responses.PATH, json=body, headers=headers)
        events = test_responses.events_of(streamed.text)
        assert check_events(events)["output"] == whole["output"]
        check_scores(events, whole["output"])


def check_scores(events: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """The scores of a message are those of its text, then of the end of the sequence if any."""
    messages = [item["content"][0] for item in output if item["type"] == "message"]
    deltas = [one for one in events if one["type"] == "response.output_text.delta"]
    for part in messages:
        data = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
        assert data.decode().removesuffix("</s>").strip() == part["text"].strip()
        sent = [entry for event in deltas for entry in event["logprobs"]]
        assert sent == part["logprobs"][: len(sent)] and len(part["logprobs"]) - len(sent) <= 1
    assert bool(deltas) == any(part["text"] for part in messages)


class Pieces:
    """A detokenizer whose token ids are places in a list of texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts[token_id] for token_id in token_ids)

    def finish(self) -> str:
        return ""


def test_tokens_that_are_partly_text_count_as_text() -> None:
    before = ["<thi", "nk>\nhm", " </thi"]
    text = ["nk>\n\nS", "", "o", " <to", "ok>", " x\n<tool"]
    call = ["_call>\n", '{"name": "now", "arguments": ', "{}}\n</tool_call>", ""]
    pieces = [*before, *text, *call]
    parser = ReplyParser(ReplyForm("hermes", ReasoningStart.OPTIONAL))
    found = TextTokens(parser, Pieces(pieces))
    tokens: list[ScoredToken] = [(at, TokenLogprobs(0.0, 1)) for at in range(len(pieces))]
    judged = found.push(tokens[:5]) + found.push(tokens[5:]) + found.finish()
    assert [pieces[token_id] for token_id, _ in judged] == text
