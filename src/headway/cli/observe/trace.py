"""`headway trace`: recent steps and requests of a server as a file that Perfetto opens."""

from __future__ import annotations

import errno
import http.client
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Annotated

import msgspec
import typer

from headway.cli.remote import (
    ADMIN,
    OTHER_SERVER,
    Key,
    cannot_ask,
    check_url,
    error_message,
    key_headers,
)
from headway.errors import ConfigError, TraceError
from headway.observe.trace.chrome import ChromeTrace
from headway.observe.trace.export import (
    MAX_LINE_BYTES,
    MAX_SINCE_S,
    PATH,
    VERSION,
    TraceEnd,
    TraceHead,
    TraceRequest,
    TraceSteps,
    decode_line,
)

TIMEOUT_S = 30.0
_DURATION = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(s|m|h)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def trace(
    since: Annotated[str, typer.Option("--since", help="How far back: 30s, 5m, 1h.")] = "5m",
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path(
        "trace.json"
    ),
    url: Annotated[
        str, typer.Option("--url", help="URL of the admin listener of a server or frontend.")
    ] = "http://127.0.0.1:8001",
    api_key: Key = None,
) -> None:
    """Write recent steps and requests as a trace that Perfetto opens.

    With keys, it takes that of an administrator. A trace has ids and names of tenants, and no text
    of a prompt or an output.
    """
    since_s = read_duration(since)
    if output.exists() and not output.is_file():
        raise ConfigError(f"{output} is not a file; name another with --output")
    part = output.with_name(f".{output.name}.{os.getpid()}")
    file = _create(part)
    try:
        with file:
            end = _fetch(url, since_s, api_key, file)
        if not end.num_steps and not end.num_requests:
            raise TraceError(
                f"the server has recorded nothing in the last {since}; send a request, or give a "
                "longer time with --since"
            )
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
    typer.echo(
        f"{output}: {end.num_requests} requests, {end.num_steps} steps; open it at "
        "https://ui.perfetto.dev"
    )
    if not end.is_complete:
        typer.echo("the server no longer had all of that time: see docs/traces.md", err=True)


def _create(path: Path) -> IO[bytes]:
    """Return a new file that only its owner can read: it names tenants."""
    try:
        return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError as error:
        raise TraceError(
            f"cannot write in {path.parent}: {error.strerror}; choose another file with --output"
        ) from error


def read_duration(text: str) -> float:
    """Return the seconds of a time such as 30s, 5m or 1h."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0.0 < seconds <= MAX_SINCE_S:
        raise ConfigError(f"--since takes a time such as 30s, 5m or 1h, up to 24h; got {text!r}")
    return seconds


def _fetch(url: str, since_s: float, api_key: str | None, file: IO[bytes]) -> TraceEnd:
    """Write the trace of a server to a file; return what it says at its end."""
    headers, base = key_headers(api_key), check_url(url)
    try:
        request = urllib.request.Request(f"{base}{PATH}?since_s={since_s}", headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return _convert(answer, file, url)
    except urllib.error.HTTPError as error:
        raise TraceError(f"{url}: {error_message(error)}{_hint(error.code)}") from error
    except msgspec.MsgspecError as error:
        raise TraceError(f"{url} {OTHER_SERVER}: {str(error)[:200]}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise TraceError(cannot_ask(url, error, ADMIN)) from error


def _hint(status: int) -> str:
    match status:
        case 401:
            return "; give an administrator's key with --api-key or HEADWAY_API_KEY"
        case 404:
            return "; --url takes the admin listener (--admin-port), by default port 8001"
        case _:
            return ""


def _convert(answer: http.client.HTTPResponse, file: IO[bytes], url: str) -> TraceEnd:
    written: ChromeTrace | None = None
    while line := answer.readline(MAX_LINE_BYTES):
        match decode_line(line):
            case TraceHead() as head:
                if head.version != VERSION:
                    raise TraceError(f"{url} {OTHER_SERVER}: it has headway {head.headway}")
                written = ChromeTrace(file, head)
            case _ if written is None:
                raise TraceError(f"{url} {OTHER_SERVER}")
            case TraceSteps(engine=engine, steps=steps):
                written.add_steps(engine, steps)
            case TraceRequest(account=account):
                written.add_request(account)
            case TraceEnd() as end:
                written.close(is_complete=end.is_complete)
                return end
    raise TraceError(f"the answer of {url} ended early; try again")
