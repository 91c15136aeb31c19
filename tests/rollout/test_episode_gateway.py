"""The gateway as a process: HTTP on one side, the trainer's socket on the other."""

import os
import signal
import socket
import time
from concurrent.futures import Future, wait

import httpx
import pytest

from rollout.episodes.server import GatewayServer
from tests.data.chat_templates import CHATML
from tests.rollout.episode_gateway import (
    CHAT,
    GENERATE,
    HELLO,
    SAMPLING,
    SECONDS,
    TOOL,
    VOCAB_SIZE,
    GatewayProcess,
    gateway_settings,
    save_tokenizer,
)

# They start the gateway, or read its tokenizer and template.
pytestmark = pytest.mark.slow

NEXT = {"role": "user", "content": "question"}


@pytest.fixture(scope="module")
def process(model_path):
    started = GatewayProcess(model_path)
    yield started
    assert started.close() == 0


@pytest.fixture
def gateway(process):
    process.begin("key")
    return process


@pytest.fixture(scope="module")
def guessing(model_path):
    """A gateway that guesses the tool parser from the chat template."""
    started = GatewayProcess(model_path, tool_parser=None)
    yield started
    started.close()


def generate(gateway, max_tokens: int) -> Future:
    """Post a request that continues a token, in another thread."""
    body = {"token_ids": [5], "sampling_params": {"max_tokens": max_tokens}}
    return gateway.threads.submit(gateway.post, GENERATE, "key", body)


def announce(gateway, *keys: str) -> None:
    """Announce keys during a draw."""
    limits = {"max_turns": None, "max_episode_tokens": None}
    sampling = SAMPLING | {"max_tokens": 9}
    gateway.send({"begin": keys, "sampling": sampling, "section": "validation", **limits})


def play(gateway, tokenizer, key: str, messages: list[dict], text: str, **fields):
    """Play a turn, and return the messages with the reply, the request and the answer."""
    future = gateway.chat(key, messages, **fields)
    request = gateway.receive()
    gateway.answer(request, tokenizer.encode(text))
    answer = future.result().json()
    report = gateway.receive()
    assert report["episode"] == key
    return [*messages, answer["choices"][0]["message"]], request, answer


def test_turns(gateway, tokenizer):
    """Two turns: the request's ids, the answer's fields, the report, and the recorded ids."""
    messages, request, answer = play(
        gateway, tokenizer, "key", HELLO, "there<|im_end|>", logprobs=True, max_tokens=7
    )
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert request == {
        "id": request["id"],
        "episode": "key",
        "prompt_ids": prompt_ids,
        "max_tokens": 7,
        "stop": [],
        "num_tools": 0,
    }
    reply_ids = tokenizer.encode("there<|im_end|>")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "there"}
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == reply_ids
    assert answer["prompt_token_ids"] == prompt_ids
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * len(reply_ids)
    num_prompt = len(prompt_ids)
    num_sampled = len(reply_ids)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    future = gateway.chat("key", [*messages, NEXT])
    request = gateway.receive()
    assert request["prompt_ids"][: num_prompt + num_sampled] == prompt_ids + reply_ids
    gateway.answer(request, reply_ids)
    assert future.result().status_code == 200
    assert gateway.receive() == {
        "episode": "key",
        "messages": [*messages, NEXT, {"role": "assistant", "content": "there"}],
        "tool_calls": 0,
        "tool_errors": 0,
    }


def test_two_episodes(gateway, tokenizer):
    """Answers that arrive in another order, and a conversation of another episode."""
    gateway.begin("one", "two")
    first = gateway.chat("one", HELLO)
    request_1 = gateway.receive()
    second = gateway.chat("two", HELLO)
    request_2 = gateway.receive()
    assert (request_1["episode"], request_2["episode"]) == ("one", "two")
    split = [i for letter in "there" for i in tokenizer.encode(letter)]
    gateway.answer(request_2, [*split, 1])
    gateway.answer(request_1, tokenizer.encode("the cat<|im_end|>"))
    assert second.result().json()["choices"][0]["message"]["content"] == "there"
    assert first.result().json()["choices"][0]["message"]["content"] == "the cat"
    for _ in range(2):
        gateway.receive()
    # The second episode has sampled this reply letter by letter, the first one has not.
    history = [*HELLO, {"role": "assistant", "content": "there"}, NEXT]
    recorded = [*request_2["prompt_ids"], *split, 1]
    for key, is_continued in (("one", False), ("two", True)):
        gateway.chat(key, history)
        prompt_ids = gateway.receive()["prompt_ids"]
        assert (prompt_ids[: len(recorded)] == recorded) == is_continued


