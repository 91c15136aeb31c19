"""Servers that answer one request of a test."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

Result = TypeVar("Result")
TIMEOUT = 30  # seconds


def with_server(serve: Callable, use: Callable[[str], Awaitable[Result]]) -> Result:
    """Await use(url) while a server runs at this URL, and return its result.

    serve: handles a connection, as for asyncio.start_server().
    """

    async def exchange() -> Result:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            return await use(f"http://127.0.0.1:{port}/v1")

    return asyncio.run(asyncio.wait_for(exchange(), timeout=TIMEOUT))
