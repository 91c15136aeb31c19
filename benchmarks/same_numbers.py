"""Do two checkouts of this repository compute the same numbers, bit for bit?

    python benchmarks/same_numbers.py OTHER_CHECKOUT [--only NAME ...] [--keep FOLDER]

This is the proof that a refactoring changes nothing. The runs in RUNS, a few steps of tiny models
on one or two CPU processes, are executed in OTHER_CHECKOUT and in the checkout of this script. Then
everything that a run leaves behind is compared:

* every line of metrics.jsonl: the names of the metrics, and the values of those that do not depend
  on the clock or on memory (`depends_on_the_machine`);
* the exported model in hf/, and the responses in rollouts/ and validation/: by their SHA-256.

The result is a Markdown table. The exit code is 1 if anything differs or a run fails, else 0.

Models and data are made once, for both checkouts, by the examples of this checkout and by
transformers. Of each checkout only train_sft.py and train_ppo.py are used, as commands, so its
packages may be laid out in any way. Each checkout tokenizes the data itself, into its own cache.

--keep FOLDER stores the models, the data and the other checkout's results, and later calls reuse
them. Such a folder belongs to one commit of the other checkout; at another commit it is rejected.
Delete it after changing what `make_assets` builds. Several calls may share a folder.

All runs of one checkout take about eight minutes on two idle cores. A busy machine makes them
slower, but does not change what is compared.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
RUN_LIMIT = 1800.0  # seconds, after which a launch is ended and counts as failed
TERMINATION_LIMIT = 60.0  # seconds; torchrun kills its ranks 30 s after SIGTERM
COMPARED_FILES = ("hf/*", "rollouts/*.jsonl", "validation/*.jsonl")
# Values that depend on the clock or on the process's memory. The other metrics in perf/, which are
# perf/plan_efficiency and perf/cp_*, follow from the data.
MACHINE_PREFIXES = ("timing/", "perf/memory_", "perf/rollout_idle")
MACHINE_METRICS = ("perf/tokens_per_second", "perf/mfu")


# ---- the runs ----


@dataclass(frozen=True)
class Run:
    """One training run.

    settings: key=value arguments, in which {assets} stands for the folder with models and data
    steps: trainer.total_steps of each launch; a second launch resumes the first one
    """

    name: str
    script: str
    ranks: int
    settings: tuple[str, ...]
    steps: tuple[int, ...]


SFT = (
    "data.train_files={assets}/train.jsonl",
    "data.val_files={assets}/val.jsonl",
    "data.train_batch_size=8",
    "data.max_length=512",
    "data.max_tokens_per_micro_batch=400",  # two or three micro-batches per rank and step
    "engine.compute_dtype=float32",
    "optim.lr=1e-3",
    "trainer.test_freq=2",
    "trainer.save_minutes=0",
)
PPO = (
    "data.train_files={assets}/prompts.jsonl",
    "data.val_files={assets}/val_prompts.jsonl",
    "data.train_batch_size=8",
    "data.max_prompt_length=40",
    "data.max_tokens_per_micro_batch=400",
    "rollout.n=4",
    "rollout.max_tokens=16",
    "rollout.kv_cache_gib=0.05",
    "validation.max_tokens=16",
    "reward.num_workers=1",
    "reward.timeout=300",  # seconds; a failed reward changes what is learned
    "engine.compute_dtype=float32",
    "optim.lr=1e-3",
    "trainer.test_freq=2",
    "trainer.save_minutes=0",
)
IMAGES = (
    "model.images=true",
    "data.train_files={assets}/colours/few.jsonl",
    "data.val_files={assets}/colours/few_val.jsonl",
    "data.max_tokens_per_micro_batch=1000",
)
LORA = ("model.lora.rank=4", "model.lora.alpha=8")
# Long rows have more tokens than one rank may compute at once, so the ranks have to share them.
DYNAMIC = ("engine.context_parallel_size=auto", "data.max_tokens_per_micro_batch=200")
MEGATRON = "model_engine=megatron"
TENSOR_PARALLEL = (MEGATRON, "engine.tensor_model_parallel_size=2")
PIPELINE_PARALLEL = (
    MEGATRON,
    "engine.pipeline_model_parallel_size=2",
    "engine.virtual_pipeline_model_parallel_size=2",
)
MTP = (MEGATRON, "model.mtp.enable=true", "model.mtp.enable_train=true")
CRITIC = (
    "algorithm.adv_estimator=gae",
    "algorithm.lam=0.95",
    "algorithm.ppo_mini_batch_size=4",
    "critic.lr=1e-3",
)
LETTERS = "reward.function={assets}/rewards.py:letters"
COIN = "reward.function={assets}/rewards.py:coin"


def sft(
    name: str, ranks: int, *settings: str, model: str = "qwen3", steps: tuple[int, ...] = (4,)
) -> Run:
    path = "model.path={assets}/" + model
    return Run(name, "train_sft.py", ranks, (*SFT, path, *settings), steps)


def ppo(
    name: str, ranks: int, *settings: str, model: str = "qwen3", steps: tuple[int, ...] = (3,)
) -> Run:
    path = "model.path={assets}/" + model
    return Run(name, "train_ppo.py", ranks, (*PPO, path, LETTERS, *settings), steps)


RUNS = (
    sft("sft-1-rank", 1),
    sft("sft-2-ranks", 2),
    sft("sft-padded", 2, "engine.use_remove_padding=false"),
    sft(
        "sft-checkpointing",
        2,
        "engine.activation_checkpointing=true",
        "optim.lr_scheduler_type=wsd",
    ),
    sft("sft-lora", 2, *LORA),
    sft("sft-muon", 2, "optim.name=muon"),
    sft("sft-freeze", 2, "model.freeze=['embed_tokens','layers[.]0[.]']"),
    sft("sft-moe", 2, "engine.router_aux_loss_coef=0.01", model="moe"),
    sft("sft-hybrid", 2, model="hybrid"),
    sft("sft-images", 2, *IMAGES, model="colours/model"),
    sft("sft-dynamic-cp", 2, *DYNAMIC),
    sft("sft-resume", 2, steps=(2, 4)),
    sft("megatron-tp2", 2, *TENSOR_PARALLEL),
    sft("megatron-pp2-vpp2", 2, *PIPELINE_PARALLEL, model="deep"),
    sft("megatron-dynamic-cp", 2, MEGATRON, *DYNAMIC),
    sft("megatron-mtp", 2, *MTP, model="arithmetic/mimo"),
    sft("megatron-moe", 2, MEGATRON, "engine.expert_model_parallel_size=2", model="moe"),
    sft("megatron-lora", 2, *TENSOR_PARALLEL, *LORA),
    sft("megatron-resume", 2, *TENSOR_PARALLEL, steps=(2, 4)),
    ppo("grpo", 2),
    ppo(
        "grpo-kl-gspo",
        1,
        "algorithm.use_kl_loss=true",
        "algorithm.loss_mode=gspo",
        "algorithm.clip_ratio_low=3e-4",
        "algorithm.clip_ratio_high=4e-4",
        "algorithm.ppo_mini_batch_size=4",
    ),
    ppo("ppo-critic", 2, *CRITIC, "algorithm.use_kl_in_reward=true"),
    ppo("ppo-resume", 2, *CRITIC, steps=(2, 4)),
    ppo(
        "dapo",
        2,
        COIN,
        "algorithm.clip_ratio_high=0.28",
        "algorithm.filter_groups.enable=true",
        "algorithm.ppo_mini_batch_size=4",
        "reward.overlong_buffer=8",
    ),
    ppo("grpo-top-k", 2, "rollout.top_k=20", "rollout.top_p=0.9", "algorithm.rollout_is=token"),
    ppo("grpo-ngram", 1, "rollout.speculative=ngram", "rollout.temperature=0.2"),
    ppo("grpo-lora", 2, *LORA),
    ppo("grpo-images", 2, *IMAGES, "data.max_prompt_length=60", model="colours/model"),
    ppo("grpo-megatron", 2, *TENSOR_PARALLEL, "rollout.tensor_parallel_size=2"),
    ppo("grpo-mtp", 1, *MTP, "model.mtp.enable_rollout=true", model="arithmetic/mimo"),
)


# ---- models and data, the same for both checkouts ----

REWARDS = '''"""Rewards that differ among the responses of a model with random weights."""


def letters(prompt, response, row):
    """The share of printable ASCII characters."""
    return sum(c.isascii() and c.isprintable() for c in response) / 16


def coin(prompt, response, row):
    """0 or 1, at random, so that in some groups all rewards are equal."""
    return float(sum(response.encode()) % 2)
'''
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM's attention has on a CPU
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 2},
    "deep": {"model_type": "qwen3", "num_hidden_layers": 4},
    "moe": {"model_type": "qwen3_moe", "num_hidden_layers": 2, **EXPERTS},
    "hybrid": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32,
        **EXPERTS,
    },
}


def make_assets(folder: Path) -> None:
    """Write models and data to a folder, unless it has them. `complete` is written last."""
    complete = folder / "complete"
    if complete.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for example in ("arithmetic", "colours"):
        command = [sys.executable, f"examples/{example}.py", "build", str(folder / example)]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    write_data(folder)
    for name, shape in MODELS.items():
        write_model(folder / name, shape, folder / "arithmetic/model")
    (folder / "rewards.py").write_text(REWARDS)
    complete.touch()


def write_data(folder: Path) -> None:
    """Short problems for reinforcement learning; chats of 1 to 7 of them for SFT; a few images."""
    problems = read_lines(folder / "arithmetic/train.jsonl")
    write_lines(folder / "prompts.jsonl", problems[:64])
    write_lines(folder / "val_prompts.jsonl", problems[64:80])
    chats = [make_chat(problems, index) for index in range(84)]
    write_lines(folder / "train.jsonl", chats[:64])
    write_lines(folder / "val.jsonl", chats[64:])
    # Image paths are relative to these files, so they stay in the same folder.
    write_lines(folder / "colours/few.jsonl", read_lines(folder / "colours/train.jsonl")[:64])
    write_lines(folder / "colours/few_val.jsonl", read_lines(folder / "colours/val.jsonl")[:16])


def make_chat(problems: list[dict], index: int) -> dict:
    """A chat with up to 7 problems, so that rows differ in length."""
    num_turns = 1 + index * 3 % 7
    first = 100 + index * 7
    turns = problems[first : first + num_turns]
    messages = [message for problem in turns for message in problem["messages"]]
    return {"messages": messages}


def write_model(directory: Path, shape: dict, tokenizer_directory: Path) -> None:
    """A model whose weights, norms included, are random, with the tokenizer of the demo."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(**SHAPE, **shape, **ids, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- running them ----


