"""The gateway's turns and limits in this process. test_episode_gateway.py starts the program."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
import pytest
import uvicorn

from config import InputError
from rollout.episodes.gateway import Gateway, Server
from rollout.episodes.link import TrainerLink
from rollout.episodes.parsing import HARMONY, Reply, ReplyParser
from rollout.episodes.replies import Sampled, chat_completion
from tests.data.chat_templates import CHATML, STRICT
from tests.rollout.episode_gateway import (
    CHAT,
    GENERATE,
    HELLO,
    SAMPLING,
    TOOL,
    gateway_settings,
)

SECONDS = 20


@pytest.fixture(scope="module")
def two_ends(model_path, tokenizer) -> Gateway:
    """A gateway whose settings name a second token that ends turns."""
    other_end = tokenizer.convert_tokens_to_ids("<|im_start|>")
    return Gateway(None, gateway_settings(model_path) | {"stop_token_ids": [other_end]})


@dataclass
class Player:
    """An agent, and the trainer whose answers the test makes up.

    Attributes:
        gateway: handles the trainer's messages.
        client: sends the agent's requests to the gateway's routes.
        trainer: the trainer's end of the gateway's link.
    """

    gateway: Gateway
    client: httpx.AsyncClient
    trainer: TrainerLink

    def begin(self, *keys: str, max_turns=None, max_episode_tokens=None, **sampling) -> None:
        self.gateway.handle(
            {
                "begin": keys,
                "sampling": SAMPLING | sampling,
                "section": "rollout",
                "max_turns": max_turns,
                "max_episode_tokens": max_episode_tokens,
            }
        )

    def post(self, path: str, key: str, body: dict) -> asyncio.Task[httpx.Response]:
        headers = {"Authorization": f"Bearer {key}"}
        return asyncio.create_task(self.client.post(path, json=body, headers=headers))

    def generate(self, key: str, num_prompt: int = 1, **params) -> asyncio.Task[httpx.Response]:
        body = {"token_ids": [5] * num_prompt, "sampling_params": params}
        return self.post(GENERATE, key, body)

    async def receive(self) -> dict:
        """Return the gateway's next message to the trainer."""
        return await asyncio.wait_for(self.trainer.receive(), SECONDS)

    def answer(self, request: dict, token_ids: list[int], finish_reason: str = "stop") -> None:
        log_probs = [-token / 10 for token in token_ids]
        answer = {"token_ids": token_ids, "log_probs": log_probs, "finish_reason": finish_reason}
        self.gateway.handle({"id": request["id"], **answer})

    async def play_turn(self, key: str, num_tokens: int, **params) -> dict:
        """Play a turn of tokens, and return the gateway's request to the trainer."""
        turn = self.generate(key, **params)
        request = await self.receive()
        self.answer(request, [7] * num_tokens)
        assert (await turn).status_code == 200
        return request


def play(model_path, scenario: Callable[[Player], Awaitable[None]], **settings) -> None:
    """Call an async function with a player of a new gateway."""
    trainer_end, gateway_end = socket.socketpair()

    async def connect_and_play() -> None:
        link = await TrainerLink.connect(gateway_end.detach())
        trainer = await TrainerLink.connect(trainer_end.detach())
        gateway = Gateway(link, gateway_settings(model_path) | settings)
        transport = httpx.ASGITransport(gateway.application())
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await asyncio.wait_for(scenario(Player(gateway, client, trainer)), SECONDS)
        link.writer.close()
        trainer.writer.close()

    asyncio.run(connect_and_play())


async def num_requests(player: Player) -> int:
    """Return how many requests the trainer has got after all that can happen has happened."""
    for _ in range(20):
        await asyncio.sleep(0)
    return player.gateway.link.num_requests


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, finish_reason, stop, expected",
    [
        ("the cat<|im_end|>", "stop", [], "the cat"),
        ("the cat<|im_start|>", "stop", [], "the cat"),
        # It stopped at a string, not at its last token.
        ("the cat", "stop", ["cat"], "the "),
        ("the cat", "stop", [], "the cat"),
        # It was cut off. What looks like a stop string is part of the text.
        ("the cat", "length", ["cat"], "the cat"),
        ("the cat<|im_end|>", "length", [], "the cat<|im_end|>"),
        ("the cat<|im_end|>", "stop", ["the"], "the cat"),
        ("", "stop", ["cat"], ""),
    ],
)
def test_a_reply_ends_before_its_end_token_or_stop_string(
    two_ends, tokenizer, text, finish_reason, stop, expected
):
    ids = tokenizer.encode(text)
    sampled = Sampled(1, [3], ids, [-0.5] * len(ids), finish_reason)
    assert two_ends.text_of(sampled, stop) == expected


