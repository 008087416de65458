"""Bad inputs: forms, files and batches. A server without --batch-dir answers 404 to each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.cases import CHAT, CLOSED, Case, Outcome

FILES, BATCHES = "/v1/files", "/v1/batches"
BOUNDARY = "b0undary"
FORM = ("Content-Type", f"multipart/form-data; boundary={BOUNDARY}")
OFF = 404
LINE = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": []}}
BATCH: dict[str, Any] = {
    "input_file_id": "file-0",
    "endpoint": CHAT,
    "completion_window": "24h",
}


def part(name: str, data: bytes, disposition: str | None = None) -> bytes:
    text = f'form-data; name="{name}"' if disposition is None else disposition
    return f"--{BOUNDARY}\r\nContent-Disposition: {text}\r\n\r\n".encode() + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
FILE = part("file", json.dumps(LINE).encode(), 'form-data; name="file"; filename="a.jsonl"')
PURPOSE = part("purpose", b"batch")


def batch_cases() -> Iterator[Case]:
    yield from _forms()
    yield from _batches()
    yield from _paths()


def _case(name: str, status: Outcome, **fields: Any) -> Case:
    return Case(f"batches: {name}", (status, OFF), **fields)


def _forms() -> Iterator[Case]:
    forms: dict[str, tuple[int, bytes]] = {
        "a whole form": (200, PURPOSE + FILE + END),
        "the file first": (200, FILE + PURPOSE + END),
        "no last line end": (200, FILE + PURPOSE + END.rstrip()),
        "an empty file": (200, PURPOSE + FILE.replace(json.dumps(LINE).encode(), b"") + END),
        "an empty body": (400, b""),
        "no end": (400, PURPOSE + FILE),
        "only the end": (400, END),
        "text before": (400, b"hello\r\n" + PURPOSE + FILE + END),
        "text after": (400, PURPOSE + FILE + END + b"hello"),
        "another boundary": (400, (PURPOSE + FILE + END).replace(b"b0", b"c0")),
        "bare line feeds": (400, (PURPOSE + FILE + END).replace(b"\r\n", b"\n")),
        "no purpose": (400, FILE + END),
        "another purpose": (400, part("purpose", b"vision") + FILE + END),
        "a purpose of a megabyte": (400, part("purpose", b"x" * 20_000) + FILE + END),
        "a purpose that is not UTF-8": (400, part("purpose", b"\xff\xfe") + FILE + END),
        "two purposes": (400, PURPOSE + PURPOSE + FILE + END),
        "two files": (400, PURPOSE + FILE + FILE + END),
        "a file without a name": (400, PURPOSE + part("file", b"{}") + END),
        "an unknown field": (400, PURPOSE + part("x", b"1") + FILE + END),
        "a hundred parts": (400, PURPOSE * 100 + END),
        "no disposition": (400, f"--{BOUNDARY}\r\n\r\nx\r\n".encode() + END),
        "a broken disposition": (400, part("", b"x", 'form-data; name="a') + END),
        "an attachment": (400, part("", b"x", 'attachment; name="file"') + END),
        "headers without an end": (400, f"--{BOUNDARY}\r\n".encode() + b"A: b\r\n" * 2000),
        "headers that are not UTF-8": (400, part("a", b"x").replace(b'"a"', b'"\xff"') + END),
        "a name with a zero byte": (400, part("a\0", b"x") + END),
        "a file name with a path": (
            200,
            PURPOSE + part("", b"{}", 'form-data; name="file"; filename="../../etc/passwd"') + END,
        ),
        "base64": (
            400,
            PURPOSE
            + FILE.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n", 1)
            + END,
        ),
    }
    for name, (status, body) in forms.items():
        yield _case(f"form, {name}", status, path=FILES, headers=(FORM,), body=body)
    kinds = {
        "JSON": "application/json",
        "no boundary": "multipart/form-data",
        "multipart/mixed": f"multipart/mixed; boundary={BOUNDARY}",
    }
    for name, kind in kinds.items():
        header = ("Content-Type", kind)
        body = PURPOSE + FILE + END
        yield _case(f"form, {name}", 415, path=FILES, headers=(header,), body=body)
    long = ("Content-Type", f"multipart/form-data; boundary={'b' * 71}")
    yield _case("form, a boundary of 71", 400, path=FILES, headers=(long,), body=END)
    head = f"POST {FILES} HTTP/1.1\r\nHost: 127.0.0.1\r\n{FORM[0]}: {FORM[1]}\r\n"
    declared = (head + "Content-Length: 99999999999\r\n\r\n").encode()
    yield Case("batches: form, a length of 100 GB", (413, OFF, CLOSED), raw=(declared + PURPOSE,))
    cut = (head + "Content-Length: 5000\r\n\r\n").encode() + PURPOSE
    yield Case("batches: form, cut off", (400, OFF, CLOSED), raw=(cut,), is_half_closed=True)


def _batches() -> Iterator[Case]:
    wrong: dict[str, Any] = {
        "no body": None,
        "a list": [],
        "an unknown file": BATCH,
        "a path as file": {**BATCH, "input_file_id": "../../etc/passwd"},
        "a number as file": {**BATCH, "input_file_id": 7},
        "a file id of a megabyte": {**BATCH, "input_file_id": "f" * 50_000},
        "another endpoint": {**BATCH, "endpoint": "/v1/embeddings"},
        "a list as endpoint": {**BATCH, "endpoint": [CHAT]},
        "no window": {name: value for name, value in BATCH.items() if name != "completion_window"},
        "a window of 0": {**BATCH, "completion_window": "0h"},
        "a window of a year": {**BATCH, "completion_window": "365d"},
        "a window of 30 digits": {**BATCH, "completion_window": "9" * 30 + "h"},
        "a window in Arabic digits": {**BATCH, "completion_window": "٢٤h"},
        "a negative window": {**BATCH, "completion_window": "-1h"},
        "metadata of numbers": {**BATCH, "metadata": {"a": 1}},
        "metadata with many names": {**BATCH, "metadata": {str(n): "" for n in range(17)}},
        "metadata that is long": {**BATCH, "metadata": {"a": "x" * 513}},
        "an unknown field": {**BATCH, "priority": 1},
        "an expiry of words": {**BATCH, "output_expires_after": "soon"},
        "an expiry in the past": {
            **BATCH,
            "output_expires_after": {"anchor": "created_at", "seconds": -1},
        },
    }
    for name, body in wrong.items():
        text = b"" if body is None else json.dumps(body).encode()
        yield _case(name, 400, path=BATCHES, body=text)
    form = PURPOSE + FILE + END
    yield _case("a form", 415, path=BATCHES, headers=(FORM,), body=form)


def _paths() -> Iterator[Case]:
    unknown = ("x", "file-" + "0" * 32, "..%2f..%2fbatches.db", "%00", "%ff", "x" * 5000)
    for name in unknown:
        shown = name[:20]
        yield _case(f"GET a file {shown}", 404, method="GET", path=f"{FILES}/{name}")
        yield _case(f"GET content of {shown}", 404, method="GET", path=f"{FILES}/{name}/content")
        yield _case(f"DELETE a file {shown}", 404, method="DELETE", path=f"{FILES}/{name}")
        yield _case(f"GET a batch {shown}", 404, method="GET", path=f"{BATCHES}/{name}")
        yield _case(f"cancel a batch {shown}", 404, path=f"{BATCHES}/{name}/cancel", body=b"{}")
    queries = ("limit=0", "limit=-1", "limit=1e9", "limit=%00", "after=x", "order=x", "a=1")
    for query in (*queries, "limit=1&limit=2", "limit=" + "9" * 5000):
        shown = query[:20]
        yield _case(f"files?{shown}", 400, method="GET", path=f"{FILES}?{query}")
        yield _case(f"batches?{shown}", 400, method="GET", path=f"{BATCHES}?{query}")
    for method in ("PUT", "PATCH", "DELETE", "HEAD"):
        if method != "HEAD":
            yield _case(f"{method} files", 405, method=method, path=FILES)
            yield _case(f"{method} batches", 405, method=method, path=BATCHES)
