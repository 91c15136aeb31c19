"""Some commands of README.md and docs/ run for real, at small sizes, and their output is compared.

Compared with the pages are the files in a run's directory, the names of metrics and stages, and
the quoted reports of engines.check and profiling.compare.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.repository.pages import COMMANDS, PAGES, block_containing
from tests.repository.test_house import PRODUCT
from tests.support.launch import ROOT, run

SMALL = [
    "data.train_batch_size=8",
    "data.max_tokens_per_micro_batch=512",
    "engine.compute_dtype=float32",
    "trainer.total_steps=2",
    "data.cache_dir=cache",
]
SMALL_PPO = [
    *SMALL,
    "data.max_prompt_length=40",
    "rollout.max_tokens=12",
    "rollout.kv_cache_gib=0.05",
    "reward.num_workers=1",
]
# The launches that run: the page and the first words of the command.
SFT = ("README.md", "torchrun --nproc-per-node 8 train_sft.py model.path")
PPO = ("README.md", "torchrun --nproc-per-node 8 train_ppo.py model.path")
RUN_A = ("docs/profiling.md", "python train_sft.py my.yaml output_dir=runs/a")
RUN_B = ("docs/profiling.md", "python train_sft.py my.yaml output_dir=runs/b")
LORA = ("docs/lora.md", "torchrun --nproc-per-node 8 train_sft.py my.yaml model.lora.rank")
# Commands that then run on the results of the launches.
REPORT = "python -m profiling.report runs/first"
COMPARE = "python -m profiling.compare runs/a runs/b --step 1 --stage train_batch"
CHECK = (
    "python -m engines.check model.path=model engine.compute_dtype=float32 output_dir=runs/check"
)
EXPORT = "python -m engines.checkpoint export"
FOLLOW_UPS = [
    REPORT,
    f"{EXPORT} runs/first/checkpoints/step_00000500 exported",
    COMPARE,
    f"{EXPORT} runs/adapters/checkpoints/step_00000500 adapter",
    f"{EXPORT} runs/adapters/checkpoints/step_00000500 merged --merge",
    CHECK,
]
# A part of a page's command -> its replacement in the run.
REPLACEMENTS = {
    "--nproc-per-node 8": "--nproc-per-node 2",
    "Qwen/Qwen2.5-7B-Instruct": "model",
    "Qwen/Qwen2.5-7B": "model",
    "step_00000500": "step_00000002",
}
PROGRAMS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
    "python": [sys.executable],
}
NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)"  # but not the 1 of layers.1


def command_of(page: str, first_words: str) -> str:
    """Return the command of a page that begins with these words."""
    return next(
        command for where, command in COMMANDS if where == page and command.startswith(first_words)
    )


def run_launch(command: str, folder: Path, *settings: str) -> subprocess.CompletedProcess:
    """Run a launch at a small size, in a directory outside of the repository."""
    for old, new in REPLACEMENTS.items():
        command = command.replace(old, new)
    program, *words = shlex.split(command)
    small = SMALL_PPO if "train_ppo.py" in words else SMALL
    words = [str(ROOT / word) if word.startswith("train_") else word for word in words]
    return run([*PROGRAMS[program], *words, *small, *settings], cwd=folder)


def run_follow_up(command: str, folder: Path, returncode=0) -> subprocess.CompletedProcess:
    words = shlex.split(command.replace("step_00000500", "step_00000002"))
    python = [sys.executable, *words[1:]]
    return run(python, returncode, cwd=folder, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def results(docs_folder) -> dict[str, subprocess.CompletedProcess]:
    """Run all launches, then the follow-ups; return the follow-ups' results by their commands."""
    for page, first_words in (SFT, PPO, RUN_A, RUN_B, LORA):
        run_launch(command_of(page, first_words), docs_folder)
    return {command: run_follow_up(command, docs_folder) for command in FOLLOW_UPS}


@pytest.fixture(scope="module")
def scaled_report(results, docs_folder) -> str:
    """Return the comparison of run A with a run whose model has one matrix scaled by 1.01."""
    shutil.copytree(docs_folder / "model", docs_folder / "scaled")
    weights = load_file(docs_folder / "model/model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"] *= 1.01
    save_file(weights, docs_folder / "scaled/model.safetensors", metadata={"format": "pt"})
    run_a = command_of(*RUN_A)
    run_launch(run_a.replace("runs/a", "runs/c"), docs_folder, "model.path=scaled")
    compare = COMPARE.replace("runs/b", "runs/c")
    return run_follow_up(compare, docs_folder, returncode=1).stdout


@pytest.mark.slow
@pytest.mark.parametrize("out", ["runs/first", "runs/ppo"])
def test_a_run_exports_its_model_and_a_report(results, docs_folder, out):
    assert (docs_folder / out / "hf/model.safetensors").is_file()
    assert (docs_folder / out / "report.png").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("out", ["exported", "merged"])
