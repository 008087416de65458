"""The parser of forms: any chunking gives the same events, and garbage is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import InvalidRequestError
from headway.server.http.errors import ApiError
from headway.server.http.multipart import (
    MAX_PARTS,
    MultipartParser,
    PartBegin,
    PartData,
    PartEnd,
    boundary_of,
)

BOUNDARY = "xYz"
Parts = list[tuple[PartBegin, bytes]]


def form(*parts: tuple[str, str | None, bytes]) -> bytes:
    body = b""
    for name, filename, data in parts:
        named = "" if filename is None else f'; filename="{filename}"'
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        body += head.encode() + data + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def parse(body: bytes, cuts: list[int] | None = None) -> Parts:
    """Feed a body in pieces; return its parts, each with all of its data."""
    parser = MultipartParser(BOUNDARY.encode())
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts or []), len(body)]
    found: Parts = []
    num_open = 0
    for start, end in pairwise(edges):
        for event in parser.feed(body[start:end]):
            match event:
                case PartBegin():
                    num_open += 1
                    found.append((event, b""))
                case PartData(data):
                    assert num_open == 1
                    found[-1] = (found[-1][0], found[-1][1] + data)
                case PartEnd():
                    num_open -= 1
    parser.finish()
    assert num_open == 0
    return found


# Data that nearly has delimiters in it.
DATA = st.lists(
    st.sampled_from([b"\r\n", b"--", b"--xY", b"\r\n--x", b"\r", b"\n", b"-", b"a", b"\x00\xff"]),
    max_size=12,
).map(b"".join)


@given(DATA, DATA, st.lists(st.integers(0, 400), max_size=20))
def test_any_chunking_gives_the_same_parts(first: bytes, second: bytes, cuts: list[int]) -> None:
    body = form(("purpose", None, first), ("file", "a.jsonl", second))
    expected = [
        (PartBegin("purpose", None), first),
        (PartBegin("file", "a.jsonl"), second),
    ]
    assert parse(body, cuts) == expected
    assert parse(body, list(range(len(body)))) == expected


@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [b"--xYz", b"\r\n", b"--", b"\r\n\r\n", b'Content-Disposition: form-data; name="a"']
            ),
            st.binary(max_size=8),
        ),
        max_size=20,
    ).map(b"".join),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_garbage_is_refused_or_read_and_never_raises_anything_else(
    body: bytes, cuts: list[int]
) -> None:
    def outcome(at: list[int]) -> Parts | None:
        try:
            return parse(body, at)
        except InvalidRequestError:
            return None

    assert outcome(cuts) == outcome([])


@given(st.text(max_size=60))
def test_a_content_type_is_a_form_or_refused(text: str) -> None:
    try:
        boundary = boundary_of(f"multipart/form-data; boundary={text}")
    except (ApiError, InvalidRequestError):
        return
    assert 1 <= len(boundary) <= 70


HEAD = b"--xYz\r\nContent-Disposition: form-data; "


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--xYz",
        b"--xYz--x",
        b"hello\r\n--xYz--\r\n",
        b"--xYz--\r\nmore",
        b"--xYz\r\n\r\ndata\r\n--xYz--",
        b"--xYz\r\nContent-Type: text/plain\r\n\r\ndata\r\n--xYz--",
        HEAD + b'name="a"\r\n\r\ndata',
        HEAD + b"filename=x\r\n\r\ndata\r\n--xYz--",
        HEAD + b'name="a"; name="b"\r\n\r\ndata\r\n--xYz--',
        HEAD + b'name="a" x\r\n\r\ndata\r\n--xYz--',
        HEAD + b'name="\xff"\r\n\r\ndata\r\n--xYz--',
        HEAD + b'name="a"; filename="b\x07"\r\n\r\ndata\r\n--xYz--',
        HEAD + b'name="a"\r\nContent-Transfer-Encoding: base64\r\n\r\ndata\r\n--xYz--',
        HEAD + b'name="' + b"a" * 65 + b'"\r\n\r\ndata\r\n--xYz--',
        HEAD + b'name="a"; filename="' + b"a" * 5000,
        form(*[("purpose", None, b"")] * (MAX_PARTS + 1)),
    ],
)
def test_a_wrong_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        parse(body)


def test_what_clients_send_is_read() -> None:
    names = (
        b'name="file"; filename="a \\"b\\".jsonl"',
        b"name=file; filename=plain.jsonl",
        b"name=\"file\"; filename*=utf-8''%C3%A9.jsonl",
        'name="file"; filename="é.jsonl"'.encode(),
    )
    found = [
        parse(HEAD + one + b"\r\nContent-Type: a/b\r\n\r\n{}\r\n--xYz--\r\n")[0] for one in names
    ]
    assert [part.filename for part, _ in found] == [
        'a "b".jsonl',
        "plain.jsonl",
        "é.jsonl",
        "é.jsonl",
    ]
    assert all(data == b"{}" for _, data in found)


@pytest.mark.parametrize(
    "text", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=a"]
)
def test_another_content_type_is_415(text: str) -> None:
    with pytest.raises(ApiError) as caught:
        boundary_of(text)
    assert caught.value.answer.status == 415
