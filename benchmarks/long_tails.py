"""What responses of very different lengths cost, with and without rollout.partial.

    python benchmarks/long_tails.py 0.5B engine.param_dtype=bfloat16 \\
        [--prompts 256] [--n 4] [--tokens 256] [--longest 3072] [--sigma 1] [--steps 10] \\
        [--oversample 1.25 1.5] [--max-staleness 1 4] [--ranks 1] [key=value ...]

Runs train_ppo.py with a shape of benchmarks/shapes.py and random weights, as ppo_h200.py does: with
responses of --tokens tokens each; with log-normal lengths of the same mean; and with the same
log-normal lengths and rollout.partial, for each value of --oversample and --max-staleness. Prints a
Markdown table with the means over --steps steps after the first two, in which vLLM settles.
"""

import argparse
import itertools
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    MODELS,
    ROOT,
    add_settings,
    make_parser,
    print_header,
    print_row,
    read_metrics,
    torchrun_command,
)
from benchmarks.ppo_h200 import PROMPT_TOKENS, kill, make_assets, make_policy
from benchmarks.shapes import SHAPES

NUM_SETTLING_STEPS = 2
SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    sigma: float
    settings: list[str]


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the rows of the table."""
    cases = [
        Case("equal lengths", 0.0, []),
        Case("log-normal lengths", arguments.sigma, []),
    ]
    for oversample, max_staleness in itertools.product(
        arguments.oversample, arguments.max_staleness
    ):
        settings = [
            "rollout.partial.enable=true",
            f"rollout.partial.oversample={oversample}",
            f"rollout.partial.max_staleness={max_staleness}",
            "algorithm.rollout_is=token",
        ]
        name = f"oversample={oversample:g}, max_staleness={max_staleness}"
        cases.append(Case(name, arguments.sigma, settings))
    return cases


def run_settings(arguments: argparse.Namespace) -> list[str]:
    """Return the settings that all cases share. Makes the prompts and the model."""
    prompts = make_assets(arguments.assets, arguments.prompts)
    model = make_policy(arguments.shape, arguments.models, arguments.assets / "tokenizer")
    return [
        f"data.train_files={prompts}",
        f"model.path={model}",
        f"data.cache_dir={arguments.assets}/cache",
        f"data.train_batch_size={arguments.prompts}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"rollout.n={arguments.n}",
        f"rollout.max_tokens={arguments.longest}",
        f"reward.function={ROOT}/benchmarks/ppo_h200.py:share_of_digits",
        "trainer.rollout_freq=-1",
        "trainer.total_steps=1000",
        *arguments.settings,
    ]


def run_case(arguments: argparse.Namespace, case: Case, shared: list[str]) -> list[dict]:
    """Run one case, and return the metrics of its steps after the first ones.

    If the run ends too early, this process exits with its code.
    """
    out = arguments.assets / "long_tails"
    shutil.rmtree(out, ignore_errors=True)
    script = ROOT / "benchmarks" / "long_tails_case.py"
    lengths = [str(arguments.tokens), str(case.sigma)]
    settings = [*shared, *case.settings, f"output_dir={out}"]
    with open(arguments.assets / "long_tails.log", "w") as log:
        run = subprocess.Popen(
            [*torchrun_command(arguments.ranks), script, *lengths, *settings],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    num_steps = NUM_SETTLING_STEPS + arguments.steps
    file = out / "metrics.jsonl"
    num_lines = 0
    try:
        while run.poll() is None and num_lines < num_steps:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            num_lines = file.read_text().count("\n") if file.exists() else 0
    finally:
        kill(run)
    if num_lines < num_steps:
        print((arguments.assets / "long_tails.log").read_text()[-4000:], file=sys.stderr)
        sys.exit(run.returncode or 1)
    return read_metrics(file)[NUM_SETTLING_STEPS:num_steps]


def mean(steps: list[dict], name: str) -> float:
    return fmean(step[name] for step in steps)


def show(arguments: argparse.Namespace, case: Case, steps: list[dict], equal: float) -> None:
    """Print a row. equal: seconds per step with equal lengths."""
    seconds = mean(steps, "timing/step")
    num_responses = arguments.prompts * arguments.n
    num_tokens = num_responses * mean(steps, "response_length/mean")
    has_age = "partial/age_0/tokens" in steps[0]
    older = f"{1 - mean(steps, 'partial/age_0/tokens'):.0%}" if has_age else ""
    print_row(
        case.name,
        f"{seconds:.2f}",
        f"{seconds / equal:.2f}",
        f"{mean(steps, 'timing/rollout_generate'):.2f}",
        f"{num_tokens / 1000:,.0f}k",
        f"{mean(steps, 'response_length/max'):,.0f}",
        older,
    )


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=SHAPES)
    add_settings(parser)
    parser.add_argument("--assets", type=Path, default=Path("/tmp/rankwise-ppo"))
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--n", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="mean length of a response")
    parser.add_argument("--longest", type=int, default=3072)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--oversample", type=float, nargs="+", default=[1.25, 1.5])
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ranks", type=int, default=1)
    return parser.parse_intermixed_args()


def main() -> None:
    arguments = parse_arguments()
    shared = run_settings(arguments)
    print_header(
        "responses",
        "s per step",
        "times equal lengths",
        "s of generation",
        "tokens per step",
        "longest response",
        "tokens of earlier steps",
    )
    equal = 0.0
    for case in make_cases(arguments):
        steps = run_case(arguments, case, shared)
        equal = equal or mean(steps, "timing/step")
        show(arguments, case, steps, equal)


if __name__ == "__main__":
    main()
