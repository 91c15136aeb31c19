"""Start the gateway, and exchange messages with it.

The gateway (rollout/episodes/gateway.py) is a process of its own, so that HTTP, chat templates and
parsers do not delay vLLM's steps. It is connected to this process by a pair of sockets, over which
both send one JSON object per line. It ends when this process does.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from config import InputError
from rollout.grading.process import describe_exit

ROOT = Path(__file__).parents[2]
READ_BYTES = 2**20
STARTUP_SECONDS = 300.0


class GatewayServer:
    """The gateway of this rank's replica.

    Attributes:
        base_url: where it listens, as OpenAI clients want it: it ends with /v1.
        notices: lines for the user about how it works.

    Raises:
        InputError: the gateway cannot work with these settings.
    """

    def __init__(self, settings: dict, startup_seconds: float = STARTUP_SECONDS):
        own_end, gateway_end = socket.socketpair()
        self._socket = own_end
        self._unread = b""
        self._unsent = bytearray()
        # Workers are started in other threads, which announce their API keys here.
        self._sending = threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout.episodes.gateway", str(gateway_end.fileno())],
            pass_fds=[gateway_end.fileno()],
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
        )
        gateway_end.close()
        self.send(settings)
        answer = self._wait_for_start(startup_seconds)
        if "error" in answer:
            raise InputError(answer["error"])
        self.base_url = f"http://127.0.0.1:{answer['ready']}/v1"
        self.notices: list[str] = answer["notices"]

    def _wait_for_start(self, seconds: float) -> dict:
        deadline = time.monotonic() + seconds
        messages: list[dict] = []
        while not messages:
            seconds_left = deadline - time.monotonic()
            if seconds_left < 0:
                raise RuntimeError(f"the gateway of episodes has not started within {seconds:g} s")
            messages = self.receive(seconds_left)
        return messages[0]

    def send(self, message: dict) -> None:
        """Send a message. May be called in any thread.

        This does not wait for the gateway to read. What the socket cannot take yet is sent by later
        calls of send() and receive().
        """
        # Many times as fast as the json module, which matters for long log_probs.
        line = msgspec.json.encode(message) + b"\n"
        with self._sending:
            self._unsent += line
            self._send_unsent()

    def _send_unsent(self) -> None:
        """Send as much as the socket takes. The caller holds the lock."""
        while self._unsent:
            try:
                num_sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:  # receive() reports that the gateway has ended
                self._unsent.clear()
                return
            del self._unsent[:num_sent]

    def receive(self, seconds: float) -> list[dict]:
        """Return the messages that have arrived; wait at most this long for the first one.

        It also returns when the gateway is ready for messages that could not be sent yet.

        Raises:
            RuntimeError: the gateway has ended.
        """
        with self._sending:
            self._send_unsent()
            unsent = [self._socket] if self._unsent else []
        readable, _, _ = select.select([self._socket], unsent, [], seconds)
        if not readable:
            return []
        received = self._socket.recv(READ_BYTES)
        if not received:
            code = self.process.wait()
            raise RuntimeError(f"the gateway of episodes {describe_exit(code)}")
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the gateway."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


def python_path() -> str:
    """Return the module search path of the gateway: this repository, then the user's."""
    own = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(ROOT), *own])
