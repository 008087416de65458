"""One request to an OpenAI endpoint, and the record of its stream.

The token total comes from the usage at the end of the stream (`stream_options.include_usage`).
Events that arrive together are one chunk of several tokens; if the total differs from the number of
events, the total is divided over the chunks by text length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headway.bench.load.http import HttpClient, HttpFailure, Origin
from headway.bench.load.records import LoadRecord, spread_tokens
from headway.bench.options import GREEDY, SamplingOptions
from headway.clock import Clock
from headway.errors import ConfigError
from headway.workload import WorkItem

_MAX_ERROR_CHARS = 120

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water "
    "been call who oil its now find long down day did get come made may part"
)
WORDS = tuple(_WORDS.split())
"""Words that most vocabularies encode as one token, with a leading space."""


@dataclass(frozen=True, slots=True)
class Access:
    """Key, headers and body fields of one tenant."""

    api_key: str | None = None
    extra_body: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint under test, and the form of its requests."""

    origin: Origin
    model: str
    is_chat: bool = False
    """Chat takes text, so prompt lengths are approximate; completions take token ids."""
    ignores_eos: bool = True
    """Whether to send `ignore_eos`; otherwise outputs end at the end token."""
    api_keys: tuple[str, ...] = ()
    """Keys for tenant-1, tenant-2, ... in turn."""
    timeout_s: float = 600.0
    extra_body: Mapping[str, object] = field(default_factory=dict)
    sampling: SamplingOptions = GREEDY
    """No seed is sent: some servers compute requests with a seed one by one."""
    access: Mapping[str, Access] = field(default_factory=dict)
    """Access by tenant; takes precedence over `api_keys` and `extra_body`."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, item: WorkItem) -> bytes:
        content: dict[str, Any] = {
            "model": self.model,
            "max_tokens": item.num_output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling.sampling_fields(),
        }
        if self.is_chat:
            text = " ".join([WORDS[number % len(WORDS)] for number in item.prompt_token_ids])
            content["messages"] = [{"role": "user", "content": text}]
        else:
            content["prompt"] = item.prompt_token_ids
        if self.ignores_eos:
            content["ignore_eos"] = True
        if item.tenant is not None:
            content["user"] = item.tenant
        own = self._access(item.tenant).extra_body
        return msgspec.json.encode({**content, **self.extra_body, **own})

    def headers(self, tenant: str | None) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        key = self._access(tenant).api_key or self._shared_key(tenant)
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return headers

    def _access(self, tenant: str | None) -> Access:
        return self.access.get(tenant or "", _NO_ACCESS)

    def _shared_key(self, tenant: str | None) -> str | None:
        if not self.api_keys:
            return None
        number = (tenant or "").rpartition("-")[2]
        turn = int(number) - 1 if number.isdecimal() else 0
        return self.api_keys[turn % len(self.api_keys)]


_NO_ACCESS = Access()


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _StreamUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    id: str | None = None
    choices: list[_StreamChoice] = []
    usage: _StreamUsage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class StreamReader:
    """Turns pieces of an event stream into the chunks of a record."""

    record: LoadRecord
    is_done: bool = False
    _rest: bytes = b""
    _num_chars: list[int] = field(default_factory=list[int])
    _usage: _StreamUsage | None = None

    def feed(self, piece: bytes, now: float) -> None:
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        num_tokens = num_chars = 0
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.is_done = True
                continue
            for choice in self._event(data).choices:
                text = self._text(choice)
                if text is not None:
                    num_tokens += 1
                    num_chars += len(text)
                if choice.finish_reason is not None:
                    self.record.finish_reason = choice.finish_reason
        if num_tokens:
            self.record.chunk_times.append(now)
            self.record.chunk_tokens.append(num_tokens)
            self._num_chars.append(num_chars)

    def finish(self, now: float) -> None:
        """Make the token counts exact; the stream ended at `now`."""
        record, usage = self.record, self._usage
        if not self.is_done and record.finish_reason is None:
            raise HttpFailure("the stream ended without [DONE] or a finish reason")
        if usage is None:
            return
        record.has_usage = True
        record.num_prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        if not record.chunk_times and usage.completion_tokens:
            # No token had text.
            record.chunk_times.append(now)
            record.chunk_tokens.append(0)
            self._num_chars.append(1)
        if sum(record.chunk_tokens) != usage.completion_tokens:
            record.chunk_tokens = spread_tokens(usage.completion_tokens, self._num_chars)

    def _event(self, data: bytes) -> _Event:
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise HttpFailure("an event of the stream is not JSON as expected") from error
        if event.error is not None:
            raise HttpFailure(f"error in the stream: {_message_of(event.error)}")
        if event.usage is not None:
            self._usage = event.usage
        if self.record.request_id is None:
            self.record.request_id = event.id
        return event

    def _text(self, choice: _StreamChoice) -> str | None:
        """Return the text of an event with tokens; None for an opening or closing event."""
        if choice.delta is None:
            is_closing = not choice.text and choice.finish_reason is not None
            return None if is_closing else choice.text or ""
        delta = choice.delta
        text = delta.content or delta.reasoning_content or delta.reasoning
        if text or delta.role is not None or delta.content is None:
            return text
        return None if choice.finish_reason is not None else ""


async def ask(
    client: HttpClient, target: Target, item: WorkItem, record: LoadRecord, clock: Clock
) -> None:
    """Send one request and fill its record; never raises for server errors.

    Times are clock times; the caller converts them to the start of its run.
    """
    try:
        async with asyncio.timeout(target.timeout_s):
            record.sent_at = clock.now()
            await _exchange(client, target, item, record, clock)
    except HttpFailure as failure:
        record.error = str(failure)
    except TimeoutError:
        record.error = "timeout"
    except OSError as error:
        record.error = f"{type(error).__name__}: {error.strerror or error}"
    record.ended_at = clock.now()


async def _exchange(
    client: HttpClient, target: Target, item: WorkItem, record: LoadRecord, clock: Clock
) -> None:
    headers = target.headers(item.tenant)
    connection = await client.send("POST", target.path, headers, target.body(item))
    try:
        record.status = connection.status
        record.retry_after = connection.headers.get("retry-after")
        if connection.status != 200:
            message = _message_of(await connection.read_all())
            record.error = f"HTTP {connection.status}: {message}"
        else:
            stream = StreamReader(record)
            while piece := await connection.read():
                stream.feed(piece, clock.now())
            stream.finish(clock.now())
    except BaseException:
        connection.close()
        raise
    client.put_back(connection)


async def reach(client: HttpClient) -> None:
    """Raise ConfigError if the server does not accept connections."""
    try:
        client.put_back(await client.connect())
    except HttpFailure as failure:
        raise ConfigError(f"cannot reach {client.origin.url}: {failure}") from failure


async def first_model(client: HttpClient, api_keys: tuple[str, ...]) -> str:
    """Return the first name of /v1/models; ConfigError if that fails."""
    headers = {"Authorization": f"Bearer {api_keys[0]}"} if api_keys else {}
    where = f"{client.origin.url}/v1/models"
    try:
        async with asyncio.timeout(30.0):
            status, body = await client.fetch("/v1/models", headers)
    except (HttpFailure, TimeoutError, OSError) as error:
        raise ConfigError(f"cannot reach {where}: {error or 'timeout'}") from error
    if status != 200:
        raise ConfigError(f"{where} answered {status}: {_message_of(body)}")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{where} names no model; give one with --model") from error


def _message_of(answer: Any) -> str:
    """Return the shortened message of an error response in any common form."""
    if isinstance(answer, bytes):
        try:
            answer = msgspec.json.decode(answer)
        except msgspec.DecodeError:
            answer = answer.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return " ".join(str(answer).split())[:_MAX_ERROR_CHARS]
