"""Reads streamed answers with their usage, and compares them with ledger rows."""

from __future__ import annotations

import json
from typing import Any

import httpx

from headway.observe.ledger.usage import COST_UNITS, MILLION


class StreamedAnswer:
    """Ids, length and usage of one streamed answer."""

    def __init__(self) -> None:
        self.id = ""
        self.client_id = ""
        self.num_letters = 0
        self.usage: dict[str, Any] = {}

    def read(self, line: str) -> None:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            self.id = event["id"]
            self.num_letters += sum(len(choice["text"]) for choice in event["choices"])
            self.usage = event.get("usage") or self.usage

    def check(self, row: dict[str, Any]) -> None:
        """Check that a ledger row equals the usage of this answer."""
        usage = self.usage
        assert row["output_tokens"] == usage["completion_tokens"]
        assert row["prompt_tokens"] == usage["prompt_tokens"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert row["cached_tokens"] == num_cached
        cost = 1 * (usage["prompt_tokens"] - num_cached) + 4 * usage["completion_tokens"]
        expected = cost * COST_UNITS // MILLION + num_cached * COST_UNITS // MILLION // 4
        assert row["cost_e12"] == expected
        assert row["client_id"] == self.client_id


async def ask(
    client: httpx.AsyncClient, fields: dict[str, Any], max_letters: int = 10**9
) -> StreamedAnswer:
    """Stream an answer to its end, or disconnect after `max_letters`."""
    answer = StreamedAnswer()
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=streamed) as response:
        assert response.status_code == 200, await response.aread()
        answer.client_id = response.headers["x-request-id"]
        async for line in response.aiter_lines():
            answer.read(line)
            if answer.num_letters >= max_letters:
                break
    return answer
