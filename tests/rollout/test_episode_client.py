"""What an episode's function asks of the gateway, and what it reads in the answers."""

import asyncio
import json

import pytest

from rollout.episodes.client import LLM, EpisodeLimit, LLMError, read_error, read_tool_call
from rollout.episodes.posting import HTTPError
from tests.support.servers import with_server


def played(answer: dict, call):
    """Let `call` use a model whose server gives this answer; return its result and the request.

    The request is (path, API key, body).
    """
    requests = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["Content-Length"])))
        requests.append((lines[0].split()[1], headers["Authorization"], body))
        content = json.dumps(answer).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        writer.close()

    result = with_server(serve, lambda url: call(LLM(f"{url}/", "a key")))
    ((path, key, body),) = requests
    assert key == "Bearer a key"
    return result, path, body


def chat_answer(message: dict) -> dict:
    return {"choices": [{"message": message, "finish_reason": "stop", "token_ids": [7, 8]}]}


MESSAGES = [{"role": "user", "content": "hello"}]


def test_only_chosen_options_are_sent():
    answer = chat_answer({"role": "assistant", "content": "there"})
    _, path, body = played(answer, lambda llm: llm.chat(MESSAGES))
    assert (path, body) == ("/v1/chat/completions", {"messages": MESSAGES})
    options = {"tools": [], "max_tokens": 0, "stop": "x", "tool_choice": "none"}
    _, _, body = played(answer, lambda llm: llm.chat(MESSAGES, **options))
    assert body == {"messages": MESSAGES, **options}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_reply_has_its_text_reasoning_and_calls(name):
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, name: "hm", "tool_calls": [call, call]}
    reply, _, _ = played(chat_answer(message), lambda llm: llm.chat(MESSAGES))
    assert reply.message == message
    assert (reply.content, reply.reasoning) == ("", "hm")
    assert [(c.id, c.name, c.arguments) for c in reply.tool_calls] == [("c1", "add", {"a": 1})] * 2
    assert (reply.finish_reason, reply.token_ids) == ("stop", [7, 8])


@pytest.mark.parametrize("has_log_probs", [False, True])
def test_tokens_come_with_log_probs_if_the_server_sends_them(has_log_probs):
    content = [{"logprob": -0.5}, {"logprob": -1.5}]
    log_probs = {"content": content} if has_log_probs else None
    choice = {"token_ids": [7, 8], "logprobs": log_probs, "finish_reason": "length"}
    generation, path, body = played(
        {"choices": [choice]}, lambda llm: llm.generate([1, 2], max_tokens=5)
    )
    assert path == "/inference/v1/generate"
    assert body == {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}}
    assert (generation.token_ids, generation.finish_reason) == ([7, 8], "length")
    assert generation.log_probs == ([-0.5, -1.5] if has_log_probs else [])


@pytest.mark.parametrize("url", ["http://host:1/v1", "http://host:1/v1/", "http://host:1"])
def test_the_url_of_other_clients_ends_with_the_version(url):
    assert LLM(url, "key").base_url == "http://host:1/v1"


def test_a_reward_is_a_number():
    _, path, body = played({}, lambda llm: llm.reward("2"))
    assert (path, body) == ("/v1/rewards", {"reward": 2.0})


@pytest.mark.parametrize(
    "written, arguments", [('{"a": 1}', {"a": 1}), ('{"a": ', {}), ("[1]", {}), (None, {})]
)
def test_arguments_that_are_no_object_are_empty(written, arguments):
    """What the model wrote is kept."""
    call = read_tool_call({"function": {"name": "add", "arguments": written}})
    assert (call.id, call.name) == ("", "add")
    assert (call.arguments, call.raw_arguments) == (arguments, written or "")


def test_errors_are_told_apart_by_their_type():
    error = {"message": "two\n turns", "type": "episode_limit", "code": "max_turns"}
    limit = read_error(HTTPError(400, json.dumps({"error": error}).encode()))
    assert isinstance(limit, EpisodeLimit)
    assert (limit.code, str(limit)) == ("max_turns", "two turns")
    error["type"] = "invalid_request_error"
    rejected = read_error(HTTPError(410, json.dumps({"error": error}).encode()))
    assert isinstance(rejected, LLMError)
    assert (rejected.status, str(rejected)) == (410, "two turns")


def test_a_limit_without_a_message_is_named_by_its_code():
    assert str(EpisodeLimit("max_turns")) == "max_turns"


@pytest.mark.parametrize(
    "body, message",
    [
        (b"Bad\n Gateway", "Bad Gateway"),
        (b"", "HTTP status 502"),
        (b"[1]", "[1]"),
        (b'{"error": "no"}', '{"error": "no"}'),
        (b"\xff", "\ufffd"),
    ],
)
def test_errors_of_other_servers_are_passed_on(body, message):
    error = read_error(HTTPError(502, body))
    assert isinstance(error, LLMError)
    assert (error.status, str(error)) == (502, message)
