"""The command that plays one episode by hand."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

from config import InputError, load
from data.chat.tokenizer import ChatTokenizer
from examples.arithmetic import build
from rollout.episodes.jobs import Limit
from rollout.episodes.stepping import Playing
from rollout.grading.results import Failure, Reward
from tests.support.launch import ROOT, run
from tests.support.samples import configure

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


def test_branches_are_described_with_their_trained_tokens_and_rewards(tokenizer, model_path):
    """And the conversation, the output and the numbers, in this order."""
    playing = Playing(seed=(0,), num_tool_calls=3, num_tool_errors=1)
    playing.messages = [{"role": "user", "content": "hello"}]
    for prompt, reply, reward in (("the", "cat", 0.5), ("the cat sat", "there", 0), ("a", "b", 2)):
        turn = playing.episode.begin(tokenizer.encode(prompt), seed=0)
        ids = np.array(tokenizer.encode(reply))
        turn.response.append(ids, np.zeros(len(ids)), None, version=0)
        playing.episode.end(turn, is_cut=False)
        playing.episode.reward(reward)
    branches = playing.episode.branches
    num_branches = len(branches)
    position = branches[0].rewards.index(0.5)
    last = tokenizer.decode([branches[0].token_ids[position]])
    chat = ChatTokenizer.load(tokenizer, model_path)
    lines = list(trial.describe(playing, Reward(1.0, {}), "printed\nby you\n", chat))
    assert lines[:3] == ["", "the conversation of the last chat:", "  user: hello"]
    assert f"  reward 0.5 at token {position + 1}, {last!r}" in lines
    starts = [i for i, line in enumerate(lines) if line.startswith("branch ")]
    assert len(starts) == num_branches
    assert sum(line.count("[[") for line in lines) == 3
    num_sampled = sum(branch.num_sampled for branch in branches)
    assert lines[starts[-1] :][-7:] == [
        "",
        "output of your code:",
        "  | printed",
        "  | by you",
        "",
        f"turns 3, branches {num_branches}, trained tokens {num_sampled}, tool calls 3, "
        "tool errors 1",
        "score 3.5: result 1, turns 2.5",
    ]
    without = list(trial.describe(playing, Reward(1.0, {}), "", chat))
    assert "output of your code:" not in without


@pytest.mark.parametrize(
    "result, code",
    [
        (Reward(0.0, {}), 0),
        (Limit("max_turns", None), 0),
        (Failure("raised", "", {}, ""), 1),
        (None, 1),
    ],
)
def test_an_episode_without_a_result_has_failed(result, code):
    assert trial.exit_code(result) == code


def test_output_of_all_files_is_read_even_if_it_is_no_text(tmp_path):
    files = tmp_path / "reward_output"
    files.mkdir()
    (files / "rank_1.txt").write_bytes(b"second\n")
    (files / "rank_0.txt").write_bytes(b"first \xff\n")
    assert trial.read_output(tmp_path) == "first \ufffd\nsecond\n"


def test_the_command_has_the_last_word_about_files(tmp_path):
    arguments = ["agent.py:f", "--model", "m", "--data", "d", "output_dir=o", "trainer.seed=5"]
    args = trial.parse(arguments)
    assert args.row == 1
    config = load("ppo.yaml", trial.settings(args, str(tmp_path)))
    assert (config.model.path, config.rollout.episode) == ("m", "agent.py:f")
    assert (config.output_dir, config.trainer.seed) == (str(tmp_path), 5)
    assert "d" in str(config.data.train_files)


@pytest.mark.parametrize("row", ["0", "-1", "x", "1.5"])
def test_rows_are_numbered_from_1(row, capsys):
    with pytest.raises(SystemExit):
        trial.parse(["agent.py:f", f"--row={row}"])
    assert f"{row} must be the number of a row, at least 1" in capsys.readouterr().err


def test_a_row_is_read_as_an_episode_gets_it(tokenizer, model_path, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "the cat"}, {"prompt": " "}, {"prompt": "the " * 99}, {"prompt": "there"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = configure(f"data.train_files={file}", "data.max_prompt_length=50")
    chat = ChatTokenizer.load(tokenizer, model_path)
    for number in (1, 4):
        assert trial.read_row(config, chat, number, tmp_path) == (file, rows[number - 1])
    with pytest.raises(InputError, match=f"^--row 5: {file} has 4 rows$"):
        trial.read_row(config, chat, 5, tmp_path)
    with pytest.raises(InputError, match="rows.jsonl:2: the prompt is empty"):
        trial.read_row(config, chat, 2, tmp_path)
    with pytest.raises(
        InputError, match="rows.jsonl:3 is not used in training, because it is blank"
    ):
        trial.read_row(config, chat, 3, tmp_path)


def test_an_adapter_is_not_played():
    settings = ["rollout.episode=agent.py:f", "rollout.max_episode_tokens=3000"]
    with pytest.raises(InputError, match="^model.lora.rank=8: .* Leave out model.lora"):
        trial.check(configure("model.lora.rank=8", *settings))


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
