"""README.md and docs/: every command runs, or is checked down to its keys, or has a reason; quoted output, snippets, rows of
data, settings, links and the tree are what they say."""

import json
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed.run
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from config import InputError, load
from data import dataset, prompts
from data.chat.conversation import in_step
from data.chat.tokens import ChatTokenizer
from engines.build import engine_class
from examples.arithmetic import build
from rl import ppo
from rollout.grading.grader import Grader
from rollout.vllm.settings import check_rollout
from tests import families
from tests.repository.test_benchmarks import NOT_RUN, SMOKES
from tests.repository.test_house import PRODUCT
from tests.support.launch import ROOT, run

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
}
LANGUAGES = ("bash", "sh", "console", "python", "json", "text", "diff")
PROGRAMS = ("python", "torchrun", "bash", "make", "sbatch", "nsys", "pip", "source")
# What cannot run here, by how it begins. The settings of what nsys and sbatch launch are checked all the same; make is asked
# what it would do; what is in benchmarks/ has tests/repository/test_benchmarks.py.
REASONS = {
    "nsys profile": "needs nsys and a GPU",
    "sbatch": "needs slurm",
    "pip install": "installs",
    "source": "the shell's own",
    "python -m pytest": "needs a GPU",
    "python -m config schema": "writes into the repository",
    "python -m tests.families": "takes minutes",
}
# The launches that run for real, with these sizes and in place of these words.
SMALL = [
    "data.train_batch_size=8",
    "data.max_tokens_per_micro_batch=512",
    "engine.compute_dtype=float32",
    "trainer.total_steps=2",
]
SMALL_PPO = [
    *SMALL,
    "data.max_prompt_length=40",
    "rollout.max_tokens=12",
    "validation.max_tokens=12",
    "rollout.kv_cache_gib=0.05",
    "reward.num_workers=1",
]
RUNS = [
    ("README.md", "torchrun --nproc-per-node 8 train_sft.py model.path"),
    ("README.md", "torchrun --nproc-per-node 8 train_ppo.py model.path"),
    ("docs/profiling.md", "python train_sft.py my.yaml output_dir=runs/a"),
    ("docs/profiling.md", "python train_sft.py my.yaml output_dir=runs/b"),
    ("docs/lora.md", "torchrun --nproc-per-node 8 train_sft.py my.yaml model.lora.rank"),
]
# What is run on them then.
FOLLOW_UPS = [
    "python -m profiling.report runs/first",
    "python -m engines.checkpoint export runs/first/checkpoints/step_00000500 exported",
    "python -m profiling.compare runs/a runs/b --step 1 --stage train_batch",
    "python -m engines.checkpoint export runs/adapters/checkpoints/step_00000500 adapter",
    "python -m engines.checkpoint export runs/adapters/checkpoints/step_00000500 merged --merge",
    "python -m engines.check model.path=model engine.compute_dtype=float32 output_dir=runs/check",
]
INSTEAD = {
    "--nproc-per-node 8": "--nproc-per-node 2",
    "Qwen/Qwen2.5-7B-Instruct": "model",
    "Qwen/Qwen2.5-7B": "model",
    "step_00000500": "step_00000002",
}
NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)"  # but not the 1 of layers.1


def blocks(text: str, *languages: str) -> list[str]:
    return [
        body
        for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        if language in languages
    ]


def commands_of(text: str) -> list[str]:
    """Of bash blocks, of console blocks behind "$ ", and inline, there without "..."; comments left out."""
    lines = "\n".join(blocks(text, "bash", "sh")).replace("\\\n", " ").splitlines()
    lines += [
        line[2:]
        for block in blocks(text, "console")
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    lines += [
        span.replace("...", "")
        for span in inline(text)
        if span.split()[0] in PROGRAMS and " " in span
    ]
    return [shlex.join(words) for line in lines if (words := shlex.split(line, comments=True))]


def inline(text: str) -> list[str]:
    """The code spans outside of blocks."""
    return re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    )


