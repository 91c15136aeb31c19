"""Requests of an episode to a server, over a real connection."""

import asyncio
import json

import pytest

from rollout.episodes.posting import HTTPError, post
from tests.support.servers import with_server

ANSWER = {"text": "größer", "numbers": [1, 2]}
BODY = json.dumps(ANSWER).encode()
HALF = len(BODY) // 2


def with_length(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def in_chunks(*parts: bytes, trailer: bytes = b"") -> bytes:
    chunks = b"".join(b"%x;name=1\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: CHUNKED\r\n\r\n" + chunks + b"0\r\n" + trailer


def answered(response: bytes) -> tuple[object, bytes]:
    """Post to a server that sends this response and closes; return the answer and the request."""
    requests = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        num_bytes = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        requests.append(head + await reader.readexactly(num_bytes))
        writer.write(response)
        await writer.drain()
        writer.close()

    answer = with_server(serve, lambda url: post(f"{url}/turn", {"ids": [1, 2]}, "a key"))
    return answer, requests[0]


@pytest.mark.parametrize(
    "response",
    [
        with_length(BODY),
        with_length(BODY, "201 Created"),
        in_chunks(BODY, trailer=b"\r\n"),
        in_chunks(BODY[:HALF], BODY[HALF:], trailer=b"Name: value\r\nOther: 1\r\n\r\n"),
        b"HTTP/1.1 200 OK\r\n\r\n" + BODY,
    ],
    ids=["length", "created", "one chunk", "two chunks", "until the end"],
)
def test_the_answer_is_the_json_of_the_body(response):
    answer, _ = answered(response)
    assert answer == ANSWER


def test_a_request_has_its_length_and_key():
    _, request = answered(with_length(BODY))
    head, _, body = request.partition(b"\r\n\r\n")
    first, *headers = head.decode().split("\r\n")
    assert first == "POST /v1/turn HTTP/1.1"
    assert "Authorization: Bearer a key" in headers
    assert "Content-Type: application/json" in headers
    assert json.loads(body) == {"ids": [1, 2]}


@pytest.mark.parametrize("status", ["199 Early", "300 Choices", "404 Not Found", "502 Bad Gateway"])
def test_other_statuses_are_errors_whatever_the_body_is(status):
    with pytest.raises(HTTPError) as error:
        answered(with_length(b"<html>no JSON</html>", status))
    assert str(status.split()[0]) in str(error.value)


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
        with_length(BODY)[:-1],
        in_chunks(BODY)[: -len(b"\r\n0\r\n")],
        in_chunks(BODY),
    ],
    ids=["nothing", "status", "headers", "body", "chunk", "trailer"],
)
def test_a_connection_that_closes_too_early_is_an_error(response):
    with pytest.raises(ConnectionError, match="the server has closed the connection"):
        answered(response)