@pytest.mark.parametrize(
    "finish_reason, calls, expected",
    [
        ("stop", None, "stop"),
        ("stop", [], "stop"),
        ("length", [], "length"),
        ("stop", [{"id": "c1"}], "tool_calls"),
    ],
)
def test_an_answer_tells_whether_tools_are_called_and_how_many_tokens_it_took(
    finish_reason, calls, expected
):
    sampled = Sampled(7, [3, 4, 5], [8, 9], [-0.5, -1.5], finish_reason)
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    answer = chat_completion(sampled, message, None)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == expected
    assert (choice["message"], choice["token_ids"]) == (message, [8, 9])
    assert answer["prompt_token_ids"] == [3, 4, 5]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


# -- episodes --------------------------------------------------------------------------------------


def test_keys_that_are_announced_again_keep_what_they_have_used(model_path):
    """Only their terms are new."""

    async def scenario(player):
        player.begin("key", max_episode_tokens=10)
        await player.play_turn("key", 4)
        player.begin("key", "late", max_episode_tokens=9, max_tokens=8)
        request = await player.play_turn("key", 1)
        assert request["max_tokens"] == 9 - 4
        assert (await player.play_turn("late", 1))["max_tokens"] == 8

    play(model_path, scenario)


def test_a_key_names_an_episode_only_as_a_bearer_token(model_path):
    async def scenario(player):
        player.begin("key")
        for scheme, status in (("Bearer", 200), ("bearer", 200), ("Basic", 401), ("", 401)):
            headers = {"Authorization": f"{scheme} key"}
            response = await player.client.get("/v1/models", headers=headers)
            assert response.status_code == status, scheme

    play(model_path, scenario)


def test_the_end_of_an_episode_fails_its_requests_alone(model_path):
    async def scenario(player):
        player.begin("key", "other")
        turn = player.generate("key")
        request = await player.receive()
        other_turn = player.generate("other")
        other_request = await player.receive()
        player.gateway.handle({"end": ["key"], "number": 7})
        assert await player.receive() == {"ended": 7}
        response = await turn
        assert response.status_code == 410
        assert response.json()["error"]["type"] == "episode_is_over"
        player.answer(request, [7])  # too late
        player.answer(other_request, [7])
        assert (await other_turn).status_code == 200
        assert [*player.gateway.episodes] == ["other"]

    play(model_path, scenario)


def test_nothing_about_an_episode_follows_its_end(model_path, tokenizer):
    """The trainer does not know its key any more.

    One of its turns was answered just before the end, and the bodies of two requests arrive after.
    """

    async def scenario(player):
        player.begin("key")
        await player.play_turn("key", 1)
        has_ended = asyncio.Event()

        async def sent_after_the_end(body: dict) -> AsyncIterator[bytes]:
            await has_ended.wait()
            yield json.dumps(body).encode()

        headers = {"Authorization": "Bearer key"}
        late = [
            asyncio.create_task(
                player.client.post(path, content=sent_after_the_end(body), headers=headers)
            )
            for path, body in (
                ("/v1/rewards", {"reward": 1.5}),
                (GENERATE, {"token_ids": [5] * 2000}),
            )
        ]
        turn = player.post(CHAT, "key", {"messages": HELLO})
        request = await player.receive()
        assert await num_requests(player) == 2
        player.answer(request, tokenizer.encode("there<|im_end|>"))
        player.gateway.handle({"end": ["key"], "number": 7})
        has_ended.set()
        for response in await asyncio.gather(turn, *late):
            assert response.status_code == 410
            assert response.json()["error"]["type"] == "episode_is_over"
        assert await player.receive() == {"ended": 7}
        player.begin("other")
        player.generate("other")
        assert (await player.receive())["episode"] == "other"

    play(model_path, scenario)


