"""Run recipes of examples/recipes over several seeds, collect their curves, and draw them.

    python -m benchmarks.recipes run --out results.json --seeds 0 1 2 --jobs-per-gpu 4 \\
        sums_grpo sums_dapo trainer.total_steps=100
    python -m benchmarks.recipes draw results.json --metric score/mean --out docs/images/sums.png
    python -m benchmarks.recipes draw results.json trl.json --metric score/mean --seconds \\
        --out docs/images/sums_beside_trl.png

`run` starts one process per recipe and seed, several at a time on every GPU. Settings of the form
key=value go to all of them. The file that it writes has one entry per run: recipe, seed, seconds of
wall time, and the metrics of every step. It is rewritten whenever a run ends, so that an
interrupted call loses nothing. If a run fails, its last lines are printed, the other runs
continue, and the exit code is 1.

Some recipes read the models that other recipes export. They get those of the same seed, which this
call or an earlier one has trained: runs/recipes/NAME/seed_SEED/hf. If this call trains both, the
second run waits for the first one, and is not started if the first one fails.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.harness import (
    ROOT,
    make_parser,
    print_header,
    print_row,
    read_metrics,
    torchrun_command,
)
from benchmarks.recipe_curves import draw, read_curves
from configs.files import flatten

RECIPES = ROOT / "examples" / "recipes"
# The scripts of recipes whose names end like this; the others are for train_ppo.py.
SCRIPTS = {
    "sft": "train_sft.py",
    "dpo": "train_dpo.py",
    "ipo": "train_dpo.py",
    "kto": "train_dpo.py",
    "simpo": "train_dpo.py",
    "orpo": "train_dpo.py",
    "rm": "train_rm.py",
    "loop": "examples/loop.py",
    "play": "examples/self_play.py",
}
# A recipe that only contains what differs from another one differs from the one with this name.
BASES = {"train_sft.py": "sft", "train_dpo.py": "dpo", "train_rm.py": "rm"}
# Of the log of a run that failed: some 40 lines are torchrun's own.
NUM_LAST_LINES = 80
# The model that another recipe exports.
EXPORT = re.compile(r"runs/recipes/(\w+)/hf")
# The scores of validations have the name of the reward function, or of the episode's.
SCORES = (
    "val/rewards/accuracies",
    "val/accuracy",
    "val/score",
    "val/score_and_format",
    "val/score_and_bare_number",
    "val/score_lines",
    "val/solve",
    "val/play",
)
# Kept per step; the rest of metrics.jsonl stays in the run's own folder.
KEPT = (
    "step",
    "score/mean",
    "reward/correct/mean",
    "reward/format/mean",
    "reward/bare/mean",
    "reward/model/mean",
    "response_length/mean",
    "response_length/clip_ratio",
    "episodes/turns/mean",
    "episodes/tool_calls/mean",
    "episodes/limited",
    "episodes/vllm_idle",
    "reward/informative_groups",
    "actor/entropy",
    "actor/grad_norm",
    "rollout_corr/log_prob_gap",
    "rollout_corr/routing_mismatch",
    "response_length/max",
    "partial/age_0/tokens",
    "partial/carried_groups",
    "partial/stale_drops",
    "distill/divergence",
    "distill/divergence/chain_sum",
    "distill/divergence/gsm_symbolic",
    "game/winnings",
    "game/against_frozen",
    "actor/lr",
    "train/loss",
    "train/lr",
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "train/accuracy",
    "train/margin",
    "logps/chosen",
    "perf/memory_peak_gib",
    "perf/tokens_per_second",
)


@dataclass
class Run:
    """One run of a recipe.

    Attributes:
        recipe: the name of its file in examples/recipes, without .yaml.
        seed: trainer.seed.
        metrics: for every step, the metrics of KEPT, those of the validation, and all timings.
        seconds: wall time from the start of the process to its end.
        exit_code: of the process; 0 if the run ended well.
    """

    recipe: str
    seed: int
    metrics: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    exit_code: int | None = None

    @property
    def name(self) -> str:
        return f"{self.recipe}/seed_{self.seed}"

    @property
    def folder(self) -> Path:
        return ROOT / "runs" / "recipes" / self.recipe / f"seed_{self.seed}"

    @property
    def script(self) -> str:
        return SCRIPTS.get(self.recipe.rpartition("_")[2], "train_ppo.py")

    @property
    def files(self) -> list[Path]:
        """The files of the recipe: its own, after the one that it differs from."""
        own = RECIPES / f"{self.recipe}.yaml"
        task = self.recipe.partition("_")[0]
        base = RECIPES / f"{task}_{BASES.get(self.script, 'grpo')}.yaml"
        return [base, own] if base.exists() and base != own else [own]

    def exports(self) -> dict[str, "Run"]:
        """Return the runs whose exports this recipe reads, by the keys that name them."""
        config = OmegaConf.unsafe_merge(*map(OmegaConf.load, self.files))
        found = {key: EXPORT.fullmatch(str(value)) for key, value in flatten(config).items()}
        return {key: Run(match[1], self.seed) for key, match in found.items() if match}

    @cached_property
    def needed_names(self) -> set[str]:
        """The names of the runs whose exports this recipe reads."""
        return {run.name for run in self.exports().values()}

    def command(self, settings: list[str]) -> list[str]:
        """Return the command of the recipe's header, with this seed and folder."""
        models = [f"{key}={run.folder}/hf" for key, run in self.exports().items()]
        return [
            *torchrun_command(1),
            self.script,
            *map(str, self.files),
            f"trainer.seed={self.seed}",
            f"output_dir={self.folder}",
            *models,
            *settings,
        ]