def test_a_checkpoint_is_exported(results, docs_folder, out):
    assert (docs_folder / out / "model.safetensors").is_file()
    exports = [done for command, done in results.items() if f" {out}" in command]
    assert exports[0].stdout.splitlines()[-1] == f"model: {out}"
    assert "Warning" not in exports[0].stderr


@pytest.mark.slow
@pytest.mark.parametrize("out", ["adapter", "runs/adapters/hf"])
def test_an_adapter_is_exported(results, docs_folder, out):
    assert (docs_folder / out / "adapter_model.safetensors").is_file()
    assert (docs_folder / out / "adapter_config.json").is_file()
    export = f"{EXPORT} runs/adapters/checkpoints/step_00000500 adapter"
    assert results[export].stdout.splitlines()[-1] == "adapter: adapter"


@pytest.mark.slow
def test_report_and_comparison_of_the_runs(results):
    assert "train_batch" in results[REPORT].stdout
    comparison = results[COMPARE].stdout
    assert comparison.startswith("metrics of step 1 agree")
    assert "\ntrain_batch: " in comparison


@pytest.mark.slow
def test_engines_check_prints_the_quoted_lines(results, docs_folder):
    """Numbers may differ."""
    quoted = block_containing("docs/models.md", "text", "guard ").splitlines()
    output = results[CHECK].stdout.splitlines()
    printed = [line for line in output if re.match(r"\w+ +(ok|--) ", line)]
    hide_numbers = re.compile(NUMBER)
    assert [hide_numbers.sub("#", line) for line in printed] == [
        hide_numbers.sub("#", line) for line in quoted
    ]
    assert not (docs_folder / "runs/check/check").exists()


def words_and_numbers(report: str) -> tuple[list[str], list[float]]:
    """Split a comparison into its words and its numbers.

    Rounding decides where the largest of equal differences is, so its place is left out.
    """
    words = re.sub(f"{NUMBER}|, at .*", "#", report).split()
    numbers = [float(number) for number in re.findall(NUMBER, report)]
    return words, numbers


@pytest.mark.slow
def test_compare_finds_a_scaled_matrix_as_quoted(scaled_report):
    quoted = block_containing("docs/profiling.md", "text", "diverges at")
    quoted_words, quoted_numbers = words_and_numbers(quoted)
    words, numbers = words_and_numbers(scaled_report)
    assert words == quoted_words
    assert numbers == pytest.approx(quoted_numbers, rel=1e-2, abs=1e-4)


@pytest.mark.slow
def test_a_runs_directory_holds_the_listed_files(results, docs_folder):
    listed = block_containing("docs/training.md", "text", "metrics.jsonl")
    names = {line.split()[0].rstrip("/") for line in listed.splitlines()}
    written = set()
    for out in ("runs/first", "runs/ppo", "runs/a"):
        paths = (docs_folder / out).rglob("*")
        written |= {path.relative_to(docs_folder / out) for path in paths}
    # In these runs no reward fails or prints.
    for name in names - {"failures.jsonl", "reward_output"}:
        assert any(path.match(name) for path in written), name


def metrics_of_the_tables() -> list[str]:
    """Return the metrics in the first columns of all tables of metrics."""
    names = []
    for text in PAGES.values():
        for table in re.findall(r"^\| metric \|.*\n(?:\|.*\n)+", text, re.MULTILINE):
            for row in table.splitlines()[2:]:
                names += row.split("|")[1].split(",")
    return [name.strip() for name in names]


@pytest.mark.slow
def test_runs_log_the_metrics_of_the_tables(results, docs_folder):
    """A metric that these runs do not have is at least named in the code."""
    logged = set()
    for out in ("runs/first", "runs/ppo"):
        for line in (docs_folder / out / "metrics.jsonl").read_text().splitlines():
            logged |= json.loads(line).keys()
    files = [*PRODUCT, ROOT / "examples/self_play.py"]
    source = "\n".join(path.read_text() for path in files)
    names = metrics_of_the_tables()
    assert len(names) > 30
    for name in names:
        has_placeholder = re.search("[A-Z]{2}", name)
        last_part = name.rpartition("/")[2]
        is_in_code = re.search(f'"({name}"|{last_part})', source)
        assert name in logged or has_placeholder or is_in_code, name


STAGES = re.findall(r"^\| train_(\w+).py \| (.*) \|$", PAGES["docs/profiling.md"], re.MULTILINE)
ROOMS_WITH_STAGES = {
    "sft": [],
    "dpo": ["preferences"],
    "rm": ["reward_models"],
    "ppo": ["rl", "rollout"],
}


@pytest.mark.parametrize("loop, stages", STAGES)
def test_the_code_has_the_stages_of_the_table(loop, stages):
    files = [ROOT / f"train_{loop}.py"]
    for room in ROOMS_WITH_STAGES[loop]:
        files += (ROOT / room).rglob("*.py")
    code = "".join(path.read_text() for path in files)
    assert set(stages.split(", ")) == set(re.findall(r'\.stage\("(\w+)"', code))


def test_all_loops_have_a_table_of_stages():
    assert len(STAGES) == 4