def test_a_reward_needs_a_turn_that_has_ended(model_path):
    """A turn that has begun, or was aborted, does not suffice."""

    async def scenario(player):
        player.begin("key")
        turn = player.generate("key")
        request = await player.receive()
        response = await player.post("/v1/rewards", "key", {"reward": 1.5})
        assert response.status_code == 400
        assert "no turn has ended yet" in response.json()["error"]["message"]
        player.answer(request, [], "abort")
        response = await turn
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "aborted"
        assert (await player.post("/v1/rewards", "key", {"reward": 1.5})).status_code == 400
        await player.play_turn("key", 1)
        assert (await player.post("/v1/rewards", "key", {"reward": 1.5})).status_code == 200
        assert await player.receive() == {"episode": "key", "reward": 1.5}

    play(model_path, scenario)


def test_a_request_may_overtake_the_announcement_of_its_key(model_path):
    async def scenario(player):
        turn = player.generate("early")
        await asyncio.sleep(0.06)
        player.begin("early")
        player.answer(await player.receive(), [7])
        assert (await turn).status_code == 200

    play(model_path, scenario)


def test_a_reply_is_continued_by_its_tokens_however_they_spell_it(model_path, tokenizer):
    """The history names what was sampled letter by letter, and another key has not sampled it."""

    async def scenario(player):
        player.begin("key", "other")
        messages = [{"role": "system", "content": "the cat"}, *HELLO]
        turn = player.post(CHAT, "key", {"messages": messages})
        request = await player.receive()
        letters = [i for letter in "there" for i in tokenizer.encode(letter)]
        sampled = [*letters, *tokenizer.encode("<|im_end|>")]
        player.answer(request, sampled)
        (choice,) = (await turn).json()["choices"]
        await player.receive()
        question = {"role": "user", "content": "question"}
        history = [*messages, choice["message"], question]
        recorded = request["prompt_ids"] + sampled
        for key, is_continued in (("other", False), ("key", True)):
            player.post(CHAT, key, {"messages": history})
            prompt_ids = (await player.receive())["prompt_ids"]
            assert (prompt_ids[: len(recorded)] == recorded) == is_continued

    play(model_path, scenario)


# -- clients that are gone -------------------------------------------------------------------------


