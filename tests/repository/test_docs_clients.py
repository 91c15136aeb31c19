"""Other packages' clients play the episodes of docs/episodes.md.

Each has an environment of its own, with the packages that the page names and nothing of this one.
clients_worker.py plays them, with one vLLM and a model that has learned to call a tool.
"""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from tests.repository.calling_model import ANSWER_REPLY, CALL_REPLY, make_calling_model
from tests.repository.pages import COMMANDS, PAGES, SNIPPETS
from tests.support.launch import launch
from tests.support.ports import unused_port

pytestmark = pytest.mark.slow

PAGE = "docs/episodes.md"
ENVIRONMENTS = Path(tempfile.gettempdir(), "rankwise-tests-environments")
SECONDS = 60


@dataclass(frozen=True)
class Client:
    """A package that plays.

    Attributes:
        packages: what the page installs.
        snippet: the page's file with the function.
        prompt: of the row. The model calls the tool if it ends with 3.
        trained: the text that the model writes.
        score: of each episode.
        settings: more settings.
        limit: the limit that each episode reaches.
    """

    packages: str
    snippet: str
    prompt: str
    trained: str
    score: float
    settings: tuple[str, ...] = ()
    limit: str | None = None


VERIFIERS = "verifiers==0.4.0 uv"
CLIENTS = {
    "OpenAI's SDK": Client("openai", "my_openai_agent.py", "Add 3 and 2", ANSWER_REPLY, 1.0),
    "an agent framework": Client(
        "openai-agents", "my_framework_agent.py", "What is 2+3", CALL_REPLY + ANSWER_REPLY, 1.0
    ),
    # Its rewards are a tenth of the number of letters, for each of two turns.
    "OpenEnv": Client(
        "openenv==0.10.0", "my_openenv_agent.py", "Add 3 and 2", 2 * ANSWER_REPLY, 1.4
    ),
    "verifiers": Client(
        VERIFIERS,
        "my_verifiers_agent.py",
        "What is 2+3",
        CALL_REPLY + ANSWER_REPLY,
        1.0,
    ),
    "verifiers at a limit": Client(
        VERIFIERS,
        "my_verifiers_agent.py",
        "What is 2+3",
        CALL_REPLY,
        -1.0,
        ("rollout.max_turns=1", "rollout.limit_score=-1.0"),
        "max_turns",
    ),
}


def uv() -> Path:
    """Return the program uv, which is installed once per machine."""
    folder = ENVIRONMENTS / f"uv-{sys.version_info.major}.{sys.version_info.minor}"
    marker = folder / "installed"
    if not marker.exists():
        venv.create(folder, with_pip=True)
        install([folder / "bin/python", "-m", "pip", "install", "-q", "uv"])
        marker.touch()
    return folder / "bin/uv"


def environment(packages: str) -> Path:
    """Return a virtual environment with these packages, which is made once per machine."""
    ENVIRONMENTS.mkdir(exist_ok=True)
    digest = hashlib.sha256(f"{sys.version} {packages}".encode()).hexdigest()[:12]
    folder = ENVIRONMENTS / digest
    marker = folder / "installed"
    with FileLock(ENVIRONMENTS / "lock"):
        if not marker.exists():
            install([uv(), "venv", "-q", "--clear", "--python", sys.executable, folder])
            python = folder / "bin/python"
            install([uv(), "pip", "install", "-q", "--python", python, *packages.split()])
            marker.touch()
    return folder


def install(command: list) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextmanager
def echo_server(folder: Path, port: int) -> Iterator[None]:
    """Run OpenEnv's echo environment as the page does."""
    bin_folder = environment(CLIENTS["OpenEnv"].packages) / "bin"
    install([bin_folder / "openenv", "init", "echo_env", "--output-dir", folder])
    app = folder / "echo_env/server/app.py"
    app.write_text(app.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=8"))
    server = subprocess.Popen(
        [bin_folder / "python", "-m", "server.app", "--port", str(port)],
        cwd=folder / "echo_env",
        stdout=(folder / "server.log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not is_open(port):
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, "the echo server does not start"
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(SECONDS)


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def episodes(tmp_path_factory) -> dict:
    """The episodes of all clients, by name."""
    folder = tmp_path_factory.mktemp("clients")
    make_calling_model(folder / "model")
    port = int(unused_port())
    for name, code in SNIPPETS:
        code = code.replace('"model"', f'"{folder / "model"}"').replace("8000", str(port))
        (folder / name).write_text(code)
    clients = {}
    for name, client in CLIENTS.items():
        python = environment(client.packages) / "bin/python"
        settings = [
            f"rollout.episode={folder / client.snippet}:solve",
            f"rollout.episode_python={python}",
            *client.settings,
        ]
        row = {"prompt": client.prompt, "answer": "5"}
        clients[name] = {"settings": settings, "row": row}
    (folder / "clients.json").write_text(json.dumps(clients))
    with echo_server(folder, port), pytest.MonkeyPatch.context() as patch:
        # For verifiers, as the page says.
        bin_folder = environment(VERIFIERS) / "bin"
        patch.setenv("PATH", str(bin_folder), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(folder))
        launch(1, "tests/repository/clients_worker.py", folder)
    return json.loads((folder / "episodes.json").read_text())


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_plays(episodes, name):
    """It plays two episodes at a time. All turns of an episode are one sequence."""
    client = CLIENTS[name]
    played = episodes[name]
    assert played["failures"] == []
    assert len(played["sequences"]) == 2
    for sequence in played["sequences"]:
        assert sequence["trained"] == client.trained
        assert sequence["score"] == pytest.approx(client.score)
        assert sequence["limit"] == client.limit
        assert client.prompt in sequence["text"]


@pytest.mark.parametrize("name", CLIENTS)
def test_the_page_installs_the_packages(name):
    packages = CLIENTS[name].packages
    commands = [command for page, command in COMMANDS if page == PAGE]
    assert any(command.endswith(f"pip install {packages}") for command in commands), commands
    assert re.search(rf"^# {CLIENTS[name].snippet}$", PAGES[PAGE], re.MULTILINE)
