"""The raw client: bodies in any pieces, connections kept, reused and lost."""

from __future__ import annotations

import pytest

from headway.bench.load.http import (
    ChunkedBody,
    HttpClient,
    HttpFailure,
    Origin,
    parse_head,
    parse_url,
)
from headway.errors import ConfigError
from tests.bench.conftest import Serve
from tests.bench.endpoint import Call

WIRE = b"4\r\nWiki\r\n6;ext=1\r\npedia \r\nE\r\nin \r\n\r\nchunks.\r\n0\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, len(WIRE)])
def test_chunks_are_found_in_pieces_of_any_size(step: int):
    body = ChunkedBody()
    found = b"".join(body.feed(WIRE[at : at + step]) for at in range(0, len(WIRE), step))
    assert found == b"Wikipedia in \r\n\r\nchunks."
    assert body.is_done


def test_trailers_end_with_an_empty_line():
    body = ChunkedBody()
    assert body.feed(b"1\r\nx\r\n0\r\nName: value\r\n") == b"x"
    assert not body.is_done
    body.feed(b"\r\n")
    assert body.is_done


def test_what_is_no_chunk_is_a_failure():
    with pytest.raises(HttpFailure, match="malformed"):
        ChunkedBody().feed(b"hello\r\n")
    with pytest.raises(HttpFailure, match="not an HTTP"):
        parse_head(b"SSH-2.0-OpenSSH")


def test_urls_with_and_without_the_version():
    assert parse_url("http://h:8000/v1/") == parse_url("http://h:8000") == Origin("h", 8000)
    assert parse_url("https://h/base/v1") == Origin("h", 443, True, "/base")
    assert parse_url("http://[::1]:9") == Origin("::1", 9)
    for text in ("h:8000", "ftp://h", "http://", "http://h:many"):
        with pytest.raises(ConfigError, match="is not a URL"):
            parse_url(text)


async def get(client: HttpClient) -> bytes:
    status, body = await client.fetch("/", {})
    assert status == 200
    return body


async def test_a_connection_is_used_again(serve: Serve):
    async def script(call: Call) -> None:
        call.whole(200, {"n": call.number})

    endpoint = await serve(script)
    client = HttpClient(parse_url(endpoint.url))
    assert [await get(client) for _ in range(3)] == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}']
    assert endpoint.num_connections == 1
    client.close()


async def test_a_connection_closed_meanwhile_is_replaced(serve: Serve):
    async def script(call: Call) -> None:
        if call.number == 1:
            call.hang_up()
        else:
            call.whole(200, {"n": call.number})

    endpoint = await serve(script)
    client = HttpClient(parse_url(endpoint.url))
    assert [await get(client) for _ in range(2)] == [b'{"n": 0}', b'{"n": 2}']
    assert endpoint.num_connections == 2
    client.close()


async def test_a_connection_the_server_will_close_is_not_kept(serve: Serve):
    async def script(call: Call) -> None:
        call.whole(200, {}, connection="close")

    endpoint = await serve(script)
    client = HttpClient(parse_url(endpoint.url))
    await get(client)
    await get(client)
    assert endpoint.num_connections == 2
    client.close()


async def test_a_body_without_length_lasts_until_the_end(serve: Serve):
    async def script(call: Call) -> None:
        call.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        await call.writer.drain()
        call.writer.close()

    client = HttpClient(parse_url((await serve(script)).url))
    assert await get(client) == b"all of it"


async def test_a_body_cut_short_is_a_failure(serve: Serve):
    async def script(call: Call) -> None:
        call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        await call.writer.drain()
        call.writer.close()

    client = HttpClient(parse_url((await serve(script)).url))
    with pytest.raises(HttpFailure, match="in the middle"):
        await get(client)