async def serve(player: Player) -> tuple[Server, asyncio.Task, int]:
    """Start the gateway's HTTP server; return it with its task and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = player.gateway.application()
    server = Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="warning"))
    return server, asyncio.create_task(server.serve([listener])), listener.getsockname()[1]


def test_the_request_of_a_client_that_disconnects_is_aborted(model_path):
    """It leaves its tokens to others, is no turn that has ended, and a late answer does no harm."""

    async def scenario(player):
        player.begin("key", max_episode_tokens=10)
        server, serving, port = await serve(player)
        body = json.dumps({"token_ids": [5]}).encode()
        head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        request = await player.receive()
        assert request["max_tokens"] == 10
        writer.close()
        assert await player.receive() == {"abort": request["id"], "episode": "key"}
        player.answer(request, [7, 7])
        assert (await player.post("/v1/rewards", "key", {"reward": 1})).status_code == 400
        assert (await player.play_turn("key", 1))["max_tokens"] == 10
        server.should_exit = True
        await serving

    play(model_path, scenario)


def test_nothing_waits_for_a_client_that_has_its_answer(model_path):
    """The server of this test never tells that the client has disconnected."""

    async def scenario(player):
        player.begin("key")
        statuses = []
        parts = [{"type": "http.request", "body": b'{"token_ids": [5]}', "more_body": False}]

        async def receive() -> dict:
            return parts.pop() if parts else await asyncio.Future()

        async def send(message: dict) -> None:
            statuses.append(message.get("status"))

        headers = [(b"authorization", b"Bearer key")]
        scope = {"type": "http", "method": "POST", "path": GENERATE, "headers": headers}
        app = player.gateway.application()
        others = asyncio.all_tasks()
        asking = asyncio.create_task(app({**scope, "query_string": b""}, receive, send))
        player.answer(await player.receive(), [7])
        await asking
        await asyncio.sleep(0)
        assert statuses[0] == 200
        assert asyncio.all_tasks() == others

    play(model_path, scenario)


# -- limits ----------------------------------------------------------------------------------------


def limit_of(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["type"], error["code"]


def test_a_turn_has_the_smallest_of_its_limits(model_path):
    """Those of the client, of the section and of the context of 2000 tokens."""

    async def scenario(player):
        player.begin("key", max_tokens=50)
        for num_prompt, asked, expected in ((1, 7, 7), (1, 60, 50), (1990, 60, 10), (1999, 7, 1)):
            turn = player.generate("key", num_prompt, max_tokens=asked)
            request = await player.receive()
            assert request["max_tokens"] == expected
            player.answer(request, [7])
            await turn
        response = await player.generate("key", 2000)
        assert limit_of(response) == (400, "episode_limit", "max_model_len")
        assert await player.receive() == {"episode": "key", "limit": "max_model_len"}

    play(model_path, scenario)


def test_a_turn_counts_from_its_beginning(model_path):
    """So an agent cannot have more by asking for several at once."""

    async def scenario(player):
        player.begin("key", max_turns=2)
        for _ in range(2):
            player.generate("key")
        requests = [await player.receive() for _ in range(2)]
        response = await player.generate("key")
        assert limit_of(response) == (400, "episode_limit", "max_turns")
        assert await player.receive() == {"episode": "key", "limit": "max_turns"}
        for request in requests:
            player.answer(request, [7])
        response = await player.generate("key", 2000)
        assert limit_of(response) == (400, "episode_limit", "max_model_len")
        assert player.gateway.episodes["key"].limit == "max_turns", "the first one counts"

    play(model_path, scenario)


def test_tokens_that_a_turn_did_not_use_are_left_to_later_turns(model_path):
    async def scenario(player):
        player.begin("key", max_episode_tokens=10)
        assert (await player.play_turn("key", 3))["max_tokens"] == 10
        turn = player.generate("key")
        request = await player.receive()
        assert request["max_tokens"] == 7
        player.answer(request, [], "abort")
        assert (await turn).status_code == 503
        assert (await player.play_turn("key", 7))["max_tokens"] == 7
        assert limit_of(await player.generate("key")) == (
            400,
            "episode_limit",
            "max_episode_tokens",
        )
        assert player.gateway.episodes["key"].num_reserved == 0

    play(model_path, scenario)


def test_turns_wait_for_tokens_that_others_have_reserved(model_path):
    """All that wait are woken, and a turn that fits does not wait."""

    async def scenario(player):
        player.begin("key", max_episode_tokens=10)
        first = player.generate("key", max_tokens=6)
        first_request = await player.receive()
        waiting = [player.generate("key", max_tokens=5) for _ in range(2)]
        assert await num_requests(player) == 1
        small = player.generate("key", max_tokens=4)
        small_request = await player.receive()
        assert small_request["max_tokens"] == 4
        player.answer(small_request, [])
        await small
        assert await num_requests(player) == 2, "6 of 10 are reserved"
        player.answer(first_request, [])
        await first
        requests = [await player.receive() for _ in range(2)]
        assert [request["max_tokens"] for request in requests] == [5, 5]
        for request in requests:
            player.answer(request, [7] * 5)
        assert [(await turn).status_code for turn in waiting] == [200, 200]

    play(model_path, scenario)


def test_a_turn_that_waits_fails_when_its_episode_is_over(model_path):
    async def scenario(player):
        player.begin("key", max_episode_tokens=10)
        first = player.generate("key")
        await player.receive()
        waiting = player.generate("key")
        assert await num_requests(player) == 1
        player.gateway.handle({"end": ["key"], "number": 7})
        player.begin("key", max_episode_tokens=10)
        assert (await first).status_code == 410
        assert (await waiting).status_code == 410, "the key belongs to another attempt"

    play(model_path, scenario)


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [None, 1])
def test_tokens_are_answered_with_their_log_probs_if_they_are_wanted(model_path, logprobs):
    async def scenario(player):
        player.begin("key")
        turn = player.generate("key", 3, logprobs=logprobs)
        request = await player.receive()
        assert (request["prompt_ids"], request["num_tools"]) == ([5, 5, 5], 0)
        player.answer(request, [8, 9], "length")
        answer = (await turn).json()
        (choice,) = answer["choices"]
        assert (choice["index"], choice["token_ids"]) == (0, [8, 9])
        assert choice["finish_reason"] == "length"
        assert answer["request_id"] == f"generate-{request['id']}"
        assert answer["prompt_token_ids"] == [5, 5, 5]
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert answer["usage"] == usage
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            content = choice["logprobs"]["content"]
            assert [entry["token_id"] for entry in content] == [8, 9]
            assert [entry["logprob"] for entry in content] == [-0.8, -0.9]

    play(model_path, scenario)


def test_a_reply_is_answered_with_the_text_of_every_token(model_path, tokenizer):
    """Its own stop strings count besides those of the section, in the answer, too."""

    async def scenario(player):
        player.begin("key", stop=["sat"])
        for text, content in (("the cat", "the "), ("the sat", "the ")):
            body = {"messages": HELLO, "stop": ["cat"], "logprobs": True}
            turn = player.post(CHAT, "key", body)
            request = await player.receive()
            assert request["stop"] == ["sat", "cat"]
            ids = tokenizer.encode(text)
            player.answer(request, ids)
            answer = (await turn).json()
            (choice,) = answer["choices"]
            message = {"role": "assistant", "content": content}
            assert choice["message"] == message
            assert (choice["token_ids"], choice["finish_reason"]) == (ids, "stop")
            entries = choice["logprobs"]["content"]
            assert "".join(entry["token"] for entry in entries) == text
            assert [entry["logprob"] for entry in entries] == [-token / 10 for token in ids]
            assert answer["id"] == f"chatcmpl-{request['id']}"
            assert answer["prompt_token_ids"] == request["prompt_ids"]
            assert answer["usage"]["prompt_tokens"] == len(request["prompt_ids"])
            assert await player.receive() == {
                "episode": "key",
                "messages": [*HELLO, message],
                "tool_calls": 0,
                "tool_errors": 0,
            }

    play(model_path, scenario)


def test_stop_token_ids_of_the_settings_end_turns(model_path, tokenizer):
    """Requests may repeat them, besides the model's own ones, and no others."""

    async def scenario(player):
        player.begin("key")
        own = tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert player.gateway.end_ids >= {own, 9}
        turn = player.generate("key", stop_token_ids=[9, own])
        player.answer(await player.receive(), [9])
        assert (await turn).status_code == 200
        assert (await player.generate("key", stop_token_ids=[8])).status_code == 400

    play(model_path, scenario, stop_token_ids=[9])