@dataclass
class Outcome:
    """How a run ended. A later call compares `definition` with the run's current one."""

    definition: str
    exit_code: int
    seconds: float


@dataclass
class Side:
    """One of the two checkouts.

    results: a folder that has one for each run, with its outcome.json, its logs and its output
    """

    title: str
    checkout: Path
    results: Path

    def output(self, run: Run) -> Path:
        return self.results / run.name / "out"

    def outcome(self, run: Run) -> Outcome | None:
        """How the run ended; None if it has not been run."""
        path = self.results / run.name / "outcome.json"
        if not path.exists():
            return None
        return Outcome(**json.loads(path.read_text()))


def environment() -> dict[str, str]:
    """This process's environment without the variables of Slurm and without PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    kept.pop("PYTHONPATH", None)
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def execute(run: Run, side: Side, assets: Path) -> Outcome:
    """Run it in the checkout. What is compared stays in side.results; checkpoints do not."""
    folder = side.results / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    exit_code = 0
    for number, total_steps in enumerate(run.steps, 1):
        command = launch_command(run, side, assets, total_steps)
        exit_code = launch(command, side.checkout, folder / f"log_{number}.txt")
        if exit_code != 0:
            break
    shutil.rmtree(side.output(run) / "checkpoints", ignore_errors=True)
    outcome = Outcome(definition_of(run), exit_code, time.monotonic() - start)
    (folder / "outcome.json").write_text(json.dumps(asdict(outcome)) + "\n")
    ending = "" if exit_code == 0 else f"  failed: exit code {exit_code}, see {folder}"
    print(f"{side.title:5}  {run.name:20} {outcome.seconds:6.1f} s{ending}", flush=True)
    return outcome


def definition_of(run: Run) -> str:
    """A run as text, which does not depend on where its assets and results are."""
    return json.dumps(asdict(run))


def launch_command(run: Run, side: Side, assets: Path, total_steps: int) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    settings = [setting.replace("{assets}", str(assets)) for setting in run.settings]
    return [
        *torchrun,
        "--nproc-per-node",
        str(run.ranks),
        run.script,
        *settings,
        f"data.cache_dir={side.results}/cache",
        f"output_dir={side.output(run)}",
        f"trainer.total_steps={total_steps}",
    ]


def launch(command: list[str], checkout: Path, log: Path) -> int:
    """Run a command and return its exit code. It is ended if it takes too long."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            command,
            cwd=checkout,
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # on Ctrl-C, this script ends the run itself
        )
        try:
            return process.wait(RUN_LIMIT)
        except subprocess.TimeoutExpired:
            file.write(f"\nended after {RUN_LIMIT:.0f} s\n")
            return 1
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End torchrun, if it is still there. SIGTERM first: only then does it end its ranks."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(TERMINATION_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---- comparing what they left ----


