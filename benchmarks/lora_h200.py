"""GRPO with all weights and with LoRA, by what vLLM gets: the seconds of a step by stage, from benchmarks/ppo_h200.py.

    python benchmarks/lora_h200.py 7B engine.param_dtype=bfloat16 [--ways full merged swapped shared] [--rank 16]
    python benchmarks/lora_h200.py 7B --ranks 2 rollout.tensor_parallel_size=2 --ways merged swapped

full: all weights are trained and sent. merged: LoRA, and merged weights are sent. swapped: vLLM has a copy of the frozen weights,
and adapters are sent. shared: vLLM's frozen weights are the trainer's, and adapters are sent. Other arguments are those of
benchmarks/ppo_h200.py, for all ways. Prints lines of a Markdown table: medians of the steps after the first.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--assets", type=Path, default=Path("/tmp/rankwise-lora"))
    arguments, others = parser.parse_known_args()
    header = f"| way | step s | {' | '.join(STAGES)} | GiB awake | GiB asleep | GiB training | log p gap |"
    for way in arguments.ways:
        settings = [f"model.lora.rank={arguments.rank}", *WAYS[way]] if way != "full" else []
        subprocess.run(
            [
                sys.executable,
                ROOT / "benchmarks/ppo_h200.py",
                *others,
                *settings,
                "--assets",
                arguments.assets,
            ],
            check=True,
        )
        steps = [
            json.loads(line)
            for line in (arguments.assets / "run/metrics.jsonl").read_text().splitlines()[1:]
        ]
        middle = {name: median(step.get(name, 0.0) for step in steps) for name in steps[0]}
        numbers = [
            f"{middle['timing/step']:.2f}",
            *(f"{middle.get(f'timing/{stage}', 0):.3f}" for stage in STAGES),
            *(f"{middle.get(name, float('nan')):.1f}" for name in MEMORY),
            f"{middle['rollout_corr/log_prob_gap']:.4f}",
        ]
        print(f"{header}\n| {way} | {' | '.join(numbers)} |", flush=True)


if __name__ == "__main__":
    main()
