"""How far training moves the weights, for each way of storing weights and moments.

    python benchmarks/precision.py MODEL DATA [key=value ...] [--steps 50] [--lrs 1e-6 1e-5] \\
        [--ways bf16 nearest int8 bf16-int8]

Trains a model with train_sft.py on one process, with constant learning rates and the same batches:
with fp32 weights, with bfloat16 weights that are rounded stochastically and to the nearest, and
with 8-bit moments. Computes in fp32, so that all else is equal.

Prints a Markdown table. "moved" is the share of weights that differ from the model's. "along fp32"
is the displacement in the direction of the fp32 weights' displacement, as a multiple of it: 1 if
all updates count on average. "length" is the length of the displacement, rounding included, as a
multiple of fp32's. The losses are those of the first and the last step.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness import (
    ROOT,
    add_settings,
    make_parser,
    print_header,
    print_row,
    read_metrics,
    run_quietly,
)

BF16 = "engine.param_dtype=bfloat16"
INT8 = "optim.state_dtype=int8"
# name in --ways -> (label, settings). All are compared with the first one.
WAYS = {
    "fp32": ("fp32", []),
    "bf16": ("bf16, stochastic", [BF16]),
    "nearest": ("bf16, nearest", [BF16, "optim.rounding=nearest"]),
    "int8": ("fp32, 8-bit moments", [INT8]),
    "bf16-int8": ("bf16, stochastic, 8-bit moments", [BF16, INT8]),
}


def train(arguments, lr: str, way: list[str]) -> tuple[dict[str, Tensor], list[float]]:
    """Return the trained weights by name, and the loss of every step."""
    folder = arguments.out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [
        f"model.path={arguments.model}",
        f"data.train_files={arguments.data}",
        f"data.cache_dir={arguments.out / 'cache'}",
        f"output_dir={folder}",
        f"trainer.total_steps={arguments.steps}",
        "trainer.total_epochs=1000",
        "engine.compute_dtype=float32",
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps_ratio=0",
        f"optim.lr={lr}",
        *way,
        *arguments.settings,
    ]
    run_quietly([sys.executable, ROOT / "train_sft.py", *settings])
    losses = [line["train/loss"] for line in read_metrics(folder / "metrics.jsonl")]
    return read_weights(folder / "hf"), losses


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a model directory in fp32, by name."""
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return {name: weight.float() for name, weight in weights.items()}


def displacements(
    ends: tuple[dict[str, Tensor], dict[str, Tensor]],
    reference_ends: tuple[dict[str, Tensor], dict[str, Tensor]],
) -> tuple[float, float, float]:
    """Return the columns "moved", "along fp32" and "length" of the table.

    ends, reference_ends: the weights before the first step and after the last one.
    """
    start, weights = ends
    reference_start, reference = reference_ends
    num_moved = num_weights = 0
    product = length = reference_length = 0.0
    for name, weight in weights.items():
        moved = (weight - start[name]).double()
        expected = (reference[name] - reference_start[name]).double()
        num_moved += int(moved.count_nonzero())
        num_weights += moved.numel()
        product += float((moved * expected).sum())
        length += float(moved.square().sum())
        reference_length += float(expected.square().sum())
    along = product / reference_length
    return num_moved / num_weights, along, (length / reference_length) ** 0.5


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path, help="directory of a model")
    parser.add_argument("data", type=Path, help="rows of conversations, .jsonl")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lrs", nargs="+", default=["1e-6", "1e-5"])
    others = list(WAYS)[1:]
    parser.add_argument("--ways", nargs="+", choices=others, default=others)
    parser.add_argument("--out", type=Path, default=Path("/dev/shm/rankwise-precision"))
    add_settings(parser)
    arguments = parser.parse_intermixed_args()
    start = read_weights(arguments.model)
    rounded = {name: weight.bfloat16().float() for name, weight in start.items()}
    print_header("lr", "weights, moments", "moved", "along fp32", "length", "first, last loss")
    for lr in arguments.lrs:
        reference = None
        for name in ["fp32", *arguments.ways]:
            label, way = WAYS[name]
            weights, losses = train(arguments, lr, way)
            reference = reference or weights
            own_start = rounded if BF16 in way else start
            share, along, length = displacements((own_start, weights), (start, reference))
            ends = f"{losses[0]:.4f}, {losses[-1]:.4f}"
            print_row(lr, label, f"{share:.1%}", f"{along:.3f}", f"{length:.3f}", ends)
    shutil.rmtree(arguments.out, ignore_errors=True)


if __name__ == "__main__":
    main()