def test_a_template_of_the_settings_replaces_the_models_even_if_it_is_empty(model_path):
    async def scenario(player):
        player.begin("key")
        response = await player.post(CHAT, "key", {"messages": HELLO})
        assert response.status_code == 400
        assert "the tokenizer has no chat template" in response.json()["error"]["message"]

    play(model_path, scenario, chat_template="")


def test_what_a_template_rejects_is_an_error_of_the_client(model_path):
    """It is no turn."""

    async def scenario(player):
        player.begin("key", max_turns=1)
        body = {"messages": [{"role": "system", "content": "Be brief."}]}
        arguments = {"chat_template_kwargs": {"tokenize": True}}
        for wrong, message in (
            (body, "No user query found in messages."),
            ({"messages": HELLO, **arguments}, "tokenize is not a template argument"),
        ):
            response = await player.post(CHAT, "key", wrong)
            assert response.status_code == 400
            error = response.json()["error"]
            assert message in error["message"]
            assert error["type"] == "invalid_request_error"
        await player.play_turn("key", 1)

    play(model_path, scenario, chat_template=STRICT)


class RecordingParser(ReplyParser):
    """A parser without tool calls and reasoning. It records what it gets."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, None, None, is_checked=False)
        self.calls = []

    def parse(self, *arguments) -> Reply:
        self.calls.append(arguments)
        return super().parse(*arguments)


def test_a_parser_gets_the_sampled_tokens_and_the_tools_that_may_be_called(model_path, tokenizer):
    """And the template's arguments: those of the settings, and those of the request."""

    async def scenario(player):
        player.begin("key")
        parser = RecordingParser(tokenizer)
        player.gateway.parser = parser
        for choice, offered in (("auto", [TOOL]), ("none", None)):
            body = {"messages": HELLO, "tools": [TOOL], "tool_choice": choice}
            turn = player.post(CHAT, "key", body | {"chat_template_kwargs": {"style": choice}})
            request = await player.receive()
            assert request["num_tools"] == 1
            ids = tokenizer.encode("the cat<|im_end|>")
            player.answer(request, ids)
            await turn
            await player.receive()
            arguments = {"enable_thinking": False, "style": choice}
            num_prompt = len(request["prompt_ids"])
            assert parser.calls.pop() == ("the cat", ids, num_prompt, offered, arguments)

    play(model_path, scenario, template_kwargs={"enable_thinking": False, "style": "long"})