def test_keys_that_join_a_draw(gateway, tokenizer):
    """More keys may be announced during a draw; the earlier ones keep their conversations."""
    future = gateway.chat("key", HELLO)
    request = gateway.receive()
    sampled = [i for letter in "there" for i in tokenizer.encode(letter)] + [1]
    gateway.answer(request, sampled)
    messages = [*HELLO, future.result().json()["choices"][0]["message"], NEXT]
    gateway.receive()
    announce(gateway, "key", "late")
    play(gateway, tokenizer, "late", HELLO, "there<|im_end|>")
    recorded = request["prompt_ids"] + sampled
    _, request, _ = play(gateway, tokenizer, "key", messages, "there<|im_end|>")
    assert request["prompt_ids"][: len(recorded)] == recorded
    assert request["max_tokens"] == 9


def test_request_before_its_key(gateway):
    """A request that overtakes the announcement of its key waits for it."""
    gateway.chat("early", HELLO)
    time.sleep(0.1)
    announce(gateway, "early")
    assert gateway.receive()["episode"] == "early"


def test_unknown_key(gateway):
    for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic key"}):
        response = gateway.client.post(CHAT, json={"messages": HELLO}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_end_of_an_episode(gateway):
    """Its open requests fail, and its key is forgotten. Other episodes go on."""
    announce(gateway, "other")
    open_request = gateway.chat("key", HELLO)
    gateway.receive()
    other_request = gateway.chat("other", HELLO)
    request = gateway.receive()
    gateway.end("key")
    assert open_request.result().status_code == 410
    assert gateway.post(CHAT, "key", {"messages": HELLO}).status_code == 401
    gateway.answer(request, [5])
    assert other_request.result().status_code == 200
    assert gateway.receive()["episode"] == "other"
    gateway.end("other")


def test_episodes_with_different_terms(gateway):
    """Those of a validation are played while others wait for the trainer."""
    gateway.begin("key", max_turns=1)
    announce(gateway, "validation")
    open_request = gateway.chat("key", HELLO)
    request = gateway.receive()
    assert request["max_tokens"] == SAMPLING["max_tokens"]
    for _ in range(2):
        answer = gateway.chat("validation", HELLO)
        validation_request = gateway.receive()
        assert validation_request["max_tokens"] == 9
        gateway.answer(validation_request, [5])
        assert answer.result().status_code == 200
        assert gateway.receive()["episode"] == "validation"
    gateway.end("validation")
    gateway.answer(request, [5])
    assert open_request.result().status_code == 200
    assert gateway.receive()["episode"] == "key"
    assert limit_code(gateway.post(CHAT, "key", {"messages": HELLO})) == "max_turns"
    assert gateway.receive() == {"episode": "key", "limit": "max_turns"}


def limit_code(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "episode_limit")
    code = error["code"]
    assert error["message"].endswith(f"(episode_limit: {code})")
    return code


def test_max_turns(gateway, tokenizer):
    gateway.begin("key", "other", max_turns=1)
    messages, _, _ = play(gateway, tokenizer, "key", HELLO, "there<|im_end|>")
    for _ in range(2):
        response = gateway.post(CHAT, "key", {"messages": [*messages, NEXT]})
        assert limit_code(response) == "max_turns"
    # The trainer hears of it once, before the other episode's request.
    assert gateway.receive() == {"episode": "key", "limit": "max_turns"}
    play(gateway, tokenizer, "other", HELLO, "there<|im_end|>")


def test_max_episode_tokens(gateway, tokenizer):
    """Turns are shortened to the tokens that are left; the call after them raises."""
    gateway.begin("key", max_episode_tokens=10)
    reply = tokenizer.encode("the cat<|im_end|>")
    messages, request, _ = play(gateway, tokenizer, "key", HELLO, "the cat<|im_end|>")
    assert request["max_tokens"] == 10
    left = 10 - len(reply)
    future = gateway.chat("key", [*messages, NEXT])
    request = gateway.receive()
    assert request["max_tokens"] == left
    gateway.answer(request, [5] * left, "length")
    assert future.result().json()["choices"][0]["finish_reason"] == "length"
    gateway.receive()
    assert limit_code(gateway.post(CHAT, "key", {"messages": HELLO})) == "max_episode_tokens"
    assert gateway.receive() == {"episode": "key", "limit": "max_episode_tokens"}


def test_errors_about_sampling_name_the_section_of_the_draw(gateway):
    gateway.end("key")
    announce(gateway, "key")
    response = gateway.post(CHAT, "key", {"messages": HELLO, "temperature": 0.5})
    assert "differs from validation.temperature=1.0" in response.json()["error"]["message"]


def test_turns_at_the_same_time_share_the_tokens_of_an_episode(gateway):
    """A turn waits while others could use up its tokens, and gets what they leave."""
    gateway.begin("key", max_episode_tokens=10)
    first = generate(gateway, 6)
    first_request = gateway.receive()
    assert first_request["max_tokens"] == 6
    small = generate(gateway, 3)
    small_request = gateway.receive()
    assert small_request["max_tokens"] == 3
    large = generate(gateway, 5)
    gateway.answer(small_request, [7])
    assert small.result().status_code == 200
    assert not large.done()
    # 10 - 1 - 2 tokens are left: more than the 5 that it wants.
    gateway.answer(first_request, [7] * 2)
    assert first.result().status_code == 200
    large_request = gateway.receive()
    assert large_request["max_tokens"] == 5
    gateway.answer(large_request, [7] * 5, "length")
    assert large.result().status_code == 200
    last = generate(gateway, 5)
    last_request = gateway.receive()
    assert last_request["max_tokens"] == 2
    gateway.answer(last_request, [7] * 2, "length")
    assert last.result().status_code == 200
    response = generate(gateway, 1).result()
    assert limit_code(response) == "max_episode_tokens"


def test_a_turn_that_waits_for_tokens_ends_with_the_draw(gateway):
    gateway.begin("key", max_episode_tokens=10)
    first = generate(gateway, 10)
    gateway.receive()
    waiting = generate(gateway, 10)
    wait([waiting], timeout=0.5)
    gateway.end("key")
    assert first.result().status_code == 410
    assert waiting.result().status_code == 410


def test_tokens_without_a_name_of_the_tokenizer_may_be_in_a_prompt(gateway):
    """Models often have a few more tokens than their tokenizer. They sample them, if rarely."""
    token_ids = [5, VOCAB_SIZE - 1]
    future = gateway.threads.submit(gateway.post, GENERATE, "key", {"token_ids": token_ids})
    request = gateway.receive()
    assert request["prompt_ids"] == token_ids
    gateway.answer(request, [7])
    assert future.result().status_code == 200
    response = gateway.post(GENERATE, "key", {"token_ids": [VOCAB_SIZE]})
    assert response.status_code == 400
    assert f"from 0 to {VOCAB_SIZE - 1}" in response.text


def test_context_length(gateway):
    """The context limits a turn; a prompt that fills it is a limit of the episode."""
    future = gateway.threads.submit(gateway.post, GENERATE, "key", {"token_ids": [5] * 1995})
    request = gateway.receive()
    assert request["max_tokens"] == 5
    gateway.answer(request, [7] * 5, "length")
    assert future.result().status_code == 200
    response = gateway.post(GENERATE, "key", {"token_ids": [5] * 2000})
    assert limit_code(response) == "max_model_len"
    assert "maximum context length is 2000" in response.json()["error"]["message"]
    assert gateway.receive() == {"episode": "key", "limit": "max_model_len"}


def test_generate(gateway):
    body = {
        "token_ids": [3, 4],
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "temperature": 1.0, "stop": ["x"]},
    }
    future = gateway.threads.submit(gateway.post, GENERATE, "key", body)
    request = gateway.receive()
    assert request["prompt_ids"] == [3, 4]
    assert request["max_tokens"] == 4
    assert request["stop"] == ["x"]
    gateway.answer(request, [8, 9], "length")
    choice = future.result().json()["choices"][0]
    assert choice["token_ids"] == [8, 9]
    assert choice["finish_reason"] == "length"
    contents = choice["logprobs"]["content"]
    assert [(entry["token_id"], entry["logprob"]) for entry in contents] == [(8, -0.5), (9, -0.5)]
    assert [entry["token"] for entry in contents] == ["token_id:8", "token_id:9"]


