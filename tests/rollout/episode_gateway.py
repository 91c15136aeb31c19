"""A gateway process whose trainer is the test, and a model folder for it."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.data.chat_templates import CONTROL, make_tokenizer
from tests.support.launch import ROOT

VOCAB_SIZE = 500  # of the model; its tokenizer has fewer
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 50,
    "stop": [],
}
SECONDS = 60
CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


def save_tokenizer(folder: Path, template: str | None, end: str) -> Path:
    """Write a model folder with a tokenizer, and return it."""
    tokenizer = make_tokenizer(template, control=CONTROL)
    tokenizer.save_pretrained(folder)
    end_id = tokenizer.convert_tokens_to_ids(end)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": end_id}))
    return folder


def gateway_settings(model_path: Path) -> dict:
    return {
        "model_path": str(model_path),
        "chat_template": None,
        "template_kwargs": {},
        "tool_parser": "none",
        "reasoning_parser": None,
        "stop_token_ids": [],
        "max_model_len": 2000,
        "vocab_size": VOCAB_SIZE,
        "special_tokens_in_text": None,
    }


class GatewayProcess:
    """A running gateway, seen from the trainer's end and from a client's."""

    def __init__(self, model_path: Path, **settings):
        own_end, gateway_end = socket.socketpair()
        self.socket = own_end
        self.lines = own_end.makefile("r")
        self.keys: tuple[str, ...] = ()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout.episodes.gateway", str(gateway_end.fileno())],
            pass_fds=[gateway_end.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        gateway_end.close()
        self.send(gateway_settings(model_path) | settings)
        self.first = self.receive()
        self.threads = ThreadPoolExecutor(8)
        if "ready" in self.first:
            self.client = httpx.Client(
                base_url=f"http://127.0.0.1:{self.first['ready']}", timeout=SECONDS
            )

    def send(self, message: dict) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict:
        self.socket.settimeout(SECONDS)
        return json.loads(self.lines.readline())

    def begin(self, *keys: str, max_turns=None, max_episode_tokens=None, **sampling) -> None:
        """Begin a draw anew."""
        self.end(*self.keys)
        self.keys = keys
        self.send(
            {
                "begin": keys,
                "sampling": SAMPLING | sampling,
                "section": "rollout",
                "max_turns": max_turns,
                "max_episode_tokens": max_episode_tokens,
            }
        )

    def end(self, *keys: str) -> None:
        """Let the gateway forget keys."""
        self.send({"end": keys, "number": 5})
        while self.receive() != {"ended": 5}:
            pass

    def post(self, path: str, key: str, body) -> httpx.Response:
        return self.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})

    def chat(self, key: str, messages: list[dict], **fields) -> Future:
        """Post a chat request in another thread."""
        body = {"messages": messages, **fields}
        return self.threads.submit(self.post, "/v1/chat/completions", key, body)

    def answer(self, request: dict, token_ids: list[int], finish_reason: str = "stop") -> None:
        log_probs = [-0.5] * len(token_ids)
        answer = {"token_ids": token_ids, "log_probs": log_probs, "finish_reason": finish_reason}
        self.send({"id": request["id"], **answer})

    def close(self) -> int:
        """End as a trainer that dies does, and return the gateway's exit code."""
        self.lines.close()
        self.socket.close()
        return self.process.wait(SECONDS)
