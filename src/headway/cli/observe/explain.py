"""`headway explain`: what happened to a request and why it took as long as it did."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from headway.cli.observe.ledger import open_ledger
from headway.cli.remote import (
    OTHER_SERVER,
    PUBLIC,
    cannot_ask,
    check_url,
    error_message,
    key_headers,
)
from headway.errors import LedgerError

TIMEOUT_S = 30.0


def explain(
    request_id: Annotated[
        str, typer.Argument(help="Id in the response, or its X-Request-Id header.")
    ],
    ledger_url: Annotated[
        str | None,
        typer.Option(
            "--ledger-url", help="URL of the ledger; default: the ledger of `headway serve`."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="URL of a server to ask instead; also finds live requests."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="API key for --url; default: HEADWAY_API_KEY.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole account as JSON.")
    ] = False,
) -> None:
    """Explain a request: a paragraph and a timeline.

    Reads the ledger of this machine, unless --url names a server.
    """
    if url is not None:
        found = _from_server(url, request_id, api_key)
    else:
        found = _from_ledger(ledger_url, request_id)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo(f"{found['text']}\n\n{found['timeline_text']}")


def _from_ledger(url: str | None, request_id: str) -> dict[str, Any]:
    from headway.observe.trace.explain import as_dict

    with open_ledger(url) as ledger:
        account = ledger.store.find(request_id, None)
    if account is None:
        raise LedgerError(f"the ledger has no request {request_id}; use --url for live requests")
    return as_dict(account)


def _from_server(url: str, request_id: str, api_key: str | None) -> dict[str, Any]:
    path = f"/v1/requests/{urllib.parse.quote(request_id, safe='')}/explanation"
    headers, base = key_headers(api_key), check_url(url)
    try:
        request = urllib.request.Request(base + path, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise LedgerError(f"{url}: {error_message(error)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise LedgerError(cannot_ask(url, error, PUBLIC)) from error
    if not isinstance(found, dict) or not {"text", "timeline_text"} <= found.keys():
        raise LedgerError(f"{url} {OTHER_SERVER}")
    return found
