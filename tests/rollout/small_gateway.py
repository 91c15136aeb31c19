"""A gateway process that starts at once. It answers no HTTP requests, only the trainer."""

import sys
from pathlib import Path

import pytest

from rollout.episodes.server import GatewayServer

# Its settings are {"first": its first answer}. Of each message that begins episodes, it sends a
# copy about every one of them.
PROGRAM = """
import json, os, socket, sys, time

connection = socket.socket(fileno=int(sys.argv[-1]))
messages = connection.makefile("r")

def send(message):
    connection.sendall(json.dumps(message).encode() + b"\\n")

settings = json.loads(messages.readline())
if settings.get("first"):
    send(settings["first"])
for line in messages:
    message = json.loads(line)
    if "begin" in message:
        for key in message["begin"]:
            send({"episode": key, "begun": message})
    if "end" in message:
        send({"ended": message["number"], "keys": message["end"]})
    if "text" in message:
        for part in message["text"]:
            connection.sendall(part.encode())
            time.sleep(0.05)
    if "sleep" in message:
        time.sleep(message["sleep"])
    if "environment" in message:
        send({"environment": dict(os.environ), "session": os.getsid(0), "arguments": sys.argv[1:]})
    if "exit" in message:
        os._exit(message["exit"])
"""
READY = {"ready": 1234, "notices": ["a notice"]}


def start_gateway(folder: Path, monkeypatch: pytest.MonkeyPatch, first=READY, **options):
    """Start the program in place of the real gateway."""
    file = folder / "gateway"
    file.write_text(f"#!{sys.executable} -S\n{PROGRAM}")
    file.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(file))
        return GatewayServer({"first": first}, **options)
