"""A tiny HTTP endpoint whose answers are written by the test, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass
class Call:
    """One request as it arrived, and the way to answer it."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def open_stream(self) -> None:
        self.write(STREAM_HEAD)

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, payload: object) -> None:
        self.chunk(b"data: " + json.dumps(payload).encode() + b"\n\n")

    def text(self, *texts: str) -> None:
        """Events that leave in one piece."""
        events = [json.dumps({"choices": [{"index": 0, "text": text}]}) for text in texts]
        self.chunk("".join(f"data: {event}\n\n" for event in events).encode())

    def end_stream(self, num_tokens: int | None = None, **usage: object) -> None:
        self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        if num_tokens is not None:
            counts = {"prompt_tokens": len(self.body["prompt"]), "completion_tokens": num_tokens}
            self.event({"choices": [], "usage": {**counts, **usage}})
        self.chunk(b"data: [DONE]\n\n")
        self.write(b"0\r\n\r\n")

    def whole(self, status: int, payload: object, **headers: str) -> None:
        body = json.dumps(payload).encode()
        lines = [f"HTTP/1.1 {status} Whatever", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def hang_up(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Call], Awaitable[None]]


class Endpoint:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.calls: list[Call] = []
        self.num_connections = 0
        self.num_running = self.most_running = 0
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        self.num_connections += 1
        try:
            while not writer.is_closing():
                await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(data) if data else {}
        call = Call(len(self.calls), first.split()[1], headers, body, writer)
        self.calls.append(call)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self._script(call)
        finally:
            self.num_running -= 1


async def spell(call: Call, gap_s: float = 0.0) -> None:
    """Answers as asked: one token per event."""
    call.open_stream()
    for _ in range(call.body["max_tokens"]):
        call.text(" word")
        await asyncio.sleep(gap_s)
    call.end_stream(call.body["max_tokens"])