@dataclass
class Comparison:
    """How much was compared, and the first difference, or None."""

    num_metrics: int = 0
    num_files: int = 0
    difference: str | None = None


def depends_on_the_machine(name: str) -> bool:
    """Whether a metric depends on the clock or on memory."""
    return name.startswith(MACHINE_PREFIXES) or name in MACHINE_METRICS


def compare(run: Run, other: Side, own: Side) -> Comparison:
    comparison = Comparison()
    for side in (other, own):
        exit_code = side.outcome(run).exit_code
        if exit_code != 0:
            comparison.difference = f"failed in the {side.title} checkout, exit code {exit_code}"
            return comparison
    compare_metrics(other.output(run), own.output(run), comparison)
    if comparison.difference is None:
        compare_files(other.output(run), own.output(run), comparison)
    return comparison


def compare_metrics(other: Path, own: Path, comparison: Comparison) -> None:
    """Compare metrics.jsonl up to the first difference."""
    other_lines = read_lines(other / "metrics.jsonl")
    own_lines = read_lines(own / "metrics.jsonl")
    for other_line, own_line in zip(other_lines, own_lines):
        compare_lines(other_line, own_line, comparison)
        if comparison.difference is not None:
            return
    if len(other_lines) != len(own_lines):
        comparison.difference = f"metrics.jsonl has {len(other_lines)} lines, {len(own_lines)}"