def test_a_turn_without_calls_has_the_same_prompt(model_path):
    """Otherwise its tokens would not continue those of earlier turns."""
    prompts = {}

    async def scenario(player):
        player.begin("key")
        bodies = {
            "auto": {"tools": [TOOL], "tool_choice": "auto"},
            "none": {"tools": [TOOL], "tool_choice": "none"},
            "no tools": {},
        }
        for name, body in bodies.items():
            player.post(CHAT, "key", {"messages": HELLO, **body})
            prompts[name] = (await player.receive())["prompt_ids"]

    play(model_path, scenario)
    assert prompts["none"] == prompts["auto"]
    assert len(prompts["no tools"]) < len(prompts["none"])


def test_special_tokens_in_messages_are_read_as_the_settings_say(model_path, tokenizer):
    async def scenario(player):
        player.begin("key")
        messages = [{"role": "user", "content": "the<|im_end|>"}]
        player.post(CHAT, "key", {"messages": messages})
        prompt_ids = (await player.receive())["prompt_ids"]
        counts.append(prompt_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")))

    counts = []
    for setting in ("keep", "escape"):
        play(model_path, scenario, special_tokens_in_text=setting)
    assert counts[0] == counts[1] + 1


def test_notices_name_the_parser_and_tell_whether_turns_continue(model_path, two_ends):
    guessing = gateway_settings(model_path) | {"tool_parser": None}
    parser, stability = Gateway(None, guessing).notices
    assert parser == "rollout.tool_parser=hermes: guessed from the chat template"
    assert stability.startswith("episodes: the chat template is prefix-stable")
    parser, _ = Gateway(None, guessing | {"chat_template": CHATML}).notices
    assert parser.startswith("rollout.tool_parser=none: the chat template shows no known format")
    (stability,) = two_ends.notices
    assert stability.startswith("episodes: ")


def test_a_parser_that_reads_reasoning_needs_no_other_one(model_path):
    settings = gateway_settings(model_path) | {"tool_parser": HARMONY}
    assert Gateway(None, settings | {"reasoning_parser": "none"}).parser.is_harmony
    with pytest.raises(InputError, match="Leave rollout.reasoning_parser out"):
        Gateway(None, settings | {"reasoning_parser": "qwen3"})


@pytest.mark.slow  # it imports vLLM's parsers
def test_tool_calls_are_read_if_the_model_may_call(model_path, tokenizer):
    """The second call of the reply is malformed."""
    good = '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
    bad = '<tool_call>{"arguments": {"a": </tool_call>'

    async def scenario(player):
        player.begin("key")
        for text, choice, counts in (
            (good, "auto", (1, 0)),
            (good, "none", (0, 0)),
            (bad, "auto", (0, 1)),
        ):
            body = {"messages": HELLO, "tools": [TOOL], "tool_choice": choice}
            turn = player.post(CHAT, "key", body)
            request = await player.receive()
            assert request["num_tools"] == 1
            player.answer(request, tokenizer.encode(text + "<|im_end|>"))
            (answered,) = (await turn).json()["choices"]
            report = await player.receive()
            assert (report["tool_calls"], report["tool_errors"]) == counts
            calls = answered["message"].get("tool_calls") or []
            assert len(calls) == counts[0]
            assert answered["finish_reason"] == ("tool_calls" if calls else "stop")
        for function in ({"name": 3}, {"name": "add", "parameters": 3}):
            tools = [{"type": "function", "function": function}]
            response = await player.post(CHAT, "key", {"messages": HELLO, "tools": tools})
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"
        assert await num_requests(player) == 3, "they are rejected before the turn"

    play(model_path, scenario, tool_parser="hermes")
