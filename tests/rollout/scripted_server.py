"""A server with the gateway's routes, whose answers are scripts that the test writes."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

POLL_SECONDS = 0.01  # so that it ends soon


class Handler(BaseHTTPRequestHandler):
    """Answers a chat with the script in the first line of the chat, or else with an echo.

    A script is JSON, see script(): a list of turns, of which the number of replies so far chooses
    one. A turn may be {"tool_calls": [[name, arguments], ...]}, {"content", "reasoning"},
    {"status", "error"} or {"sleep": seconds}.
    """

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Authorization"].removeprefix("Bearer ")
        self.server.requests.append(SimpleNamespace(path=self.path, key=key, body=body))
        if key not in self.server.keys:
            self.send(401, {"error": {"message": f"unknown key {key}", "type": "invalid"}})
        elif self.path == "/v1/rewards":
            self.send(200, {})
        elif self.path == "/inference/v1/generate":
            ids = [i + 1 for i in body["token_ids"]]
            content = [{"token": str(i), "logprob": -i / 2} for i in ids]
            choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
            self.send(200, {"choices": [choice]})
        elif self.path == "/v1/chat/completions":
            self.chat(body["messages"])

    def chat(self, messages):
        users = [m for m in messages if m["role"] == "user"]
        try:
            script = json.loads(users[0]["content"].partition("\n")[0])
            turn = script[sum(m["role"] == "assistant" for m in messages)]
        except (ValueError, TypeError, IndexError):
            turn = {"content": users[-1]["content"]}
        if "status" in turn:
            return self.send(turn["status"], {"error": turn["error"]})
        time.sleep(turn.get("sleep", 0))
        message = {"role": "assistant", "content": turn.get("content")}
        if "reasoning" in turn:
            message["reasoning"] = turn["reasoning"]
        calls = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": text}}
            for i, (name, text) in enumerate(turn.get("tool_calls", []))
        ]
        if calls:
            message["tool_calls"] = calls
        finish_reason = "tool_calls" if calls else "stop"
        choice = {"message": message, "finish_reason": finish_reason, "token_ids": [1, 2, 3]}
        self.send(200, {"choices": [choice]}, is_chunked=len(messages) > 1)

    def send(self, status, answer, is_chunked=False):
        body = json.dumps(answer).encode()
        self.send_response(status)
        if is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (body[:5], body[5:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class ScriptedServer(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.keys = {}  # key -> the index of its episode
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def new_key(self, i):
        key = f"key-{i}-{len(self.keys)}"
        self.keys[key] = i
        return key

    def attempts(self, i):
        """Return the keys of an episode, in order."""
        return [key for key, index in self.keys.items() if index == i]


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """Serve in another thread within this block."""
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_SECONDS,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def script(*turns: dict) -> str:
    """Return the content of a first message that makes the server answer with these turns."""
    return json.dumps(turns)
