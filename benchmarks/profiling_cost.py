"""The cost of each profiling tool: time relative to a plain step, and disk space per step.

    # after `make demo-assets`
    OMP_NUM_THREADS=1 python benchmarks/profiling_cost.py runs/demo/model runs/demo/train.jsonl
    # on a GPU
    python benchmarks/profiling_cost.py MODEL TRAIN_FILE key=value ...
    # some tools only
    python benchmarks/profiling_cost.py MODEL TRAIN_FILE --tools torch memory

Runs train_sft.py once for each tool, for eight steps, and records the second half of them. The
times are from train_batch: the median of the last three steps of each half. Tools that this
machine does not have are left out.
"""

import argparse
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, add_settings, make_parser, read_lines

STEPS = 8
FIRST_RECORDED = 5
COUNTED = 3  # steps of each half
TOOLS = {
    "timers alone": [],
    "torch": ["profiler.tool=torch"],
    "torch, shapes, stacks, memory": [
        "profiler.tool=torch",
        "profiler.torch.record_shapes=true",
        "profiler.torch.with_stack=true",
        "profiler.torch.profile_memory=true",
    ],
    "memory": ["profiler.tool=memory"],
    "nvtx (without nsys)": ["profiler.tool=nvtx"],
    **{
        f"msprobe {task} {level}": [
            "profiler.tool=msprobe",
            f"profiler.msprobe.task={task}",
            f"profiler.msprobe.level={level}",
            "profiler.msprobe.stages=[train_batch]",
        ]
        for task in ("statistics", "tensor")
        for level in ("L0", "L1", "mix")
    },
}


@dataclass(frozen=True)
class Cost:
    """Seconds of a plain step and of a recorded one, and bytes on disk per recorded step."""

    plain: float
    recorded: float
    num_bytes: float


def measure(arguments: argparse.Namespace, tool: list[str]) -> Cost | None:
    """Run with a tool's settings. Returns None if this machine lacks the tool."""
    interval = []
    if tool:
        interval = [f"trainer.profile_interval=[{FIRST_RECORDED},{STEPS}]"]
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            str(ROOT / "train_sft.py"),
            f"model.path={arguments.model}",
            f"data.train_files={arguments.train_file}",
            f"output_dir={out}",
            "data.train_batch_size=32",
            "data.max_tokens_per_micro_batch=2048",
            f"trainer.total_steps={STEPS}",
            "engine.torch_compile=never",
            *tool,
            *interval,
            *arguments.settings,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 2:
            print(f"    left out: {done.stderr.splitlines()[-1]}")
            return None
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        return cost_of(Path(out))


def cost_of(out: Path) -> Cost:
    """Return the cost from a run's metrics and files."""
    seconds = {}
    for line in read_lines(out / "metrics.jsonl"):
        if "timing/train_batch" in line:
            seconds[line["step"]] = line["timing/train_batch"]

    def median_seconds(steps: Iterable[int]) -> float:
        return median(seconds[step] for step in steps)

    recorded = out.glob("profile/step_*/train_batch/**/*")
    num_bytes = sum(file.stat().st_size for file in recorded if file.is_file())
    return Cost(
        plain=median_seconds(range(FIRST_RECORDED - COUNTED, FIRST_RECORDED)),
        recorded=median_seconds(range(STEPS - COUNTED + 1, STEPS + 1)),
        num_bytes=num_bytes / (STEPS - FIRST_RECORDED + 1),
    )


def stage_seconds() -> float:
    """Return the cost of a stage when nothing is recorded: the best of 20 means over 500."""
    from profiling import Profiler

    profiler = Profiler()

    def stage() -> None:
        with profiler.stage("stage"):
            pass

    return min(timeit.repeat(stage, number=500, repeat=20)) / 500


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("train_file")
    add_settings(parser)
    parser.add_argument(
        "--tools",
        nargs="+",
        choices=TOOLS,
        default=TOOLS,
        metavar="TOOL",
        help="default: all of them",
    )
    arguments = parser.parse_intermixed_args()

    print(f"a stage that is only timed: {stage_seconds() * 1e6:.2f} microseconds")
    print(f"{'tool':<32}{'before [s]':>12}{'recorded [s]':>14}{'factor':>8}{'MB per step':>13}")
    for name in arguments.tools:
        cost = measure(arguments, TOOLS[name])
        if cost is None:
            continue
        factor = cost.recorded / cost.plain
        megabytes = cost.num_bytes / 1e6
        print(
            f"{name:<32}{cost.plain:>12.4f}{cost.recorded:>14.4f}{factor:>8.1f}{megabytes:>13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
