"""Checks that tool calls of a server are valid: any tools, any choice, streamed and whole.

python -m benchmarks.live.tool_calls MODEL [--calls 500] [--json FILE]

Sends requests at temperature 1 over 50 sets of tools that are made up from a seed, through the
official client, and rebuilds streams with its helper. Every complete call must name a tool that the
request allows, and its arguments must be valid by the schema of that tool. A reply that max_tokens
cuts is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai

from benchmarks.support.servers import start_model_server

NUM_TOOL_SETS = 50
CONCURRENCY = 8
MAX_TOKENS = 100
MODES = ("auto", "required", "none", "named", "allowed auto", "allowed required")
_VERBS = ("get", "find", "set", "delete", "list", "send", "book", "count")
_NOUNS = ("weather", "user", "flight", "file", "price", "task", "event", "note")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its fields, and what its reply may call."""

    mode: str
    is_stream: bool
    fields: dict[str, Any]
    schemas: dict[str, dict[str, Any]]
    """Of the arguments of the tools that may be called, by name."""


@dataclass(slots=True)
class Report:
    """Counts by mode, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])

    def add(self, asked: Asked, choice: Any) -> None:
        """Check one choice."""
        calls, end = choice.message.tool_calls or [], choice.finish_reason
        self.counts[f"{asked.mode}: replies"] += 1
        self.counts[f"{asked.mode}: cut"] += end == "length"
        whole = calls[:-1] if end == "length" else calls
        self.counts[f"{asked.mode}: calls"] += len(whole)
        found = [wrong_end(asked, len(calls), end), *(wrong_call(asked, one) for one in whole)]
        for wrong in filter(None, found):
            self.errors.append(f"{asked.mode}, stream {asked.is_stream}: {wrong}")


def wrong_end(asked: Asked, num_calls: int, end: str) -> str:
    """Return what is wrong with the number of calls and the finish reason; empty if nothing is."""
    if asked.mode == "none" and num_calls:
        return "a call though tool_choice is none"
    if end == "length":
        return ""
    if (end == "tool_calls") != bool(num_calls):
        return f"finish_reason {end} with {num_calls} calls"
    is_required = asked.mode in ("required", "named", "allowed required")
    if is_required and not num_calls:
        return "no call though one is required"
    is_single = asked.mode == "named" or asked.fields["parallel_tool_calls"] is False
    return f"{num_calls} calls instead of one" if is_single and num_calls > 1 else ""


def wrong_call(asked: Asked, call: Any) -> str:
    """Return what is wrong with a complete call; empty if nothing is."""
    schema = asked.schemas.get(call.function.name)
    if schema is None:
        return f"the name {call.function.name!r}"
    try:
        arguments = json.loads(call.function.arguments)
    except ValueError:
        return f"arguments that are no JSON: {call.function.arguments!r}"
    is_valid = jsonschema_rs.is_valid(schema, arguments)
    return "" if is_valid else f"arguments {arguments} for {schema}"


def make_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return the schema of one argument."""
    kinds = ["text", "integer", "number", "enum", "boolean", "optional"]
    kind = draw.choice(kinds + ["list", "object"] * (depth < 2))
    match kind:
        case "text":
            return {"type": "string", "maxLength": draw.randrange(1, 12)}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": draw.randrange(1, 1000)}
        case "number":
            return {"type": "number", "minimum": -10, "maximum": 10}
        case "enum":
            return {"enum": draw.sample(["a", "b c", "ü", 'd"e', 1, None], draw.randrange(1, 5))}
        case "boolean":
            return {"type": "boolean"}
        case "optional":
            return {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "null"}]}
        case "list":
            return {"type": "array", "items": make_schema(draw, depth + 1), "maxItems": 3}
        case _:
            return make_object(draw, depth + 1)


def make_object(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    names = draw.sample(("city", "count", "when", "note", "tags", "is_urgent"), draw.randrange(4))
    properties = {name: make_schema(draw, depth) for name in names}
    required = [name for name in names if draw.random() < 0.7]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def make_tools(seed: int) -> list[dict[str, Any]]:
    """Return the tools of one set; some have no parameters."""
    draw = random.Random(f"tools {seed}")
    names = draw.sample([f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS], 1 + seed % 6)
    functions: list[dict[str, Any]] = []
    for name in names:
        function: dict[str, Any] = {"name": name, "description": name.replace("_", " ")}
        if draw.random() < 0.85:
            function["parameters"] = make_object(draw)
        functions.append(function)
    return [{"type": "function", "function": function} for function in functions]


def make_request(number: int, max_tokens: int = MAX_TOKENS) -> Asked:
    """Return a request; every mode comes streamed and whole, with every set of tools."""
    mode, seed = MODES[number % len(MODES)], number % NUM_TOOL_SETS
    is_stream, tools = (number + number // len(MODES)) % 2 == 1, make_tools(seed)
    draw = random.Random(f"request {number}")
    names = [tool["function"]["name"] for tool in tools]
    chosen = draw.sample(names, draw.randrange(1, len(names) + 1))
    named = [{"type": "function", "function": {"name": name}} for name in chosen]
    choice: Any = mode
    if mode == "named":
        chosen, choice = chosen[:1], named[0]
    elif mode.startswith("allowed"):
        allowed = {"mode": mode.removeprefix("allowed "), "tools": named}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    else:
        chosen = names
    empty: dict[str, Any] = {"type": "object", "additionalProperties": False}
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters", empty)
        for tool in tools
        if tool["function"]["name"] in chosen
    }
    fields = {
        "messages": [{"role": "user", "content": f"Please {names[0].replace('_', ' ')} for me."}],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": number % 3 > 0,
        "temperature": 1.0,
        "seed": number,
        "max_tokens": max_tokens,
    }
    return Asked(mode, is_stream, fields, schemas)


async def check_server(url: str, num_calls: int, max_tokens: int = MAX_TOKENS) -> Report:
    """Send requests to a server and check their replies."""
    report = Report()
    numbers = iter(range(num_calls))
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600) as client:
        model = (await client.models.list()).data[0].id

        async def work() -> None:
            for number in numbers:
                asked = make_request(number, max_tokens)
                try:
                    report.add(asked, await reply_of(client, model, asked))
                except openai.APIError as error:
                    report.errors.append(f"{asked.mode}: {error}")

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return report


async def reply_of(client: openai.AsyncOpenAI, model: str, asked: Asked) -> Any:
    """Return the choice of a reply; a stream is rebuilt by the client's helper."""
    if not asked.is_stream:
        answer = await client.chat.completions.create(model=model, **asked.fields)
        return answer.choices[0]
    async with client.chat.completions.stream(model=model, **asked.fields) as stream:
        try:
            return (await stream.get_final_completion()).choices[0]
        except openai.LengthFinishReasonError as error:
            return error.completion.choices[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_model_server(args.model, Path(folder) / "server.log")
        try:
            server.wait_ready()
            report = asyncio.run(check_server(server.url, args.calls))
        finally:
            server.stop()
    for name, count in sorted(report.counts.items()):
        print(f"{name}: {count}")
    print(f"{len(report.errors)} errors in {args.calls} requests")
    for error in report.errors[:20]:
        print(error)
    if args.json:
        found = {"requests": args.calls, "counts": report.counts, "errors": report.errors}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(1 if report.errors else 0)


if __name__ == "__main__":
    main()