def test_stop_tokens_may_be_those_that_end_turns_anyway(gateway, tokenizer):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for stop_token_ids in ([end], [], None):
        body = {"token_ids": [3, 4], "sampling_params": {"stop_token_ids": stop_token_ids}}
        future = gateway.threads.submit(gateway.post, GENERATE, "key", body)
        gateway.answer(gateway.receive(), [8, end])
        assert future.result().json()["choices"][0]["token_ids"] == [8, end]
    for stop_token_ids in ([end, 8], "x"):
        body = {"token_ids": [3, 4], "sampling_params": {"stop_token_ids": stop_token_ids}}
        response = gateway.post(GENERATE, "key", body)
        assert response.status_code == 400
        assert f"turns end with the tokens [{end}, " in response.json()["error"]["message"]


def test_fields_that_do_not_change_tokens_are_accepted(gateway):
    """The client of verifiers sends them: one for caches, one for the experts of MoE models."""
    body = {
        "token_ids": [3, 4],
        "sampling_params": {"routed_experts_prompt_start": 1},
        "cache_salt": "salt",
    }
    future = gateway.threads.submit(gateway.post, GENERATE, "key", body)
    gateway.answer(gateway.receive(), [8])
    assert future.result().status_code == 200


def test_rewards(gateway, tokenizer):
    response = gateway.post("/v1/rewards", "key", {"reward": 1})
    assert "no turn has ended yet" in response.json()["error"]["message"]
    play(gateway, tokenizer, "key", HELLO, "there<|im_end|>")
    assert gateway.post("/v1/rewards", "key", {"reward": 0.25}).json() == {}
    assert gateway.receive() == {"episode": "key", "reward": 0.25}
    for wrong in ('"1"', "null", "true", "Infinity", "NaN"):
        response = gateway.client.post(
            "/v1/rewards",
            content=f'{{"reward": {wrong}}}',
            headers={"Authorization": "Bearer key"},
        )
        assert response.status_code == 400
        assert "must be a finite number" in response.json()["error"]["message"]


