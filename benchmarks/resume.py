"""Compare a run that is killed and resumed on half of the ranks with one that is not interrupted.

    python benchmarks/resume.py 4 [--steps 12] [--rows 1000] [key=value ...]

Both train the model of make_sft_data.py with train_sft.py and save a checkpoint halfway. One is
killed with SIGKILL at least a step later, and resumed on half of the ranks. Prints the loss of
every step of both, as a Markdown table, and the largest difference.
"""

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    ROOT,
    add_settings,
    make_parser,
    print_header,
    print_row,
    read_metrics,
    run_quietly,
    torchrun_command,
)
from benchmarks.ppo_h200 import kill

SECONDS_BETWEEN_LOOKS = 0.02


@dataclass(frozen=True)
class Training:
    """A run of train_sft.py.

    Attributes:
        folder: its output.
        settings: key=value pairs that all runs share.
    """

    folder: Path
    settings: list[str]

    def command(self, num_ranks: int) -> list[str]:
        script = str(ROOT / "train_sft.py")
        out = f"output_dir={self.folder}"
        return [*torchrun_command(num_ranks), script, *self.settings, out]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step. A step that was taken twice counts once, the later time."""
        file = self.folder / "metrics.jsonl"
        lines = read_metrics(file) if file.exists() else []
        return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}

    def run(self, num_ranks: int) -> None:
        run_quietly(self.command(num_ranks))

    def kill_after(self, step: int, num_ranks: int) -> None:
        """Start the run and kill it once this step is in its metrics."""
        log = self.folder.with_suffix(".log")
        with open(log, "w") as output:
            run = subprocess.Popen(self.command(num_ranks), stdout=output, stderr=output)
        while run.poll() is None and step not in self.losses():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        kill(run)
        if step not in self.losses():
            sys.exit(f"error: the run ended before step {step}, see {log}")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("num_ranks", type=int)
    add_settings(parser)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--assets", type=Path, default=Path("/tmp/rankwise-resume"))
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    folder = arguments.assets
    maker = ROOT / "benchmarks" / "make_sft_data.py"
    run_quietly([sys.executable, maker, folder, "--rows", str(arguments.rows)])
    half = arguments.steps // 2
    settings = [
        f"model.path={folder}/model",
        f"data.train_files={folder}/train.jsonl",
        f"data.cache_dir={folder}/cache",
        "data.train_batch_size=32",
        f"trainer.total_steps={arguments.steps}",
        f"trainer.save_freq={half}",
        *arguments.settings,
    ]
    trainings = {}
    for name in ("undisturbed", "killed"):
        shutil.rmtree(folder / name, ignore_errors=True)
        trainings[name] = Training(folder / name, settings)
    trainings["undisturbed"].run(arguments.num_ranks)
    trainings["killed"].kill_after(half + 1, arguments.num_ranks)
    trainings["killed"].run(arguments.num_ranks // 2)
    expected = trainings["undisturbed"].losses()
    resumed = trainings["killed"].losses()
    print_header("run", "ranks", *(f"step {step}" for step in expected))
    ranks = str(arguments.num_ranks)
    print_row("undisturbed", ranks, *(f"{loss:.4f}" for loss in expected.values()))
    ranks = f"{ranks}, then {arguments.num_ranks // 2} from step {half + 1}"
    print_row("killed", ranks, *(f"{resumed[step]:.4f}" for step in expected))
    largest = max(abs(expected[step] - resumed[step]) for step in expected)
    print(f"largest difference: {largest:.1e}")


if __name__ == "__main__":
    main()
