"""The gateway's end of the socket pair: requests to the trainer, and its answers.

Both ends send one JSON object per line. The trainer sends:

    the settings, first: {"model_path", "chat_template", "template_kwargs", "tool_parser",
        "reasoning_parser", "stop_token_ids", "max_model_len", "vocab_size",
        "special_tokens_in_text"}
    {"begin": [KEY, ...], "sampling": {"temperature", "top_p", "top_k", "min_p", "max_tokens",
        "stop"}, "section", "max_turns", "max_episode_tokens"}    more API keys are valid, on these
        terms
    {"id", "token_ids", "log_probs", "finish_reason"}    the answer to a request
    {"end": [KEY, ...], "number"}    these keys are forgotten, and their open requests fail

The gateway sends:

    {"ready": PORT, "notices": [text, ...]} or {"error": text}    the answer to the settings
    {"id", "episode": KEY, "prompt_ids", "max_tokens", "stop", "num_tools"}    a request for tokens
    {"abort": id, "episode": KEY}    the client of a request has gone
    {"episode": KEY, "messages", "tool_calls", "tool_errors"}    a conversation, after each turn
    {"episode": KEY, "reward"}    a reward for the last turn that has ended
    {"episode": KEY, "limit"}    the first limit that an episode reaches
    {"ended": number}    the answer to "end"; nothing about those keys follows
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Container
from dataclasses import dataclass

MAX_LINE_BYTES = 2**28


@dataclass(frozen=True)
class Pending:
    """A request that the trainer has not answered yet.

    Attributes:
        key: the API key of its episode.
        answer: the trainer's answer to come.
    """

    key: str
    answer: asyncio.Future


class TrainerLink:
    """Exchanges messages with the trainer.

    Attributes:
        pending: the requests that the trainer has not answered yet, by their numbers.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader = reader
        self.writer = writer
        self.pending: dict[int, Pending] = {}
        self.num_requests = 0

    @classmethod
    async def connect(cls, descriptor: int) -> TrainerLink:
        """Connect over an inherited Unix socket."""
        reader, writer = await asyncio.open_unix_connection(
            sock=socket.socket(fileno=descriptor), limit=MAX_LINE_BYTES
        )
        return cls(reader, writer)

    def send(self, message: dict) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict | None:
        """Return the next message, or None if the trainer has ended."""
        try:
            line = await self.reader.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    def request(self, key: str, request: dict) -> tuple[int, asyncio.Future]:
        """Send an episode's request for tokens.

        Returns its number, and the trainer's answer to come.
        """
        self.num_requests += 1
        number = self.num_requests
        answer = asyncio.get_running_loop().create_future()
        self.pending[number] = Pending(key, answer)
        self.send({"id": number, "episode": key, **request})
        return number, answer

    def abort(self, number: int) -> None:
        """Tell the trainer that a request's client has disconnected."""
        pending = self.pending.pop(number, None)
        if pending is not None:
            self.send({"abort": number, "episode": pending.key})

    def answer(self, message: dict) -> None:
        """Pass on the trainer's answer to a request, unless the request was aborted."""
        pending = self.pending.pop(message["id"], None)
        if pending is not None and not pending.answer.done():
            pending.answer.set_result(message)

    def fail_pending(self, keys: Container[str], make_error: Callable[[], Exception]) -> None:
        """Fail the unanswered requests of these episodes."""
        failed = [number for number, pending in self.pending.items() if pending.key in keys]
        for number in failed:
            answer = self.pending.pop(number).answer
            if not answer.done():
                answer.set_exception(make_error())
