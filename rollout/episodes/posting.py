"""A small HTTP/1.1 client for JSON, on asyncio streams. It needs only the standard library."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

MAX_LINE_BYTES = 2**16


class HTTPError(Exception):
    """A response whose status is not 2xx."""

    def __init__(self, status: int, body: bytes):
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body


async def post(url: str, request: dict, api_key: str) -> dict:
    """Send JSON over a connection of its own, and return the JSON of the response.

    There is no time limit. If this is cancelled, the connection closes, which tells the server.

    Raises:
        HTTPError: the status of the response is not 2xx.
        ConnectionError: the server cannot be reached, or has closed the connection.
    """
    parts = urlsplit(url)
    port = parts.port or 80
    reader, writer = await asyncio.open_connection(parts.hostname, port, limit=MAX_LINE_BYTES)
    try:
        body = json.dumps(request).encode()
        head = [
            f"POST {parts.path} HTTP/1.1",
            f"Host: {parts.hostname}:{port}",
            f"Authorization: Bearer {api_key}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await writer.drain()
        status, response = await read_response(reader)
    except (asyncio.IncompleteReadError, EOFError) as error:
        raise ConnectionError(f"{url}: the server has closed the connection") from error
    finally:
        writer.transport.abort()  # nothing remains to be sent, unless this was cancelled
    if not 200 <= status < 300:
        raise HTTPError(status, response)
    return json.loads(response)


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the body of a response."""
    status_line = await read_line(reader)
    status = int(status_line.split(" ", 2)[1])
    headers = {}
    while line := await read_line(reader):
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return status, await read_chunks(reader)
    if "content-length" in headers:
        return status, await reader.readexactly(int(headers["content-length"]))
    return status, await reader.read()


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Return a body that is sent in chunks, each after a line with its size in hexadecimal."""
    chunks = []
    while num_bytes := int((await read_line(reader)).partition(";")[0], 16):
        chunks.append(await reader.readexactly(num_bytes))
        await read_line(reader)
    while await read_line(reader):
        continue
    return b"".join(chunks)


async def read_line(reader: asyncio.StreamReader) -> str:
    """Return the next line without its end.

    Raises:
        EOFError: the connection has closed before.
    """
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line.decode("latin-1").rstrip("\r\n")
