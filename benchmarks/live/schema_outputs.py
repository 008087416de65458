"""Checks structured output of a server: valid outputs, refusals by name, hostile grammars.

    python -m benchmarks.live.schema_outputs MODEL [--outputs 2000] [--schemas 400]
        [--refusals 500] [--hostile 200] [--json FILE]

outputs   chat completions at temperature 1 over random schemas: what ended by itself must be valid
          by an independent validator; a reply that max_tokens cuts is counted apart
refusals  random schemas with a keyword that cannot be honoured somewhere in them: each must be
          refused with 400 and the name of the keyword
hostile   deep, huge, exponential, recursive and broken grammars beside a client that asks for
          /ping without a pause: answers of 200 or 400 only, and the server's process stays; the
          longest time of /ping is printed for the same load without and with them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs

from benchmarks.support.pings import Pinger
from benchmarks.support.schemas import chain, nested, optional, random_schema
from benchmarks.support.servers import start_model_server

CHAT = "/v1/chat/completions"
MAX_TOKENS = 150
CONCURRENCY = 16
RESTARTS = "headway_engine_restarts_total"
_TEXT = {"type": "string"}
UNSUPPORTED: dict[str, tuple[tuple[str, Any, str], ...]] = {
    "": (
        ("not", _TEXT, "not"),
        ("if", _TEXT, "if"),
        ("$dynamicRef", "#x", "$dynamicRef"),
        ("unevaluatedProperties", False, "unevaluatedProperties"),
        ("unevaluatedItems", False, "unevaluatedItems"),
        ("$ref", "https://example.com/schema", "example.com"),
        ("$ref", "#/$defs/nowhere", "nowhere"),
    ),
    "string": (
        ("format", "no-such-format", "no-such-format"),
        ("format", "regex", "regex"),
        ("pattern", "(?=a)b", "look-around"),
        ("pattern", r"(a)\1", "backreferences"),
    ),
    "array": (
        ("uniqueItems", True, "uniqueItems"),
        ("contains", _TEXT, "contains"),
        ("minContains", 1, "minContains"),
    ),
    "object": (
        ("dependencies", {"a": ["b"]}, "dependencies"),
        ("dependentRequired", {"a": ["b"]}, "dependentRequired"),
        ("dependentSchemas", {"a": _TEXT}, "dependentSchemas"),
        ("propertyNames", {"maxLength": 3}, "propertyNames"),
    ),
}
"""Keyword, value and a word that the refusal must contain, by the type of the schema."""


@dataclass(slots=True)
class Report:
    """Counts by name, and what must not be."""

    counts: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])


def asking_for(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}


def body(number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Write some JSON, please. Example {number}."}]
    return {"messages": messages, "temperature": 1.0, "seed": number, **fields}


async def in_parallel(count: int, work: Any) -> None:
    """Call `work` with the numbers below `count`, some at a time; shows progress."""
    numbers, started_at = iter(range(count)), time.monotonic()

    async def run() -> None:
        for number in numbers:
            if number and number % 250 == 0:
                print(f"  {number} of {count}, {time.monotonic() - started_at:.0f} s", flush=True)
            await work(number)

    await asyncio.gather(*(run() for _ in range(CONCURRENCY)))


async def check_outputs(
    client: httpx.AsyncClient, report: Report, count: int, num_schemas: int
) -> None:
    async def work(number: int) -> None:
        schema = random_schema(number % num_schemas)
        fields = {"response_format": asking_for(schema), "max_tokens": MAX_TOKENS}
        answer = await client.post(CHAT, json=body(number, **fields))
        if answer.status_code != 200:
            report.errors.append(f"schema {number % num_schemas}: {answer.text[:300]}")
            return
        choice = answer.json()["choices"][0]
        text, end = choice["message"]["content"], choice["finish_reason"]
        report.counts[f"outputs that ended by {end}"] += 1
        if end == "stop" and not is_valid(schema, text):
            report.errors.append(f"schema {number % num_schemas}: invalid {text!r}")

    await in_parallel(count, work)


def is_valid(schema: dict[str, Any], text: str) -> bool:
    try:
        return jsonschema_rs.is_valid(schema, json.loads(text))
    except ValueError:
        return False


def make_unsupported(seed: int) -> tuple[dict[str, Any], str]:
    """Return a random schema with a keyword that cannot be honoured, and a word of its refusal."""
    draw = random.Random(f"unsupported {seed}")
    schema = random_schema(seed)
    node = draw.choice(list(sub_schemas(schema)))
    kind = node.get("type", "")
    choices = UNSUPPORTED[""]
    if isinstance(kind, str) and kind in UNSUPPORTED and draw.random() < 0.7:
        choices = UNSUPPORTED[kind]
    name, value, word = draw.choice(choices)
    node[name] = value
    return schema, word


def sub_schemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a schema and all that it contains, except those that const and enum have."""
    found = [schema]
    inner = [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]
    inner += [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]
    inner += [schema["items"]] if "items" in schema else []
    for one in inner:
        found += sub_schemas(one)
    return found


