"""Bad inputs: background responses, their ids, numbers and methods."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.faults.cases import MAX_TOKENS, Case, Target

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"input": "hi", "max_output_tokens": MAX_TOKENS, "background": True}
IDS = ("x", "resp_1", "resp_" + "0" * 32, "resp_%00", "%ff", "..%2f..%2fetc", "x" * 5000)
NUMBERS = ("-1", "", "%20", "1.0", "1e3", "0x1", "99", "9" * 30, "9" * 5000, "%D9%A1", "nan", "a")


def background_cases() -> Iterator[Case]:
    yield from _fields()
    yield from _ids()
    yield from _queries()
    yield from _twice()


def _fields() -> Iterator[Case]:
    wrong: dict[str, dict[str, Any]] = {
        "a-text": {"background": "yes"},
        "a-number": {"background": 1},
        "a-list": {"background": [True]},
        "not-kept": {"store": False},
        "no-input": {"input": []},
    }
    for name, fields in wrong.items():
        body = json.dumps({**BODY, **fields}).encode()
        yield Case(f"background-{name}", (400,), path=RESPONSES, body=body)
    text = json.dumps(BODY).encode()
    yield Case("background-ok", (200,), path=RESPONSES, body=text)
    headers = (("Content-Type", "application/json"), ("Idempotency-Key", "k"))
    yield Case("background-with-a-key", (400,), path=RESPONSES, headers=headers, body=text)


def _ids() -> Iterator[Case]:
    for name in IDS:
        path, shown = f"{RESPONSES}/{name}", name[:20]
        yield Case(f"background-get-{shown}", (404,), method="GET", path=path)
        yield Case(f"background-delete-{shown}", (404,), method="DELETE", path=path)
        yield Case(f"background-cancel-{shown}", (404,), path=f"{path}/cancel", body=b"{}")
        query = f"{path}?stream=true&starting_after=3"
        yield Case(f"background-stream-{shown}", (404,), method="GET", path=query)
    path = f"{RESPONSES}/resp_1"
    for method in ("PUT", "PATCH", "POST", "OPTIONS"):
        yield Case(f"background-{method}-an-id", (405,), method=method, path=path, body=b"{}")
    for method in ("GET", "PUT", "DELETE"):
        yield Case(f"background-{method}-cancel", (405,), method=method, path=f"{path}/cancel")
    for rest in ("input_items", "no_such_thing", "cancel/", "cancel/x"):
        yield Case(f"background-get-{rest}", (404,), method="GET", path=f"{path}/{rest}")


def _queries() -> Iterator[Case]:
    for number in NUMBERS:
        name = f"background-after-{number[:20]}-of-{len(number)}"
        query = f"?stream=true&starting_after={number}"
        yield Case(name, (400,), method="GET", path=begun(query))
    for query in (
        "starting_after=0",
        "stream=false&starting_after=0",
        "stream=1",
        "stream=",
        "stream=true&stream=true",
        "include_obfuscation=true",
        "include=message.output_text.logprobs",
        "a=1",
        "%00=1",
    ):
        yield Case(f"background-get?{query}", (400,), method="GET", path=begun(f"?{query}"))
    yield Case("background-cancel?", (400,), path=begun("/cancel?a=1"), body=b"{}")
    yield Case("background-delete?", (400,), method="DELETE", path=begun("?a=1"))


def _twice() -> Iterator[Case]:
    cancelled, deleted = begun("/cancel", "POST", "/cancel"), begun("", "DELETE", "")
    yield Case("background-cancel-twice", (200,), path=cancelled, body=b"{}")
    yield Case("background-cancel-with-a-bad-body", (200,), path=begun("/cancel"), body=b"\xff{")
    yield Case("background-get-cancelled", (200,), method="GET", path=begun("", "POST", "/cancel"))
    yield Case("background-delete-twice", (404,), method="DELETE", path=deleted)
    gone = begun("/cancel", "DELETE", "")
    yield Case("background-cancel-deleted", (404,), path=gone, body=b"{}")


def begun(rest: str, method: str = "", first: str = "") -> Callable[[Target], str]:
    """Return what starts a response, sends one request about it, and returns a path of it."""

    def path(target: Target) -> str:
        connection = http.client.HTTPConnection(target.host, target.port, timeout=20)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", RESPONSES, json.dumps(BODY), headers)
            name = f"{RESPONSES}/{json.load(connection.getresponse())['id']}"
            if method:
                connection.request(method, name + first)
                connection.getresponse().read()
            return name + rest
        finally:
            connection.close()

    return path