def kept(metrics: dict) -> dict:
    """Return the metrics of a step that the results keep."""
    return {
        name: value
        for name, value in metrics.items()
        if name in KEPT or name.startswith(("val/", "timing/"))
    }


def execute(run: Run, settings: list[str], gpu: int | None, deadline: float) -> None:
    """Run a recipe to its end, or to the deadline, and fill in its results."""
    run.folder.mkdir(parents=True, exist_ok=True)
    log = run.folder / "log.txt"
    visible = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            run.command(settings),
            env={**os.environ, "OMP_NUM_THREADS": "1", **visible},
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(max(0.0, deadline - start))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            exit_code = process.wait()
    run.seconds = time.perf_counter() - start
    # The export in hf/ stays.
    shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    metrics = run.folder / "metrics.jsonl"
    if metrics.exists():
        run.metrics = [kept(line) for line in read_metrics(metrics)]
    if exit_code:
        lines = log.read_text(errors="replace").splitlines()
        last_lines = "\n".join(lines[-NUM_LAST_LINES:])
        print(f"{run.name} failed with exit code {exit_code}:\n{last_lines}", flush=True)
    run.exit_code = exit_code  # last, because it says that the run has ended


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run_all(arguments: argparse.Namespace) -> list[Run]:
    """Execute every recipe with every seed, `jobs_per_gpu` at a time on each GPU.

    Runs start in their order, but a run that needs the export of another one waits for it.
    """
    names = [text for text in arguments.names if "=" not in text]
    settings = [text for text in arguments.names if "=" in text]
    runs = [Run(name, seed) for name in names for seed in arguments.seeds]
    gpus = arguments.gpus or list(range(num_gpus())) or [None]
    free_gpus = gpus * arguments.jobs_per_gpu
    deadline = time.perf_counter() + arguments.time_limit
    waiting = list(runs)
    running: dict[Future, tuple[Run, int | None]] = {}
    # A run may end at any moment. Here are those that this thread knows to have ended.
    ended: list[Run] = []
    with ThreadPoolExecutor(len(free_gpus)) as pool:
        while waiting or running:
            ended += give_up_without_models(waiting, ended)
            unfinished = {run.name for run in runs} - {run.name for run in ended}
            while free_gpus and (run := first_ready(waiting, unfinished)):
                waiting.remove(run)
                gpu = free_gpus.pop(0)
                running[pool.submit(execute, run, settings, gpu, deadline)] = (run, gpu)
            completed, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in completed:
                run, gpu = running.pop(future)
                future.result()
                free_gpus.append(gpu)
                ended.append(run)
                print(f"{run.name}: {run.seconds:.0f} s", flush=True)
            done = [asdict(run) for run in runs if run.exit_code is not None]
            arguments.out.write_text(json.dumps(done))
    return runs


