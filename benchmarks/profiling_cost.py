"""What each tool of the profiler costs: the time of a recorded step against a plain one, and disk space per step.

    OMP_NUM_THREADS=1 python benchmarks/profiling_cost.py runs/demo/model runs/demo/train.jsonl       from `make demo-assets`
    python benchmarks/profiling_cost.py MODEL TRAIN_FILE key=value ...                                on a GPU
    python benchmarks/profiling_cost.py MODEL TRAIN_FILE --tools torch memory                         some tools only

Runs train_sft.py once for each tool, for eight steps, of which the second half is recorded. The times are those of
train_batch: the median of the last three steps of each half. Tools that this machine does not have are left out.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
STEPS, FIRST = 8, 5
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


def measure(
    model: str, train_file: str, tool: list[str], more: list[str]
) -> tuple[float, float, float] | None:
    """(seconds of a plain step, seconds of a recorded step, bytes per recorded step); None if this machine lacks the tool."""
    with tempfile.TemporaryDirectory() as out:
        interval = [f"trainer.profile_interval=[{FIRST},{STEPS}]"] if tool else []
        done = subprocess.run(
            [
                sys.executable,
                ROOT / "train_sft.py",
                f"model.path={model}",
                f"data.train_files={train_file}",
                f"output_dir={out}",
                "data.train_batch_size=32",
                "data.max_tokens_per_micro_batch=2048",
                f"trainer.total_steps={STEPS}",
                "engine.torch_compile=never",
                *tool,
                *interval,
                *more,
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode == 2:
            print(f"    left out: {done.stderr.splitlines()[-1]}")
            return None
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        lines = [
            json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()
        ]
        times = {
            line["step"]: line["timing/train_batch"]
            for line in lines
            if "timing/train_batch" in line
        }
        written = sum(
            file.stat().st_size
            for file in Path(out, "profile").glob("step_*/train_batch/**/*")
            if file.is_file()
        )
    return (
        median(times[step] for step in range(FIRST - 3, FIRST)),
        median(times[step] for step in range(STEPS - 2, STEPS + 1)),
        written / (STEPS - FIRST + 1),
    )


def timer() -> float:
    """Seconds that a stage costs when nothing is recorded: the best of 20 means over 500."""
    import timeit

    sys.path.insert(0, str(ROOT))
    from profiling import Profiler

    profiler = Profiler()

    def stage():
        with profiler.stage("stage"):
            pass

    return min(timeit.repeat(stage, number=500, repeat=20)) / 500


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("train_file")
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument(
        "--tools",
        nargs="+",
        choices=TOOLS,
        default=TOOLS,
        metavar="TOOL",
        help="default: all of them",
    )
    arguments = parser.parse_intermixed_args()
    print(f"a stage that is only timed: {timer() * 1e6:.2f} microseconds")
    print(f"{'tool':<32}{'before [s]':>12}{'recorded [s]':>14}{'factor':>8}{'MB per step':>13}")
    for name in arguments.tools:
        found = measure(arguments.model, arguments.train_file, TOOLS[name], arguments.settings)
        if found:
            before, recorded, size = found
            print(
                f"{name:<32}{before:>12.4f}{recorded:>14.4f}{recorded / before:>8.1f}{size / 1e6:>13.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
