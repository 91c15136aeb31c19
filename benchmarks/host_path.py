"""The time and memory that a rank's host needs between vLLM and the loss, by number of ranks.

    python benchmarks/host_path.py [--tokens 1000000] [--ranks 1 8 64] [--estimators grpo gae] \\
        [--group 8]

This measures the work of rank 0 of N: Sampler.draw, divide and set_advantages, on --tokens tokens
in responses of log-normal length (mean 256, sigma 1), for any N. Each case runs in a process of its
own; benchmarks/host_path_case.py explains how the other ranks are simulated. Seconds are processor
time, the smallest of --repeats steps; MiB are the most that the steps add to the memory of the
process.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, make_parser, print_header, print_row

STAGES = ("draw", "divide", "advantages")


def run_case(arguments: argparse.Namespace, num_ranks: int, estimator: str) -> dict:
    """Run a case in its process and return what it prints, see benchmarks/host_path_case.py."""
    options = {
        "--ranks": num_ranks,
        "--estimator": estimator,
        "--tokens": arguments.tokens,
        "--group": arguments.group,
        "--repeats": arguments.repeats,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, str(ROOT / "benchmarks/host_path_case.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of one rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--estimators", nargs="+", default=["grpo", "gae"])
    parser.add_argument("--group", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()

    print_header(
        "ranks",
        "estimator",
        *STAGES,
        "s per million own tokens",
        "peak MiB added",
        "kB of numbers sent",
    )
    for estimator in arguments.estimators:
        for num_ranks in arguments.ranks:
            case = run_case(arguments, num_ranks, estimator)
            millions = case["tokens"] / 1e6
            seconds = [case["seconds"][stage] / millions for stage in STAGES]
            print_row(
                num_ranks,
                estimator,
                *(f"{stage_seconds:.3f}" for stage_seconds in seconds),
                f"{sum(seconds):.3f}",
                f"{case['mib']:.0f}",
                f"{case['kb']:,.0f}",
            )


if __name__ == "__main__":
    main()