SNIPPETS = [
    (block.split()[1], block) for text in PAGES.values() for block in blocks(text, "python")
]
COMMANDS = [
    (page, command) for page, text in PAGES.items() for command in dict.fromkeys(commands_of(text))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the commands name: the demo's model and data, my.yaml, and the snippets, whose first line is their name."""
    folder = tmp_path_factory.mktemp("docs")
    build(folder)
    for name in ("problems", "train"):
        rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)[:84]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    (folder / "val.jsonl").write_text(
        "".join((folder / "val.jsonl").read_text().splitlines(keepends=True)[:8])
    )
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "my.yaml").write_text(
        "model: {path: model}\n"
        "data: {train_files: train.jsonl, train_batch_size: 16, max_tokens_per_micro_batch: 2048}\n"
    )
    for name, code in SNIPPETS:
        (folder / name).write_text(code)
    return folder


def launched(words: list[str]) -> tuple[list[str], int]:
    """(script and its arguments, number of ranks); torchrun's own options are parsed by torchrun."""
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "torchrun":
        given = torch.distributed.run.get_args_parser().parse_args(words[1:])
        return [given.training_script, *given.training_script_args], int(
            given.nnodes.partition(":")[0]
        ) * int(given.nproc_per_node)
    return words[1:], 1


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page, command", COMMANDS, ids=[f"{page} {command[:60]}" for page, command in COMMANDS]
)
def test_a_command_runs_or_is_checked_or_has_a_reason(page, command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    has_reason = command.startswith(tuple(REASONS))
    command = re.sub(
        r"^nsys .*?(?=torchrun)|^sbatch examples/slurm/(?=sft|ppo)", "", command
    )  # what these launch
    words = shlex.split(re.sub(r"^(sft|ppo).sbatch", r"python train_\1.py", command))
    if any(re.fullmatch(r"train_\w+\.py", word) for word in words):
        check_launch(words)
    elif "benchmarks/" in command:
        script, *arguments = launched(words)[0]
        assert Path(script).name in SMOKES.keys() | NOT_RUN.keys() or script.endswith(".sh")
        assert all(
            f'"{word}"' in (ROOT / script).read_text()
            for word in arguments
            if word.startswith("--")
        ), arguments
    elif words[0] == "torchrun":  # its options alone
        known = torch.distributed.run.get_args_parser()._option_string_actions
        assert all(word in known for word in words[1:]), command
    elif words[0] == "make":
        would = run(["make", "-n", *words[1:]]).stdout
        assert "VENV=" not in command or "/path/to/env/bin/" in would and ".venv" not in would
    else:
        assert has_reason or any(known.startswith(command) for known in FOLLOW_UPS), (
            f"{page}: nothing is known of {command}"
        )


def check_launch(words: list[str]) -> None:
    """The settings load and do not contradict each other, and this many ranks can be laid out as they say; or the mistake is
    one that a page quotes."""
    (script, *arguments), num_ranks = launched(words)
    defaults = f"{Path(script).stem.removeprefix('train_')}.yaml"
    model = "model.path=mimo" if "mtp" in " ".join(arguments) else "model.path=model"
    arguments = [re.sub(r"^model.path=.*", model, argument) for argument in arguments]
    try:
        config = load(defaults, [model, "data.train_files=train.jsonl", *arguments])
        engine_class(config.model_engine).check(config, num_ranks)
        if defaults == "ppo.yaml":
            ppo.check(config)
            check_rollout(config, num_ranks)
    except InputError as error:
        assert f"error: {error}" in "\n".join(PAGES.values())


# -- launches that run -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(folder):
    """Every launch of RUNS, from a directory that is not the repository's, then FOLLOW_UPS; command -> how it ended."""
    programs = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
        "python": [sys.executable],
    }
    ended = {}
    for page, start in RUNS:
        command = next(
            command for where, command in COMMANDS if where == page and command.startswith(start)
        )
        for old, new in INSTEAD.items():
            command = command.replace(old, new)
        program, *words = shlex.split(command)
        small = SMALL_PPO if "train_ppo.py" in words else SMALL
        words = [str(ROOT / word) if word.startswith("train_") else word for word in words]
        ended[start] = run([*programs[program], *words, *small, "data.cache_dir=cache"], cwd=folder)
    for command in FOLLOW_UPS:
        words = shlex.split(command.replace("step_00000500", "step_00000002"))
        ended[command] = run([sys.executable, *words[1:]], cwd=folder, PYTHONPATH=str(ROOT))
    # docs/profiling.md quotes what is said of a run whose model has one matrix scaled.
    shutil.copytree(folder / "model", folder / "scaled")
    weights = load_file(folder / "model/model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] *= 1.01
    save_file(weights, folder / "scaled/model.safetensors", metadata={"format": "pt"})
    first = next(command for _, command in COMMANDS if command.startswith(RUNS[2][1])).replace(
        "runs/a", "runs/c"
    )
    run(
        [
            sys.executable,
            str(ROOT / "train_sft.py"),
            *shlex.split(first)[2:],
            *SMALL,
            "data.cache_dir=cache",
            "model.path=scaled",
        ],
        cwd=folder,
    )
    ended["scaled"] = run(
        [sys.executable, *shlex.split(FOLLOW_UPS[2].replace("runs/b", "runs/c"))[1:]],
        cwd=folder,
        returncode=1,
        PYTHONPATH=str(ROOT),
    )
    return ended


def test_the_launches_of_the_pages_train_and_export(ran, folder):
    for out in ("runs/first", "runs/ppo"):
        assert (folder / out / "hf/model.safetensors").is_file() and (
            folder / out / "report.png"
        ).is_file()
    assert (folder / "exported/model.safetensors").is_file() and (
        folder / "merged/model.safetensors"
    ).is_file()
    for out in ("adapter", "runs/adapters/hf"):
        assert (folder / out / "adapter_model.safetensors").is_file() and (
            folder / out / "adapter_config.json"
        ).is_file()
    assert "train_batch" in ran[FOLLOW_UPS[0]].stdout
    said = ran[FOLLOW_UPS[2]].stdout
    assert said.startswith("metrics of step 1 agree") and "\ntrain_batch: " in said


def test_what_the_check_of_a_model_prints(ran, folder):
    (quoted,) = (
        block for block in blocks(PAGES["docs/models.md"], "text") if block.startswith("guard:")
    )
    printed = [
        line
        for line in ran[FOLLOW_UPS[-1]].stdout.splitlines()
        if re.match(r"\w+: .*(apart|value)", line)
    ]
    assert [re.sub(NUMBER, "#", line) for line in printed] == [
        re.sub(NUMBER, "#", line) for line in quoted.splitlines()
    ]
    assert not (folder / "runs/check/check").exists()


def test_the_table_of_families_has_them_all():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", PAGES["docs/models.md"], re.MULTILINE)
    assert rows[2:] == sorted(families.SHAPES)


def test_what_compare_says_of_a_scaled_matrix(ran):
    """Word for word, and its numbers but for rounding, which also decides where the largest of equal differences is."""
    (quoted,) = (
        block for block in blocks(PAGES["docs/profiling.md"], "text") if "diverges at" in block
    )
    (told, said), (numbers, others) = zip(
        *(
            (re.sub(f"{NUMBER}|, at .*", "#", text), [float(x) for x in re.findall(NUMBER, text)])
            for text in (quoted, ran["scaled"].stdout)
        )
    )
    assert told.split() == said.split() and numbers == pytest.approx(others, rel=1e-2, abs=1e-4)


def test_a_runs_directory_holds_what_is_listed(ran, folder):
    listed = next(
        block for block in blocks(PAGES["docs/training.md"], "text") if "metrics.jsonl" in block
    )
    names = {line.split()[0].rstrip("/") for line in listed.splitlines()}
    written = {
        path.relative_to(folder / out).as_posix()
        for out in ("runs/first", "runs/ppo", "runs/a")
        for path in (folder / out).rglob("*")
    }
    for name in names - {"failures.jsonl", "reward_output"}:  # none failed, and none prints
        assert any(Path(path).match(name) for path in written), name


def test_metrics_are_called_what_the_pages_call_them(ran, folder):
    """Those of a table that the runs here do not have are named in the code."""
    logged = {
        name
        for out in ("runs/first", "runs/ppo")
        for line in (folder / out / "metrics.jsonl").read_text().splitlines()
        for name in json.loads(line)
    }
    source = "\n".join(path.read_text() for path in PRODUCT)
    told = [
        name
        for text in PAGES.values()
        for table in re.findall(r"^\| metric \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
        for row in table.splitlines()[2:]
        for name in row.split("|")[1].split(",")
    ]
    assert len(told) > 30
    for name in (name.strip() for name in told):
        assert (
            name in logged
            or re.search("[A-Z]{2}", name)
            or re.search(f'"({name}"|{name.rpartition("/")[2]})', source)
        ), name


def test_stages_are_called_what_the_page_calls_them():
    for script, stages in re.findall(
        r"^\| (train_\w+.py) \| (.*) \|$", PAGES["docs/profiling.md"], re.MULTILINE
    ):
        files = [script, *("rl/roles.py", "rollout/samples.py") * (script == "train_ppo.py")]
        code = "".join((ROOT / file).read_text() for file in files)
        assert set(stages.split(", ")) == set(re.findall(r'\.stage\("(\w+)"', code)), script


# -- what is quoted ----------------------------------------------------------------------------------------------------

QUOTED = [
    (page, quote)
    for page, text in PAGES.items()
    for block in blocks(text, "console")
    for quote in re.findall(r"^\$ (.*(?:\n(?!\$ ).*)*)", block, re.MULTILINE)
]


@pytest.mark.parametrize(
    "page, quote", QUOTED, ids=[f"{page} {quote.splitlines()[0]}" for page, quote in QUOTED]
)
def test_quoted_output_is_what_is_printed(page, quote):
    command, _, printed = quote.partition("\n")
    words = shlex.split(command)
    assert words[0] == "python" and printed
    assert run([sys.executable, *words[1:]], returncode=2).stderr.strip() == printed.strip()


# -- snippets ----------------------------------------------------------------------------------------------------------

# Settings -> the scores of a right and a wrong response, which are a group.
REWARDS = {
    "my_rewards.py:ends_with_answer": [1.0, 0.0],
    "verl_rewards.py:compute_score": [1.0, 0.0],
    "trl_rewards.py:reward": [1.0, 0.0],
    "my_parts.py:parts reward.weights.correct=1.0 reward.weights.short=0.2": [1.2, 0.2],
    "my_rank.py:rank": [1.0, 0.5],
    "my_kwargs.py:solved reward.kwargs.ground_truth=reward_model.ground_truth": [1.0, 0.0],
    "my_judge.py:judge reward.concurrency=32 reward.timeout=60.0 reward.env=[API_KEY]": [1.0, 0.0],
}


@pytest.mark.parametrize("settings", REWARDS)
def test_rewards_of_the_pages(folder, settings, monkeypatch):
    """In their workers; settings are those of a page."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("API_KEY", "secret")
    function, *more = settings.split()
    assert any(settings in text for text in PAGES.values()) or not more
    grader = Grader(
        load(
            "ppo.yaml",
            [
                "model.path=model",
                "data.train_files=train.jsonl",
                f"reward.function={function}",
                *more,
            ],
        )
    )
    row = {
        "answer": 5,
        "data_source": "d",
        "ground_truth": "5",
        "reward_model": {"ground_truth": "5"},
    }
    results = grader.grade([("2+3", text, row) for text in ("5", "6")], [0, 0])
    grader.close()
    assert [round(result.score, 6) for result in results] == REWARDS[settings]


def test_every_snippet_has_the_name_of_a_file():
    assert len(SNIPPETS) >= len(REWARDS) and all(
        re.fullmatch(r"# \w+\.py", code.splitlines()[0]) for _, code in SNIPPETS
    )


def test_rows_of_the_pages_are_read(folder):
    chat = ChatTokenizer(AutoTokenizer.from_pretrained(folder / "model"))
    lines = [
        json.loads(line)
        for text in PAGES.values()
        for block in blocks(text, "json")
        for line in block.splitlines()
    ]
    assert len(lines) > 5
    for row in lines:
        sft = load("sft.yaml", ["model.path=m", "data.train_files=t"]).data
        rl = load("ppo.yaml", ["model.path=m", "data.train_files=t"]).data
        if {"response", "completion", "output", "conversations"} & row.keys() or row.get(
            "messages", [{}]
        )[-1].get("role") == "assistant":
            (tokens,) = in_step([dataset.tokenize_row(row, chat, sft)])
            assert sum(tokens["loss_mask"]) == len("5") + 1, row  # and its end token
        (prompt,) = in_step([prompts.tokenize_row(row, chat, rl)])
        assert json.loads(prompt["record"])["row"] == row


# -- settings ----------------------------------------------------------------------------------------------------------

SETTING = r"(?:[a-z_]+(?:\.[a-z0-9_]+)+|model_engine|output_dir|dry_run)=\S+"
GROUPS = sorted(
    {
        key.partition(".")[0]
        for name in ("sft.yaml", "ppo.yaml")
        for key in OmegaConf.load(ROOT / "configs" / name)
    }
    - {"output_dir", "dry_run", "model_engine"}
    | {"engine"}
)
KEY = rf"(?:{'|'.join(GROUPS)})(?:\.[a-z0-9_]+)+"


def our_side(page: str) -> str:
    """A page without what is another project's: the first column of the tables that translate."""
    return (
        re.sub(r"^\|[^|]*\|", "|", PAGES[page], flags=re.MULTILINE)
        if page.startswith("docs/from_")
        else PAGES[page]
    )


@pytest.mark.parametrize("page", PAGES)
def test_settings_and_keys_exist(page):
    texts = [span for span in inline(our_side(page)) if span.split()[0] not in PROGRAMS]
    for text in texts:
        settings = re.findall(SETTING, text)
        if settings and shlex.join(settings) == shlex.join(text.split()):
            assert any(loads(*kind, settings) for kind in KINDS), f"{page}: {text}"
        elif re.fullmatch(KEY, text):
            assert any(knows(*kind, text) for kind in KINDS), f"{page}: {text}"


KINDS = [(script, engine) for script in ("sft.yaml", "ppo.yaml") for engine in ("fsdp", "megatron")]


def loads(defaults: str, engine: str, settings: list[str]) -> bool:
    try:
        config = load(
            defaults,
            ["model.path=m", "data.train_files=t.jsonl", f"model_engine={engine}", *settings],
        )
        if defaults == "ppo.yaml" and not re.search(
            r"my\.py:name|_kwargs\.", " ".join(settings)
        ):  # of any file of yours
            ppo.check(config)
        return True
    except InputError:
        return False


@cache
def all_keys(defaults: str, engine: str) -> DictConfig:
    return load(defaults, ["model.path=m", "data.train_files=t.jsonl", f"model_engine={engine}"])


def knows(defaults: str, engine: str, key: str) -> bool:
    return (
        OmegaConf.select(all_keys(defaults, engine), key, default=SimpleNamespace)
        is not SimpleNamespace
    )


# -- the pages themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_block_has_a_language_and_no_command_hides(page):
    text = PAGES[page]
    assert {
        language for language in re.findall(r"^```(\w*)\n.*?^```$", text, re.DOTALL | re.MULTILINE)
    } <= set(LANGUAGES)
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "```" not in outside and not re.search(r"^    \S", outside, re.MULTILINE), (
        "an indented block"
    )
    for block in blocks(text, "text"):
        hidden = [
            line for line in block.splitlines() if re.match(rf"({'|'.join(PROGRAMS)}) ", line)
        ]
        assert not hidden, hidden


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", PAGES[page]):
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), target
        headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [
            re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
        ], anchor


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    paths = re.findall(
        r"(?<![\w/.])(?:benchmarks|configs|examples|tests|algorithms)/[\w/.]*\w", PAGES[page]
    )
    made = re.findall(r"^\+\+\+ (.*)", PAGES[page], re.MULTILINE)  # by the edits that a page shows
    assert not [path for path in paths if not (ROOT / path).exists() and path not in made]


def tree_paths(tree: str) -> set[str]:
    """Return the paths in the tree; an indented line lies in the room above it."""
    paths = set()
    room = ""
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            paths.add(room + name)
        else:
            room = name
            paths.add(name)
    return paths


def test_the_tree_names_every_room():
    tree = next(block for block in blocks(PAGES["README.md"], "text") if "train_sft.py " in block)
    assert len(tree.splitlines()) <= 30
    named = tree_paths(tree)
    for name in named:
        assert (ROOT / name).exists(), name
    rooms = {f"{path.parent.relative_to(ROOT)}/" for path in PRODUCT if path.parent != ROOT}
    assert rooms <= named


def test_the_readme_stays_short():
    assert len(PAGES["README.md"].splitlines()) <= 160
