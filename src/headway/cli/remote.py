"""How commands ask a server: its URL, the key, and what an error answer says."""

from __future__ import annotations

import http.client
import json
import urllib.error
from typing import Annotated

import typer

from headway.config import load_config
from headway.errors import ConfigError

MAX_ERROR_BYTES = 1 << 20
PUBLIC = "the address that `headway serve` says it is ready on"
ADMIN = "the address of the admin listener, where `headway serve` says its metrics are"
OTHER_SERVER = "is not a Headway server, or has another release"
Key = Annotated[str | None, typer.Option("--api-key", help="API key; default: HEADWAY_API_KEY.")]


def check_url(url: str) -> str:
    """Return a URL of a server without its last slash."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must start with http:// or https://, got {url!r}")
    return url.rstrip("/")


def key_headers(api_key: str | None) -> dict[str, str]:
    """Return the header with the key, or with that of the settings."""
    keys = load_config({"api_key": (api_key,) if api_key else None}).server.api_key
    return {"Authorization": f"Bearer {keys[0]}"} if keys else {}


def cannot_ask(url: str, reason: object, listener: str) -> str:
    """Return what to say of a server that cannot be reached, and of its PUBLIC or ADMIN address."""
    return f"{url} cannot be asked: {reason}; --url takes {listener}"


def error_message(answer: urllib.error.HTTPError | http.client.HTTPResponse) -> str:
    """Return what the answer of a server says about an error; close the answer."""
    try:
        with answer:
            return json.loads(answer.read(MAX_ERROR_BYTES))["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        return f"HTTP {answer.status}"
