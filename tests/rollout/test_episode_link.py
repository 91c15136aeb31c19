"""The gateway's end of its socket pair, with the trainer's end in this process."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import pytest

from rollout.episodes.link import TrainerLink


def with_link(play: Callable[[TrainerLink, socket.socket], Awaitable]) -> None:
    """Call an async function with a link and the trainer's socket."""
    own_end, gateway_end = socket.socketpair()
    own_end.settimeout(10)

    async def connect_and_play():
        link = await TrainerLink.connect(gateway_end.detach())
        await play(link, own_end)
        link.writer.close()

    with own_end:
        asyncio.run(connect_and_play())


async def sent(link: TrainerLink, trainer: socket.socket) -> list[dict]:
    """Return the messages that the trainer has got."""
    await link.writer.drain()
    trainer.setblocking(False)
    try:
        text = trainer.recv(2**16).decode()
    except BlockingIOError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def test_a_long_message_arrives_whole_and_the_end_is_noticed():
    """The tokens of an answer have more characters than asyncio reads by default."""

    async def play(link, trainer):
        message = {"id": 1, "token_ids": list(range(100_000))}
        line = json.dumps(message).encode() + b"\n"
        sending = asyncio.to_thread(trainer.sendall, line + b'{"id": 2}\n{"cut": ')
        received = asyncio.gather(link.receive(), sending)
        assert (await received)[0] == message
        assert await link.receive() == {"id": 2}
        trainer.shutdown(socket.SHUT_WR)
        assert await link.receive() is None, "a trainer that has ended within a message"

    with_link(play)


def test_an_answer_belongs_to_the_request_with_its_number():
    async def play(link, trainer):
        first = link.request("key a", {"prompt_ids": [1]})
        second = link.request("key b", {"prompt_ids": [2]})
        assert await sent(link, trainer) == [
            {"id": first[0], "episode": "key a", "prompt_ids": [1]},
            {"id": second[0], "episode": "key b", "prompt_ids": [2]},
        ]
        answer = {"id": second[0], "token_ids": [3]}
        link.answer(answer)
        assert await second[1] == answer
        assert not first[1].done()
        assert [*link.pending] == [first[0]]
        # Answers that nobody waits for do no harm.
        link.answer(answer)
        first[1].cancel()
        link.answer({"id": first[0]})
        assert not link.pending

    with_link(play)


def test_a_request_is_aborted_once():
    async def play(link, trainer):
        number, _ = link.request("key", {})
        await sent(link, trainer)
        link.abort(number)
        link.abort(number)
        assert await sent(link, trainer) == [{"abort": number, "episode": "key"}]
        assert not link.pending

    with_link(play)


def test_requests_of_episodes_that_are_over_fail():
    async def play(link, trainer):
        over = link.request("over", {})[1]
        gone = link.request("over", {})[1]
        number, other = link.request("other", {})
        gone.cancel()
        link.fail_pending({"over"}, lambda: ValueError("the episode is over"))
        with pytest.raises(ValueError, match="the episode is over"):
            await over
        assert not other.done()
        assert [*link.pending] == [number]

    with_link(play)