def compare_lines(other: dict, own: dict, comparison: Comparison) -> None:
    """Compare the metrics of one step up to the first difference."""
    step = other["step"]
    only_other = sorted(other.keys() - own.keys())
    only_own = sorted(own.keys() - other.keys())
    if only_other or only_own:
        comparison.difference = f"step {step}: only in other {only_other}, only in own {only_own}"
        return
    for name, value in other.items():
        if depends_on_the_machine(name):
            continue
        comparison.num_metrics += 1
        # As text, in which two floats are equal if and only if their bits are.
        other_value = json.dumps(value)
        own_value = json.dumps(own[name])
        if other_value != own_value:
            comparison.difference = f"step {step}: {name} {other_value}, {own_value}"
            return


def compare_files(other: Path, own: Path, comparison: Comparison) -> None:
    """Compare the other files up to the first difference."""
    other_digests = digests(other)
    own_digests = digests(own)
    for name in sorted(other_digests | own_digests):
        comparison.num_files += 1
        other_digest = other_digests.get(name, "missing")
        own_digest = own_digests.get(name, "missing")
        if other_digest != own_digest:
            comparison.difference = f"{name}: {other_digest[:12]}, {own_digest[:12]}"
            return


def digests(output: Path) -> dict[str, str]:
    """The SHA-256 of all compared files, by their paths within the run's directory."""
    result = {}
    for pattern in COMPARED_FILES:
        for path in output.glob(pattern):
            if path.is_file():
                name = str(path.relative_to(output))
                result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return result