def test_models(gateway):
    response = gateway.client.get("/v1/models", headers={"Authorization": "Bearer key"})
    assert [model["id"] for model in response.json()["data"]] == ["policy"]


WRONG = [
    ({"temperature": 0.7}, "set rollout.temperature=0.7"),
    ({"top_p": 0.9}, "differs from rollout.top_p=1.0"),
    ({"top_k": 20}, "differs from rollout.top_k=-1"),
    ({"min_p": "0"}, "differs from rollout.min_p=0.0"),
    ({"n": 2}, "n=2 is not supported: send n requests"),
    ({"stream": True}, "set stream=false"),
    ({"seed": 5}, "trainer.seed"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_json": {}}, "guided_json={} is not supported"),
    ({"presence_penalty": 1}, "presence_penalty"),
    ({"reasoning_effort": "low"}, "chat_template_kwargs"),
    ({"max_tokens": 0}, "max_tokens=0 must be a positive integer"),
    ({"stop": [""]}, "stop=[''] must be"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice='required'"),
    ({"tool_choice": "required"}, "tool_choice='required'"),
    ({"tools": [{"name": "add"}]}, '"tools[0]" must be'),
    ({"chat_template_kwargs": {"tokenize": True}}, "tokenize is not a template argument"),
    ({"chat_template_kwargs": [1]}, "must be an object"),
    ({"messages": []}, '"messages" must be a list'),
    ({"messages": [{"role": "poet", "content": "x"}]}, "\"messages[0].role\" is 'poet'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "is of the type 'image_url': messages of episodes may contain only texts",
    ),
]


@pytest.mark.parametrize("fields, message", WRONG)
def test_wrong_fields(gateway, fields, message):
    """A field that is wrong or not supported is an error, and no turn begins."""
    gateway.begin("key", max_turns=1)
    response = gateway.post(CHAT, "key", {"messages": HELLO, **fields})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    gateway.chat("key", HELLO)
    assert gateway.receive()["episode"] == "key"


ACCEPTED = {
    "model": "any",
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "n": 1,
    "stream": False,
    "temperature": 1,
    "top_p": 1.0,
    "top_k": 0,
    "frequency_penalty": 0.0,
    "response_format": {"type": "text"},
    "seed": None,
    "tool_choice": "auto",
    "stop": "x",
    "max_completion_tokens": 3,
}


def test_accepted_fields(gateway):
    gateway.begin("key", stop=["y"])
    gateway.chat("key", HELLO, **ACCEPTED)
    request = gateway.receive()
    assert request["max_tokens"] == 3
    assert request["stop"] == ["y", "x"]


def test_greedy_draw(gateway):
    """With temperature 0, the other numbers have no effect."""
    gateway.begin("key", temperature=0.0)
    gateway.chat("key", HELLO, temperature=0, top_p=0.9)
    assert gateway.receive()["episode"] == "key"
    assert gateway.post(CHAT, "key", {"messages": HELLO, "temperature": 1}).status_code == 400


def test_not_json(gateway):
    headers = {"Authorization": "Bearer key"}
    for content in ("{", "[1]"):
        response = gateway.client.post(CHAT, content=content, headers=headers)
        assert response.status_code == 400


def test_stop_string(gateway, tokenizer):
    """The content ends before the stop string; the recorded ids include it."""
    future = gateway.chat("key", HELLO, stop=["cat"])
    request = gateway.receive()
    sampled = tokenizer.encode("the cat")
    gateway.answer(request, sampled)
    message = future.result().json()["choices"][0]["message"]
    assert message["content"] == "the "
    gateway.receive()
    gateway.chat("key", [*HELLO, message, NEXT])
    recorded = request["prompt_ids"] + sampled
    assert gateway.receive()["prompt_ids"][: len(recorded)] == recorded


def test_client_that_disconnects(gateway):
    """Its request is aborted, and a late answer does no harm."""
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", gateway.first["ready"]), SECONDS) as client:
        client.sendall(head.encode() + body)
        request = gateway.receive()
    assert gateway.receive() == {"abort": request["id"], "episode": "key"}
    gateway.answer(request, [5, 1])
    gateway.chat("key", HELLO)
    assert gateway.receive()["id"] == request["id"] + 1


def test_aborted_by_trainer(gateway):
    future = gateway.chat("key", HELLO)
    gateway.answer(gateway.receive(), [], "abort")
    assert future.result().status_code == 503


def test_signals_are_ignored(gateway, tokenizer):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        gateway.process.send_signal(number)
    play(gateway, tokenizer, "key", HELLO, "there<|im_end|>")


def test_wrong_model_path(tmp_path):
    process = GatewayProcess(tmp_path)
    assert "no tokenizer in model.path=" in process.first["error"]
    assert process.close() == 0


def test_other_template(model_path):
    """A template of the settings replaces the model's."""
    process = GatewayProcess(model_path, chat_template=CHATML)
    assert "without tools" in process.first["notices"][0]
    process.close()


def test_openai_client(guessing, tokenizer):
    """OpenAI's package plays an episode: a call of a tool, its result, an answer."""
    openai = pytest.importorskip("openai")
    guessing.begin("key", max_turns=2)
    client = openai.OpenAI(
        base_url=f"http://127.0.0.1:{guessing.first['ready']}/v1", api_key="key", max_retries=0
    )

    def chat(messages):
        return guessing.threads.submit(
            client.chat.completions.create, model="any", messages=messages, tools=[TOOL]
        )

    future = chat(HELLO)
    request = guessing.receive()
    assert request["num_tools"] == 1
    call = '<tool_call>{"arguments": {"a":1}, "name": "add"}</tool_call><|im_end|>'
    recorded = request["prompt_ids"] + tokenizer.encode(call)
    guessing.answer(request, tokenizer.encode(call))
    reply = future.result().choices[0]
    assert reply.finish_reason == "tool_calls"
    report = guessing.receive()
    assert (report["tool_calls"], report["tool_errors"]) == (1, 0)
    (tool_call,) = reply.message.tool_calls
    assert tool_call.function.name == "add"
    assert tool_call.function.arguments == '{"a": 1}'

    result = {"role": "tool", "tool_call_id": tool_call.id, "content": "1"}
    future = chat([*HELLO, reply.message, result])
    request = guessing.receive()
    assert request["prompt_ids"][: len(recorded)] == recorded
    guessing.answer(request, tokenizer.encode("there<|im_end|>"))
    answer = future.result()
    assert answer.choices[0].message.content == "there"
    assert answer.prompt_token_ids == request["prompt_ids"]
    guessing.receive()

    with pytest.raises(openai.BadRequestError, match="rollout.max_turns") as raised:
        client.chat.completions.create(model="any", messages=HELLO)
    assert raised.value.code == "max_turns"


def test_end_of_trainer(guessing):
    """The gateway ends with the trainer, even while a request is open."""
    assert guessing.first["notices"] == [
        "rollout.tool_parser=hermes: guessed from the chat template",
        "episodes: the chat template is prefix-stable: turns continue each other (with tools)",
    ]
    guessing.begin("key")
    guessing.chat("key", HELLO)
    guessing.receive()
    assert guessing.close() == 0


def test_unknown_tool_parser(model_path):
    process = GatewayProcess(model_path, tool_parser="hermis")
    assert "rollout.tool_parser=hermis" in process.first["error"]
    process.close()


def test_no_template(tmp_path):
    process = GatewayProcess(save_tokenizer(tmp_path / "model", None, "<|im_end|>"))
    process.begin("key")
    response = process.post(CHAT, "key", {"messages": HELLO})
    assert "data.chat_template" in response.json()["error"]["message"]
    process.close()


# -- the trainer's end ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(model_path):
    started = GatewayServer(gateway_settings(model_path))
    yield started
    started.close()


def receive_one(server: GatewayServer) -> dict:
    deadline = time.monotonic() + SECONDS
    messages: list[dict] = []
    while not messages:
        assert time.monotonic() < deadline
        messages = server.receive(0.1)
    (message,) = messages
    return message


def test_the_trainer_does_not_wait_for_the_gateway_to_read(server):
    """The sockets hold less than a megabyte; the rest arrives later."""
    os.kill(server.process.pid, signal.SIGSTOP)
    long_key = "k" * 2**16
    limits = {"max_turns": None, "max_episode_tokens": None}
    message = {"begin": [long_key], "sampling": SAMPLING, "section": "rollout", **limits}
    for _ in range(100):
        server.send(message)
    server.send({"end": [long_key], "number": 7})
    assert server.receive(0.01) == []
    os.kill(server.process.pid, signal.SIGCONT)
    assert receive_one(server) == {"ended": 7}


def test_the_trainer_learns_that_the_gateway_has_ended(server):
    server.process.kill()
    server.process.wait()
    server.send({"end": [], "number": 1})
    with pytest.raises(RuntimeError, match="the gateway of episodes ended by signal SIGKILL"):
        server.receive(1.0)
