"""Play one episode by hand, and print what would be trained.

    python -m rollout.episodes.try my_agent.py:solve --model DIR --data FILE [--row N]
        [my.yaml] [key=value ...]

vLLM generates with the weights in DIR. Rows are counted from 1. --model and --data may be left out
if a YAML file has model.path and data.train_files. The other settings are as for train_ppo.py:
trainer.seed=1 draws other replies, and rollout.temperature=0.01 the likeliest ones.

It prints the conversation, the tokens of each branch, the rewards, and the output of your code.
Trained tokens are green on a terminal, and between [[ and ]] elsewhere. The exit code is 0 if the
episode has a reward, 1 if it failed, and 2 after a mistake in the command.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig
from safetensors import safe_open
from torch import Tensor

from config import InputError, load, report
from configs import packages
from data import prompts
from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.files import find_files, read_rows
from data.preview import highlight, token_lines
from data.tokenization import Source, plain_options, tokenize_rows
from engines.model.model_files import weight_files
from engines.parallel import device
from job.models import with_local_models
from rl.settings import check_settings
from rollout.episodes.drawing import EpisodeSampler, Result
from rollout.episodes.jobs import Limit
from rollout.episodes.recorder import Branch
from rollout.episodes.runner import EpisodeRunner
from rollout.episodes.stepping import EpisodeLoop, Playing
from rollout.grading.results import Failure, Reward
from rollout.vllm.engine import Rollout
from rollout.vllm.settings import check_rollout, check_vllm_model


def main(arguments: list[str]) -> int:
    """Play the episode, and return the exit code."""
    import datasets

    datasets.disable_progress_bars()  # they would interrupt the output
    args = parse(arguments)
    with tempfile.TemporaryDirectory() as work:
        config = with_local_models(load("ppo.yaml", settings(args, work)))
        check(config)
        runner = EpisodeRunner(config)
        try:
            chat = ChatTokenizer.load(load_tokenizer(config), Path(config.model.path))
            path, row = read_row(config, chat, args.row, Path(work))
            notice = runner.check(row)
            print(f"{path}:{args.row}: {json.dumps(row)}")
            if notice:
                print(notice)
            playing, result = play(config, runner, chat.tokenizer, row, args.row)
            output = read_output(Path(work))
        finally:
            runner.close()
    for line in describe(playing, result, output, chat):
        print(line)
    return exit_code(result)


def exit_code(result: Result) -> int:
    """Return the exit code after an episode: a limit is not a failure, even without a score."""
    return 0 if isinstance(result, Reward | Limit) else 1


# -- the command -----------------------------------------------------------------------------------


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments of the command."""
    parser = argparse.ArgumentParser("python -m rollout.episodes.try", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("episode", help="my_agent.py:solve, as for rollout.episode")
    parser.add_argument("--model", metavar="DIR", help="the model, as for model.path")
    parser.add_argument("--data", metavar="FILE", help="the data file, as for data.train_files")
    parser.add_argument("--row", type=row_number, default=1, metavar="N", help="1 (default): first")
    parser.add_argument("settings", nargs="*", help="YAML files and key=value pairs")
    return parser.parse_intermixed_args(arguments)


def row_number(text: str) -> int:
    """Return the number of a row. Raises ArgumentTypeError for numbers below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be the number of a row, at least 1")
    return int(text)


def settings(args: argparse.Namespace, work: str) -> list[str]:
    """Return the arguments of config.load(). Files of the run are written to `work`."""
    settings = [*args.settings, f"rollout.episode={args.episode}", f"output_dir={work}"]
    if args.model is not None:
        settings.append(f"model.path={args.model}")
    if args.data is not None:
        settings.append(f"data.train_files={args.data}")
    return settings


def check(config: DictConfig) -> None:
    """Raise InputError for settings with which no episode can be played in one process."""
    check_settings(config)
    if config.model.lora.rank:
        raise InputError(
            f"model.lora.rank={config.model.lora.rank}: an episode is played with the weights in "
            "model.path. Leave out model.lora, or merge the adapter and give that directory"
        )
    check_rollout(config, world_size=1)
    check_vllm_model(config)


def read_row(config: DictConfig, chat: ChatTokenizer, number: int, work: Path) -> tuple[Path, dict]:
    """Return the file that a row is in, and the row, as an episode gets it.

    Args:
        number: the number of the row in the first of data.train_files, from 1.

    Raises:
        InputError: there is no such row, or it is not a prompt.
    """
    path = find_files(config.data.train_files)[0]
    rows = read_rows(path, work)
    if number > len(rows):
        raise InputError(f"--row {number}: {path} has {len(rows)} rows")
    i = number - 1
    options = plain_options(config.data)
    columns = tokenize_rows(rows[i:number], [i], Source(path), prompts.SPEC, chat, options)
    if columns["error"][0]:
        raise InputError(columns["error"][0])
    if not columns["record"][0]:
        raise InputError(
            f"{path}:{number} is not used in training, because it is blank or longer than "
            f"data.max_prompt_length={config.data.max_prompt_length}: choose another --row"
        )
    return path, json.loads(columns["record"][0])["row"]


# -- the episode -----------------------------------------------------------------------------------


def play(
    config: DictConfig, runner: EpisodeRunner, tokenizer, row: dict, seed: int
) -> tuple[Playing, Result]:
    """Start vLLM, play one episode, and stop vLLM."""
    rollout = Rollout(config, device.init())
    rollout.wake("weights")
    rollout.update_weights(weights_in_files(Path(config.model.path)))
    rollout.wake("kv_cache")
    sampler = EpisodeSampler.start(config, rollout, runner, tokenizer, host_group=None)
    director = sampler.director
    cast = director.start([row], config.rollout, math.inf, "rollout")
    loop = EpisodeLoop(rollout, config.rollout, sampler.inbox(cast), sampler.answer)
    playing = loop.add(0, (config.trainer.seed, seed))
    loop.run()
    sampler.close()
    rollout.shutdown()
    device.shutdown()
    return playing, playing.result


def weights_in_files(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for all weights of a model, as Rollout.update_weights() takes them."""
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


def read_output(output_dir: Path) -> str:
    """Return the output of the user's code."""
    files = sorted(output_dir.glob("reward_output/*"))
    return "".join(file.read_text(errors="replace") for file in files)


# -- what is printed -------------------------------------------------------------------------------


def describe(playing: Playing, result: Result, output: str, chat: ChatTokenizer) -> Iterator[str]:
    """Yield the lines about an episode."""
    if playing.messages:
        yield ""
        yield "the conversation of the last chat:"
        for message in playing.messages:
            yield from message_lines(message)
    branches = playing.episode.branches
    for number, branch in enumerate(branches, 1):
        yield ""
        yield from branch_lines(f"branch {number} of {len(branches)}", branch, chat)
    if output:
        yield ""
        yield "output of your code:"
        yield from indent(output)
    yield ""
    yield counts_line(playing)
    yield from result_lines(playing, result)


def message_lines(message: dict) -> Iterator[str]:
    """Yield the lines of a message: its role, and its content, reasoning and tool calls."""
    role = message["role"]
    if message.get("reasoning"):
        yield from labelled(f"{role}, reasoning", message["reasoning"])
    content = message.get("content")
    if content:
        yield from labelled(role, content if isinstance(content, str) else json.dumps(content))
    for call in message.get("tool_calls") or []:
        function = call["function"]
        yield from labelled(f"{role} calls", f"{function['name']}({function['arguments']})")


def labelled(label: str, text: str) -> Iterator[str]:
    """Yield the lines of a text after a label."""
    first, *others = text.split("\n")
    yield f"  {label}: {first}"
    for line in others:
        yield f"    {line}"


def branch_lines(name: str, branch: Branch, chat: ChatTokenizer) -> Iterator[str]:
    """Yield the lines about a branch: its text with trained tokens marked, and its rewards."""
    mask = [int(is_sampled) for is_sampled in branch.is_sampled]
    yield from token_lines(name, branch.token_ids, mask, chat)
    for position, reward in enumerate(branch.rewards):
        if reward:
            token = highlight([branch.token_ids[position]], None, chat)
            yield f"  reward {reward:g} at token {position + 1}, {token!r}"


def counts_line(playing: Playing) -> str:
    """Return the line with the numbers of turns, branches, tokens and tool calls."""
    episode = playing.episode
    counts = {
        "turns": episode.num_turns,
        "branches": len(episode.branches),
        "trained tokens": episode.num_sampled,
        "tool calls": playing.num_tool_calls,
        "tool errors": playing.num_tool_errors,
    }
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def result_lines(playing: Playing, result: Result) -> Iterator[str]:
    """Yield the lines about how an episode ended."""
    if playing.limit:
        yield f"limit: {playing.limit}"
    if isinstance(result, Failure):
        yield f"failed: {result.summary}"
        yield from indent(result.trace)
        return
    if isinstance(result, Limit) and result.score is None:
        yield "no score: left out of training, because rollout.limit_score is null"
        return
    turn_rewards = playing.episode.reward_sum
    yield f"score {result.score + turn_rewards:g}: result {result.score:g}, turns {turn_rewards:g}"
    if isinstance(result, Reward) and result.parts:
        yield ", ".join(f"{name} {value:g}" for name, value in result.parts.items())


def indent(text: str) -> Sequence[str]:
    return [f"  | {line}" for line in text.rstrip("\n").split("\n")]


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except InputError as error:
        report(error)
        code = 2
    except ModuleNotFoundError as error:
        packages.exit_without(error)
    sys.exit(code)
