"""The trainer's end of the gateway, whose other end is a small program."""

import os
import signal
import subprocess
import time

import pytest

from config import InputError
from rollout.episodes.server import ROOT
from tests.rollout.small_gateway import start_gateway

SECONDS = 20


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts a gateway."""
    started = []

    def start(**options):
        started.append(start_gateway(tmp_path, monkeypatch, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def receive(server, num_messages: int) -> list[dict]:
    messages: list[dict] = []
    deadline = time.monotonic() + SECONDS
    while len(messages) < num_messages:
        assert time.monotonic() < deadline
        messages += server.receive(0.1)
    return messages


def test_a_gateway_is_a_session_with_the_modules_of_this_repository_first(start, monkeypatch):
    """A signal of the terminal must not reach it, and it needs no GPU."""
    monkeypatch.setenv("PYTHONPATH", "/a/b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    server = start()
    assert server.base_url == "http://127.0.0.1:1234/v1"
    assert server.notices == ["a notice"]
    server.send({"environment": True})
    (message,) = receive(server, 1)
    assert message["environment"]["PYTHONPATH"] == f"{ROOT}{os.pathsep}/a/b"
    assert message["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert message["session"] == server.process.pid
    assert message["arguments"][:3] == ["-P", "-m", "rollout.episodes.gateway"]


def test_a_gateway_that_is_busy_is_ended(start):
    server = start()
    server.send({"sleep": SECONDS})
    start_time = time.monotonic()
    server.close()
    assert server.process.poll() is not None
    assert time.monotonic() - start_time < SECONDS / 2


def test_a_gateway_that_does_not_start_is_an_error(start, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="^no tokenizer$"):
        start(first={"error": "no tokenizer"})
    with pytest.raises(RuntimeError, match="has not started within 0.1 s"):
        start(first=None, startup_seconds=0.1)


def test_messages_are_whole_whatever_arrives_at_once(start):
    server = start()
    server.send({"text": ['{"a": 1}\n{"b', '": 2', '}\n{"c": 3}\n{"d": ', "4}\n"]})
    assert receive(server, 4) == [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}]
    start_time = time.monotonic()
    assert server.receive(0.05) == []
    assert time.monotonic() - start_time >= 0.05


def test_a_message_that_the_gateway_does_not_read_yet_is_sent_later(start):
    """Neither sending nor receiving waits for it. Nothing is lost or sent twice."""
    server = start()
    os.kill(server.process.pid, signal.SIGSTOP)
    for number in range(20):
        server.send({"end": ["k" * 2**16], "number": number})
    assert server._unsent, "the sockets hold less"
    assert server.receive(0.0) == []
    os.kill(server.process.pid, signal.SIGCONT)
    assert [message["ended"] for message in receive(server, 20)] == [*range(20)]
    assert not server._unsent


def test_a_long_message_is_sent_while_its_answer_is_awaited(start):
    """The gateway cannot answer before it has the whole message."""
    server = start()
    os.kill(server.process.pid, signal.SIGSTOP)  # else it might read the whole message at once
    server.send({"end": ["k" * 2**22], "number": 1})
    assert server._unsent
    os.kill(server.process.pid, signal.SIGCONT)
    start_time = time.monotonic()
    messages = []
    while not messages:
        messages = server.receive(SECONDS / 4)
        assert time.monotonic() - start_time < SECONDS / 4
    assert messages[0]["ended"] == 1


def test_the_end_of_the_gateway_is_an_error_of_the_next_receive(start):
    server = start()
    server.send({"exit": 3})
    server.process.wait(SECONDS)
    for _ in range(2):
        server.send({"end": [], "number": 1})
    with pytest.raises(RuntimeError, match="the gateway of episodes ended with exit code 3"):
        receive(server, 1)


def test_a_gateway_ends_with_the_trainer(start):
    """Nobody else holds the trainer's end of the sockets."""
    server = start()
    server._socket.close()
    try:
        assert server.process.wait(SECONDS) == 0
    except subprocess.TimeoutExpired:
        pytest.fail("it waits for further messages")
