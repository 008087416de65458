"""`headway batch`: submit a file of requests to a server, and fetch the results."""

from __future__ import annotations

import http.client
import json
import secrets
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from headway.cli.remote import Key, cannot_ask, check_url, error_message, key_headers
from headway.errors import ConfigError, HeadwayError

TIMEOUT_S = 60.0
POLL_S = 1.0
PIECE_BYTES = 256 * 1024
ENDED = ("completed", "failed", "expired", "cancelled")
DEFAULT_URL = "http://127.0.0.1:8000"
LISTENER = "the address that `headway serve --batch-dir FOLDER` says it is ready on"

app = typer.Typer(no_args_is_help=True, help="Run files of requests on a server's spare capacity.")
Url = Annotated[str, typer.Option("--url", help="URL of the server.")]
BatchId = Annotated[str, typer.Argument(help="Id of the batch, as `submit` printed it.")]


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="JSONL file, one request per line.")],
    endpoint: Annotated[
        str | None,
        typer.Option("--endpoint", help="Endpoint; default: the url of the first line."),
    ] = None,
    window: Annotated[
        str, typer.Option("--window", help="Completion window, such as 24h or 30m.")
    ] = "24h",
    wait: Annotated[
        bool, typer.Option("--wait", help="Show progress, then print the results.")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Upload a file and start a batch; print its id."""
    endpoint = endpoint or _first_url(file)
    server = _BatchServer.of(url, api_key)
    uploaded = server.upload(file)
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
    batch = server.ask("POST", "/v1/batches", body)
    if not wait:
        typer.echo(batch["id"])
        return
    typer.echo(f"{batch['id']}; Ctrl-C leaves it running", err=True)
    batch = _wait(server, batch)
    typer.echo(_summary(batch), err=True)
    _print_results(server, batch)
    if batch["status"] != "completed":
        raise typer.Exit(1)


@app.command()
def status(batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Show how far a batch has come, as JSON."""
    batch = _BatchServer.of(url, api_key).find(batch_id)
    typer.echo(json.dumps(batch, indent=2))


@app.command()
def results(batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Print the results of a batch that has ended, errors included."""
    server = _BatchServer.of(url, api_key)
    batch = server.find(batch_id)
    if batch["status"] not in ENDED:
        counts = batch["request_counts"]
        raise ConfigError(
            f"{batch_id} has not ended ({batch['status']}, {counts['completed']} of "
            f"{counts['total']} done); `headway batch status` shows it, `cancel` ends it"
        )
    typer.echo(_summary(batch), err=True)
    _print_results(server, batch)


@app.command()
def cancel(batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Cancel a batch; what is done is kept."""
    batch = _BatchServer.of(url, api_key).ask("POST", f"/v1/batches/{_quoted(batch_id)}/cancel", {})
    typer.echo(_summary(batch))


def _first_url(path: Path) -> str:
    """Return the endpoint that the first line of a file names."""
    try:
        with path.open("rb") as file:
            first = json.loads(next((text for text in file if text.strip()), b"{}"))
        found = first["url"]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: the first line is no request; a line is "
            '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}'
        ) from error
    return str(found)


def _wait(server: _BatchServer, batch: dict[str, Any]) -> dict[str, Any]:
    """Show the progress of a batch until it has ended."""
    from headway.cli.progress import progress_bar

    with progress_bar(batch["id"]) as progress:
        while batch["status"] not in ENDED:
            counts = batch["request_counts"]
            progress(counts["completed"] + counts["failed"], counts["total"])
            time.sleep(POLL_S)
            batch = server.find(batch["id"])
    return batch


def _summary(batch: Mapping[str, Any]) -> str:
    counts = batch["request_counts"]
    text = (
        f"{batch['id']} is {batch['status']}: {counts['completed']} of {counts['total']} answered, "
        f"{counts['failed']} failed"
    )
    problems = (batch.get("errors") or {}).get("data", [])
    lines = [f"  line {one['line']}: {one['message']}" for one in problems]
    return "\n".join([text, *lines])


def _print_results(server: _BatchServer, batch: Mapping[str, Any]) -> None:
    for name in ("output_file_id", "error_file_id"):
        if batch[name] is not None:
            for piece in server.download(batch[name]):
                sys.stdout.buffer.write(piece)
    sys.stdout.flush()  # here, so that `main` handles a reader that is gone


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


class BatchCommandError(HeadwayError):
    """The server refused, or cannot be asked."""


@dataclass(frozen=True, slots=True)
class _BatchServer:
    """A server, and how to ask it."""

    url: str
    headers: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, url: str, api_key: str | None) -> _BatchServer:
        return cls(check_url(url), key_headers(api_key))

    def find(self, batch_id: str) -> dict[str, Any]:
        return self.ask("GET", f"/v1/batches/{_quoted(batch_id)}")

    def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        return self._read_json(self._request(method, path, data, kind))

    def upload(self, path: Path) -> dict[str, Any]:
        """Send a file without reading it into memory."""
        boundary = secrets.token_hex(16)
        begin = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
            f'filename="{urllib.parse.quote(path.name)}"\r\n\r\n'
        ).encode()
        end = f"\r\n--{boundary}--\r\n".encode()
        try:
            with path.open("rb") as file:
                num_bytes = len(begin) + path.stat().st_size + len(end)
                headers = {
                    "Content-Type": f"multipart/form-data; boundary={boundary}",
                    "Content-Length": str(num_bytes),
                }
                body = _pieces(begin, file, end)
                return self._read_json(self._request("POST", "/v1/files", body, headers))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error

    def download(self, file_id: str) -> Iterator[bytes]:
        with self._open(self._request("GET", f"/v1/files/{_quoted(file_id)}/content")) as answer:
            while piece := answer.read(PIECE_BYTES):
                yield piece

    def _request(
        self, method: str, path: str, data: Any = None, headers: Mapping[str, str] | None = None
    ) -> urllib.request.Request:
        given = {**self.headers, **(headers or {})}
        return urllib.request.Request(self.url + path, data, given, method=method)

    def _read_json(self, request: urllib.request.Request) -> dict[str, Any]:
        with self._open(request) as answer:
            try:
                found = json.load(answer)
            except ValueError as error:
                raise BatchCommandError(f"{self.url} is not a Headway server") from error
        if not isinstance(found, dict) or "id" not in found:
            raise BatchCommandError(f"{self.url} is not a Headway server")
        return found

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise BatchCommandError(f"{self.url}: {error_message(error)}") from error
        except (urllib.error.URLError, TimeoutError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise BatchCommandError(cannot_ask(self.url, reason, LISTENER)) from error


def _pieces(begin: bytes, file: BinaryIO, end: bytes) -> Iterator[bytes]:
    yield begin
    while piece := file.read(PIECE_BYTES):
        yield piece
    yield end
