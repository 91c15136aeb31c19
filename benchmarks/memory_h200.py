"""Measure how much memory the advice of an out-of-memory error saves, and print such an error.

    python benchmarks/memory_h200.py 1.5B engine.param_dtype=bfloat16 \\
        data.max_tokens_per_micro_batch=16384
    python benchmarks/memory_h200.py 0.5B engine.param_dtype=bfloat16 \\
        data.max_tokens_per_micro_batch=262144 --train

Arguments: a shape (benchmarks/shapes.py), then key=value pairs of configs/sft.yaml. The first form
takes steps of benchmarks/sft_h200.py with these settings, and with each setting that the error
would advise. It prints how much memory each one saves, estimated and measured. The second form runs
train_sft.py on rows of 4,000 tokens that fill a micro-batch, with and without dry_run=true, and
prints the lines about memory.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.harness import (
    MODELS,
    ROOT,
    add_settings,
    make_parser,
    model_settings,
    print_header,
    print_row,
    run_quietly,
)
from benchmarks.shapes import NAMES, make_model
from config import load
from engines.memory import GIB
from examples.arithmetic import make_tokenizer
from job.hardware import Hardware
from job.memory_plan import MemoryPlan

PEAK = re.compile(r"(\d+\.\d) \((\d+\.\d)\)")
ROW_LENGTH = 4000
ABOUT_MEMORY = re.compile("warning: training needs|out of device memory")


def measure(shape: str, settings: list[str], options: list[str]) -> tuple[float, float]:
    """Return the peak and the estimated memory of a step with these settings, in GiB."""
    script = ROOT / "benchmarks" / "sft_h200.py"
    printed = run_quietly([sys.executable, script, shape, *settings, *options])
    peak, estimate = PEAK.search(printed).groups()
    return float(peak), float(estimate)


def print_savings(shape: str, model: Path, settings: list[str], options: list[str]) -> None:
    """Measure what each advised setting saves, and print a table."""
    config = load("sft.yaml", [*model_settings(model), *settings])
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    plan = MemoryPlan({None: config}, Hardware(1, device_type, 0))
    peak, estimate = measure(shape, settings, options)
    print_header("setting", "estimated saving [GiB]", "measured saving [GiB]", "peak (estimate)")
    print_row(" ".join(settings), "", "", f"{peak:.1f} ({estimate:.1f})")
    for saving in plan.savings():
        peak_with, estimate_with = measure(shape, [*settings, saving.setting], options)
        print_row(
            saving.setting,
            f"{saving.num_bytes / GIB:.1f}",
            f"{peak - peak_with:.1f}",
            f"{peak_with:.1f} ({estimate_with:.1f})",
        )


def run_out_of_memory(model: Path, settings: list[str]) -> None:
    """Run train_sft.py on rows that fill a micro-batch, and print its lines about memory."""
    make_tokenizer().save_pretrained(model)
    config = load("sft.yaml", [*model_settings(model), *settings])
    num_rows = config.data.max_tokens_per_micro_batch // ROW_LENGTH
    row = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2" * 3900}]
    rows = model.parent / "long_rows.jsonl"
    rows.write_text(f"{json.dumps({'messages': row})}\n" * num_rows)
    command = [
        *(sys.executable, "train_sft.py", f"model.path={model}", f"data.train_files={rows}"),
        *(f"data.train_batch_size={num_rows}", f"output_dir={model.parent}/out_of_memory"),
        *("trainer.total_steps=1", *settings),
    ]
    for option in ("dry_run=true", "dry_run=false"):
        done = subprocess.run([*command, option], cwd=ROOT, capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        about_memory = [line for line in lines if ABOUT_MEMORY.search(line)]
        tracebacks = sum("Traceback" in line for line in lines)
        print(f"{option}: exit code {done.returncode}, {tracebacks} tracebacks", flush=True)
        print("\n".join(about_memory), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=NAMES)
    add_settings(parser)
    parser.add_argument("--train", action="store_true", help="run train_sft.py out of memory")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder for models")
    parser.add_argument("--steps", type=int, default=3, help="steps to measure")
    arguments = parser.parse_intermixed_args()
    model = make_model(arguments.shape, arguments.models)
    if arguments.train:
        run_out_of_memory(model, arguments.settings)
        return
    options = ["--steps", str(arguments.steps), "--models", str(arguments.models)]
    print_savings(arguments.shape, model, arguments.settings, options)


if __name__ == "__main__":
    main()