async def check_refusals(client: httpx.AsyncClient, report: Report, count: int) -> None:
    async def work(number: int) -> None:
        schema, word = make_unsupported(number)
        fields = {"response_format": asking_for(schema), "max_tokens": 8}
        answer = await client.post(CHAT, json=body(number, **fields))
        if answer.status_code == 400 and word in answer.text:
            report.counts["schemas refused by name"] += 1
        else:
            text = answer.text[:200]
            report.errors.append(f"unsupported {number} ({word}): {answer.status_code} {text}")

    await in_parallel(count, work)


def make_hostile(number: int) -> dict[str, Any]:
    """Return the fields of a request with a grammar that costs much, or is broken."""
    size = 2 ** (number // 20 % 10 + 3)
    rules = "".join(f"r{at}: r{at + 1} | r{at + 1} r{at + 1}\n" for at in range(size))
    alternatives = [{"anyOf": [optional(at), optional(at + 1)]} for at in range(1, 3 + size // 64)]
    kinds: list[dict[str, Any]] = [
        {"json": nested(min(size, 800))},
        {"json": '{"a":' * 40 * size},
        {"json": chain(size)},
        {"json": optional(size)},
        {"json": {"enum": [f"value {at} {number}" for at in range(size * 4)]}},
        {"json": {"const": "x" * size * 64}},
        {"json": {"allOf": alternatives}},
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": size * 1000}},
        {"json": {"type": "string", "pattern": f"(.{{0,{size}}}a){{0,{size}}}"}},
        {"json": {"type": "string", "pattern": "\x00" * size}},
        {"regex": f"((a{{{size}}}){{{size}}}){{{size}}}"},
        {"regex": f"(.*a.{{{size}}})*"},
        {"regex": "(" * size + "a" + ")" * size},
        {"regex": "a\x00\ud800" * size},
        {"grammar": f'start: r0\n{rules}r{size}: "a"\n'},
        {"grammar": "start: start start"},
        {"grammar": "start: " + "(" * size * 8 + '"a"' + ")" * size * 8},
        {"grammar": 'start: x*\nx: "a"* | "a" x "a" | x x | "b"' + "\x00" * (size % 2)},
        {"choice": [f"{'ü' * min(size, 128)}{at}" for at in range(size)]},
    ]
    return {"structured_outputs": kinds[number % 20], "max_tokens": 30}


async def check_hostile(
    client: httpx.AsyncClient, report: Report, count: int
) -> tuple[list[float], list[float]]:
    """Return the times of /ping beside ordinary requests, and beside these and hostile ones."""
    # As text: JSON of lone surrogates is what a client may send too.
    contents = [json.dumps(body(number, **make_hostile(number))) for number in range(count)]
    is_over = False

    async def chat() -> None:
        while not is_over:
            await client.post(CHAT, json=body(1, max_tokens=50))

    async def work(number: int) -> None:
        headers = {"Content-Type": "application/json"}
        answer = await client.post(CHAT, content=contents[number], headers=headers)
        report.counts[f"hostile grammars answered {answer.status_code}"] += 1
        if answer.status_code not in (200, 400):
            report.errors.append(f"hostile {number}: {answer.status_code} {answer.text[:200]}")

    chatting = asyncio.create_task(chat())
    # The first grammar of a process costs more than any other: it reads the vocabulary.
    await client.post(CHAT, json=body(0, structured_outputs={"choice": ["a"]}, max_tokens=2))
    url = str(client.base_url)
    pinger = Pinger(url)
    await asyncio.sleep(15)
    alone = await asyncio.to_thread(pinger.end)
    pinger = Pinger(url)
    await in_parallel(count, work)
    beside = await asyncio.to_thread(pinger.end)
    is_over = True
    await chatting
    return alone, beside


def print_counts(report: Report) -> None:
    for name, count in sorted(report.counts.items()):
        print(f"{name}: {count}")
    print(f"{len(report.errors)} errors", flush=True)


async def run(url: str, options: argparse.Namespace) -> Report:
    report = Report()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await check_outputs(client, report, options.outputs, options.schemas)
        print_counts(report)
        await check_refusals(client, report, options.refusals)
        print_counts(report)
        if options.hostile:
            for name, times in zip(
                ("alone", "beside hostile grammars"),
                await check_hostile(client, report, options.hostile),
                strict=True,
            ):
                times.sort()
                p99, longest = times[int(0.99 * len(times))], times[-1]
                print(f"/ping {name}: p99 {1000 * p99:.0f} ms, longest {1000 * longest:.0f} ms")
        metrics = (await client.get("/metrics")).text.splitlines()
        report.errors += [one for one in metrics if one.startswith(RESTARTS) and one[-2:] != " 0"]
    return report


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--outputs", type=int, default=2000)
    parser.add_argument("--schemas", type=int, default=400)
    parser.add_argument("--refusals", type=int, default=500)
    parser.add_argument("--hostile", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = start_model_server(options.model, Path(folder) / "server.log").wait_ready()
        try:
            report = asyncio.run(run(server.url, options))
        finally:
            server.stop()
    print_counts(report)
    for error in report.errors[:20]:
        print(error)
    if options.json:
        found = {"counts": report.counts, "errors": report.errors}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