def print_table(runs: list[Run], comparisons: list[Comparison]) -> None:
    print("\n| run | steps | metrics compared | files | first difference: other, own |")
    print("|---|---|---|---|---|")
    for run, comparison in zip(runs, comparisons):
        steps = " + ".join(map(str, run.steps))
        difference = comparison.difference or "same"
        counts = f"{comparison.num_metrics} | {comparison.num_files}"
        print(f"| {run.name} | {steps} | {counts} | {difference} |")


# ---- the command ----


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def is_modified(checkout: Path) -> bool:
    command = ["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout != ""


def check_kept(folder: Path, checkout: Path) -> None:
    """Exit unless the folder's results are of the checkout's commit, or it has none yet."""
    if is_modified(checkout):
        sys.exit(
            f"error: {checkout} has uncommitted changes, so results would be kept under the wrong "
            "commit: commit them, or leave out --keep"
        )
    commit = commit_of(checkout)
    record = folder / "commit"
    if not record.exists():
        record.write_text(commit + "\n")
    kept = record.read_text().strip()
    if kept != commit:
        sys.exit(
            f"error: {folder} has results of commit {kept}, but {checkout} is at {commit}: "
            "give another folder to --keep, or check out that commit"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time writes to the folder."""
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_other(runs: list[Run], other: Side, assets: Path) -> None:
    """Run in the other checkout what has not succeeded there yet."""
    for run in runs:
        outcome = other.outcome(run)
        succeeded = outcome is not None and outcome.exit_code == 0
        if not succeeded or outcome.definition != definition_of(run):
            execute(run, other, assets)


def parse_arguments() -> argparse.Namespace:
    names = [run.name for run in RUNS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout to compare this one with")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"the runs to compare, of {', '.join(names)}",
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="where models, data and the other checkout's results are kept for later calls",
    )
    return parser.parse_args()


def stop(signal_number: int, frame: FrameType | None) -> None:
    """End as on Ctrl-C, so that the run in progress is killed too."""
    sys.exit(128 + signal_number)


def describe(side: Side, runs: list[Run]) -> str:
    seconds = sum(side.outcome(run).seconds for run in runs)
    changes = " with uncommitted changes" if is_modified(side.checkout) else ""
    commit = commit_of(side.checkout)[:9]
    return f"{side.title}: {side.checkout} at {commit}{changes}, {seconds:.0f} s"


def compare_checkouts(
    runs: list[Run], other_checkout: Path, kept: Path, is_kept: bool, work: Path
) -> int:
    """Run what is missing, print the table, and return how many runs differ or failed.

    kept: the folder for assets and the other checkout's results
    is_kept: whether later calls will use it again
    work: the folder for this checkout's results
    """
    other = Side("other", other_checkout, kept / "other")
    own = Side("own", ROOT, work / "own")
    assets = kept / "assets"
    with locked(kept):
        if is_kept:
            check_kept(kept, other_checkout)
        make_assets(assets)
        run_other(runs, other, assets)
    for run in runs:
        execute(run, own, assets)

    comparisons = [compare(run, other, own) for run in runs]
    print_table(runs, comparisons)
    print()
    for side in (other, own):
        print(describe(side, runs))
    return sum(comparison.difference is not None for comparison in comparisons)


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    runs = [run for run in RUNS if run.name in arguments.only]
    work = Path(tempfile.mkdtemp(prefix="same_numbers_"))
    kept = arguments.keep.resolve() if arguments.keep else work / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    is_kept = arguments.keep is not None
    num_different = 0
    try:
        num_different = compare_checkouts(runs, arguments.other.resolve(), kept, is_kept, work)
    finally:
        if num_different == 0:
            shutil.rmtree(work)
    if num_different:
        sys.exit(f"{num_different} of {len(runs)} runs differ or failed; their output is in {work}")


if __name__ == "__main__":
    main()