def first_ready(waiting: list[Run], unfinished: set[str]) -> Run | None:
    """Return the first run whose models have been exported; None if all have to wait."""
    for run in waiting:
        if not run.needed_names & unfinished:
            return run
    return None


def give_up_without_models(waiting: list[Run], ended: list[Run]) -> list[Run]:
    """Return the waiting runs whose models were not exported, which fail, and stop waiting.

    Otherwise they would read what an earlier call has left in the folder.
    """
    failed = {run.name for run in ended if run.exit_code}
    given_up = [run for run in waiting if run.needed_names & failed]
    for run in given_up:
        waiting.remove(run)
        run.exit_code = 1
        missing = ", ".join(sorted(run.needed_names & failed))
        print(f"{run.name} is not started: {missing} failed", flush=True)
    return given_up


def first_and_last(run: Run, name: str) -> str:
    """Return the first and the last value of a metric, as text.

    `val/score` stands for any name in SCORES.
    """
    values = [value for line in run.metrics for key, value in line.items() if matches(key, name)]
    return f"{values[0]:.3f} -> {values[-1]:.3f}" if values else "-"


def matches(key: str, name: str) -> bool:
    """Return whether a metric is the named one; see first_and_last()."""
    return key == name or (name == "val/score" and key in SCORES)


def print_table(runs: list[Run]) -> None:
    names = ("val/score", "val/loss", "score/mean")
    print_header("run", "seconds", *names)
    for run in runs:
        print_row(run.name, f"{run.seconds:.0f}", *[first_and_last(run, name) for name in names])


def check_names(names: list[str], parser: argparse.ArgumentParser) -> None:
    """End with an error message if a word is neither a recipe nor a setting."""
    for name in names:
        if "=" not in name and not (RECIPES / f"{name}.yaml").exists():
            parser.error(f"{name} is not a recipe: choose a name from {RECIPES}")


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run", help="run recipes and write their curves")
    command.add_argument("names", nargs="+", metavar="RECIPE or key=value")
    command.add_argument("--out", type=Path, required=True, help="the file of results")
    command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    command.add_argument("--jobs-per-gpu", type=int, default=1)
    command.add_argument(
        "--gpus", type=int, nargs="+", help="their numbers; all of them by default"
    )
    command.add_argument(
        "--time-limit", type=float, default=1e9, help="seconds, after which all runs are killed"
    )
    command = commands.add_parser("draw", help="draw metrics of result files over steps")
    command.add_argument(
        "results", type=Path, nargs="+", help="files of `run`, or of benchmarks/trl_grpo.py --out"
    )
    command.add_argument("--metric", required=True, nargs="+", help="one panel for each")
    command.add_argument("--window", type=int, default=1, help="steps of the running mean")
    command.add_argument(
        "--seconds", action="store_true", help="also draw them over the seconds of all steps"
    )
    command.add_argument("--out", type=Path, required=True, help="the picture")
    arguments = parser.parse_args()
    if arguments.command == "draw":
        figure = draw(read_curves(arguments.results), arguments)
        figure.savefig(arguments.out, dpi=120)
        return
    check_names(arguments.names, parser)
    runs = run_all(arguments)
    print_table(runs)
    sys.exit(any(run.exit_code for run in runs))


if __name__ == "__main__":
    main()
