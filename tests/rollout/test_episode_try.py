"""The command that plays one episode by hand."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

from config import InputError
from examples.arithmetic import build
from rollout.episodes.jobs import Limit
from rollout.episodes.stepping import Playing
from rollout.grading.results import Failure, Reward
from tests.support.launch import ROOT, run

# The module's name is a keyword, so it cannot be imported by a statement.
trial = importlib.import_module("rollout.episodes.try")

SETTINGS = [
    "data.max_prompt_length=60",
    "engine.compute_dtype=float32",
    "rollout.kv_cache_gib=0.05",
    "rollout.max_tokens=6",
    "rollout.max_episode_tokens=100",
]
AGENT = """
async def solve(row, llm):
    messages = [{"role": "user", "content": f"the answer is {row['answer']}"}]
    for turn in range(3):
        if turn == 2:
            messages = messages[-1:]  # forget the earlier turns
        reply = await llm.chat(messages)
        await llm.reward(0.25 * turn)
        print(f"turn {turn}: {len(reply.token_ids)} tokens")
        messages += [reply.message, {"role": "user", "content": "again"}]
    return 2.0


async def fail(row, llm):
    await llm.chat([{"role": "user", "content": "hello"}])
    return row["missing"]


def needs_tools(row, llm, tools):
    pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the demo's model and data, and AGENT in agent.py."""
    folder = tmp_path_factory.mktemp("try")
    build(folder)
    (folder / "agent.py").write_text(AGENT)
    return folder


def play(folder, function: str, *arguments: str, returncode: int = 0) -> str:
    """Run the command, and return what it prints."""
    program = [sys.executable, "-m", "rollout.episodes.try", f"agent.py:{function}"]
    command = [*program, "--model", "model", "--data", "train.jsonl", *arguments, *SETTINGS]
    done: subprocess.CompletedProcess = run(command, returncode, cwd=folder, PYTHONPATH=str(ROOT))
    return done.stdout


@pytest.mark.slow
def test_an_episode_with_its_branches_and_rewards(folder):
    output = play(folder, "solve", "--row", "2")
    row = (folder / "train.jsonl").read_text().splitlines()[1]
    assert f"train.jsonl:2: {row}\n" in output
    first, second = output.split("\nbranch ")[1:]
    assert first.startswith("1 of 2: ")
    assert second.startswith("2 of 2: ")
    assert "user\n  | the answer is " in first
    assert "  | again<|im_end|>" in first
    assert first.count("[[") == 2  # turns that are trained
    assert second.count("[[") == 1
    assert "reward 0.25 at token" in first
    assert "reward 0.5 at token" in second
    lines = output.splitlines()
    assert [line[:10] for line in lines if line.startswith("  | turn ")] == [
        f"  | turn {i}" for i in range(3)
    ]
    trained = sum(int(line.split()[3]) for line in lines if line.startswith("  | turn "))
    assert f"turns 3, branches 2, trained tokens {trained}, " in lines[-2]
    assert lines[-1] == "score 2.75: result 2, turns 0.75"


def test_the_score_includes_the_rewards_of_turns():
    playing = Playing(seed=(0,), limit="max_turns")
    turn = playing.episode.begin([1, 2], seed=0)
    turn.response.append(np.array([3]), np.array([-1.0]), None, version=0)
    playing.episode.end(turn, is_cut=False)
    playing.episode.reward(0.75)
    reward = Reward(2.0, {"right": 1.5, "short": 0.5})
    assert list(trial.result_lines(playing, reward)) == [
        "limit: max_turns",
        "score 2.75: result 2, turns 0.75",
        "right 1.5, short 0.5",
    ]


@pytest.mark.parametrize(
    "limit, result, lines",
    [
        (None, Reward(2.0, {}), ["score 2: result 2, turns 0"]),
        (
            "max_turns",
            Limit("max_turns", None),
            [
                "limit: max_turns",
                "no score: left out of training, because rollout.limit_score is null",
            ],
        ),
        (
            "max_turns",
            Limit("max_turns", -0.5),
            ["limit: max_turns", "score -0.5: result -0.5, turns 0"],
        ),
        (
            None,
            Failure("timed out", "no answer\nafter 3 s\n", {}, "text"),
            ["failed: timed out: no answer after 3 s", "  | no answer", "  | after 3 s"],
        ),
    ],
    ids=["a reward", "a limit", "a limit with a score", "a failure"],
)
def test_the_end_of_an_episode_is_described(limit, result, lines):
    assert list(trial.result_lines(Playing(seed=(0,), limit=limit), result)) == lines


def test_a_message_is_described_with_its_reasoning_and_its_calls():
    functions = [{"name": "add", "arguments": '{"a": 1}'}, {"name": "stop", "arguments": "{}"}]
    message = {
        "role": "assistant",
        "reasoning": "first\nthen\nlast",
        "content": "I add.",
        "tool_calls": [{"function": function} for function in functions],
    }
    assert list(trial.message_lines(message)) == [
        "  assistant, reasoning: first",
        "    then",
        "    last",
        "  assistant: I add.",
        '  assistant calls: add({"a": 1})',
        "  assistant calls: stop({})",
    ]
    parts = [{"type": "text", "text": "é"}]
    (line,) = trial.message_lines({"role": "user", "content": parts})
    assert line == f"  user: {json.dumps(parts)}"
    assert not list(trial.message_lines({"role": "user", "content": ""}))


@pytest.mark.slow
def test_a_failure_is_printed_with_its_trace(folder):
    output = play(folder, "fail", returncode=1)
    assert "branch 1 of 1: " in output
    failure = output[output.index("\nfailed: ") :]
    assert failure.startswith("\nfailed: raised: KeyError: 'missing' (")
    assert 'return row["missing"]' in failure


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["agent.py:solve", "--row", "99999"], "--row 99999: train.jsonl has 12000 rows"),
        (["agent.py:nothing"], "rollout.episode=agent.py:nothing: "),
        (["agent.py:needs_tools"], "its parameter tools is unknown"),
        (["agent.py:solve", "model.lora.rank=8"], "Leave out model.lora"),
        (["agent.py:solve", "rollout.max_token=8"], "the nearest is rollout.max_tokens"),
        (["agent.py:solve", "data.max_prompt_length=2"], "train.jsonl:1 is not used in training"),
    ],
)
def test_mistakes(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    files = ["--model", "model", "--data", "train.jsonl"]
    with pytest.raises(InputError) as caught:
        trial.main([arguments[0], *files, *SETTINGS, *arguments[1:]])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_2(folder):
    command = [sys.executable, "-m", "rollout.episodes.try", "agent.py:solve", "optim.learning=1"]
    done = run(command, 2, cwd=folder, PYTHONPATH=str(ROOT))
    assert done.stderr.count("error: unknown key optim.learning") == 1
