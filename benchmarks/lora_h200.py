"""Seconds of a GRPO step by stage, with all weights and with LoRA; runs ppo_h200.py.

    python benchmarks/lora_h200.py 7B engine.param_dtype=bfloat16 \\
        [--ways full merged swapped shared] [--rank 16]
    python benchmarks/lora_h200.py 7B --ranks 2 rollout.tensor_parallel_size=2 \\
        --ways merged swapped

The ways differ in what vLLM receives:

    full     all weights are trained and sent
    merged   LoRA; weights with the adapters merged into them are sent
    swapped  vLLM has a copy of the frozen weights, and adapters are sent
    shared   vLLM's frozen weights are the trainer's, and adapters are sent

All other arguments are as for benchmarks/ppo_h200.py, and apply to all ways. Prints lines of a
Markdown table: medians of the steps after the first one.
"""

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, make_parser, medians, print_row, read_metrics

WAYS = {
    "full": [],
    "merged": ["model.lora.merge=true"],
    "swapped": ["rollout.share_base=never"],
    "shared": ["rollout.share_base=always"],
}
STAGES = (
    "rollout_generate",
    "actor_compute_log_prob",
    "actor_update",
    "sleep",
    "offload",
    "wake",
    "update_weights",
    "probe",
)
MEMORY = ("perf/memory_awake_gib", "perf/memory_asleep_gib", "perf/memory_training_gib")


def run_way(way: str, arguments: argparse.Namespace, ppo_arguments: list[str]) -> dict[str, float]:
    """Run some steps and return the median of every metric."""
    settings = []
    if way != "full":
        settings = [f"model.lora.rank={arguments.rank}", *WAYS[way]]
    script = str(ROOT / "benchmarks/ppo_h200.py")
    assets = ["--assets", str(arguments.assets)]
    subprocess.run([sys.executable, script, *ppo_arguments, *settings, *assets], check=True)
    steps = read_metrics(arguments.assets / "run/metrics.jsonl")
    return medians(steps[1:])


def print_result(way: str, middle: dict[str, float]) -> None:
    memory = ("GiB awake", "GiB asleep", "GiB training")
    print_row("way", "step s", *STAGES, *memory, "log p gap")
    print_row(
        way,
        f"{middle['timing/step']:.2f}",
        *(f"{middle.get(f'timing/{stage}', 0):.3f}" for stage in STAGES),
        *(f"{middle.get(name, float('nan')):.1f}" for name in MEMORY),
        f"{middle['rollout_corr/log_prob_gap']:.4f}",
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--assets", type=Path, default=Path("/tmp/rankwise-lora"))
    arguments, ppo_arguments = parser.parse_known_args()
    for way in arguments.ways:
        print_result(way, run_way(way, arguments, ppo_arguments))


if __name__ == "__main__":
    main()
