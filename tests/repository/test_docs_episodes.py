"""The functions, classes and commands of docs/episodes.md play episodes."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from config import load
from rollout.episodes.runner import EpisodeRunner
from tests.data.chat_templates import QWEN2
from tests.repository.pages import COMMANDS, block_containing
from tests.rollout.scripted_server import scripted_server
from tests.support.launch import ROOT, run

PAGE = "docs/episodes.md"
# What the model replies, turn by turn -> the reward of the episode.
RIGHT_SUM = [{"tool_calls": [["add", '{"a": 2, "b": 3}']]}, {"content": "It is 5"}]
WRONG_SUM = [{"tool_calls": [["add", '{"a": "2"}']]}, {"content": "It is 4"}]
RIGHT_GUESS = [
    {"tool_calls": [["guess", '{"number": 4}']]},
    {"tool_calls": [["guess", '{"number": 5}']]},
    {"content": "done"},
]
WRONG_GUESS = [{"tool_calls": [["guess", '{"number": 6}']]}, {"content": "5"}]
SMALL = [
    "data.max_prompt_length=120",
    "engine.compute_dtype=float32",
    "rollout.kv_cache_gib=0.05",
    "rollout.max_tokens=8",
    "rollout.max_episode_tokens=450",
]


def play(episode: str, turns: list[dict]) -> tuple[float, list[str]]:
    """Play an episode with a server that replies these turns.

    Returns:
        The reward, and the results of all tools.
    """
    config = load(
        "ppo.yaml",
        ["model.path=unused", "data.train_files=unused", f"rollout.episode={episode}"],
    )
    runner = EpisodeRunner(config)
    row = {"prompt": json.dumps(turns), "answer": "5"}
    with scripted_server() as server:
        (result,) = runner.play([row], server.url, server.new_key)
    runner.close()
    messages = server.requests[-1].body["messages"]
    return result.score, [m["content"] for m in messages if m["role"] == "tool"]


@pytest.mark.parametrize(
    "episode, turns, reward, tool_results",
    [
        ("my_agent.py:solve", RIGHT_SUM, 1.0, ["5"]),
        ("my_agent.py:solve", WRONG_SUM, 0.0, ["error: add needs two numbers, a and b"]),
        ("my_game.py:Game", RIGHT_GUESS, 1.0, ["too low", "right"]),
        ("my_game.py:Game", WRONG_GUESS, 0.0, ["too high"]),
    ],
)
def test_an_episode_of_the_page(docs_folder, monkeypatch, episode, turns, reward, tool_results):
    monkeypatch.chdir(docs_folder)
    assert play(episode, turns) == (reward, tool_results)


@pytest.fixture
def episodes_folder(docs_folder, tmp_path) -> Path:
    """Return a folder with the snippets, a problem, and a chat template that prints tools."""
    for path in docs_folder.glob("my_*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "model").symlink_to(docs_folder / "model")
    row = block_containing(PAGE, "json", "prompt")
    (tmp_path / "problems.jsonl").write_text(3 * row)
    (tmp_path / "tools.jinja").write_text(QWEN2)
    return tmp_path


def play_by_hand(folder: Path, *arguments: str) -> str:
    """Run the page's command that plays an episode by hand; return what it prints."""
    command = next(c for page, c in COMMANDS if page == PAGE and "rollout.episodes.try" in c)
    words = shlex.split(command.replace("Qwen/Qwen2.5-0.5B-Instruct", "model"))
    program = [sys.executable, *words[1:], *arguments, *SMALL, "data.chat_template=tools.jinja"]
    return run(program, cwd=folder, PYTHONPATH=str(ROOT)).stdout


@pytest.mark.slow
def test_an_episode_is_played_by_hand(episodes_folder):
    """The lines of the page are those of this episode, but for its numbers and texts."""
    output = play_by_hand(episodes_folder)
    assert f"\n{block_containing(PAGE, 'text', 'prefix-stable')}" in output
    quoted = block_containing(PAGE, "text", "trained")
    unlike = re.compile(r"\d+(\.\d+)?")
    for line in (quoted.splitlines()[0], *quoted.splitlines()[-2:]):
        assert unlike.sub("#", line) in [unlike.sub("#", other) for other in output.splitlines()]
