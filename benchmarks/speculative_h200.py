"""Generation with and without drafts of the next tokens, with vLLM as train_ppo.py runs it.

    python benchmarks/speculative_h200.py 0.5B [key=value ...] [--ways plain ngram:4 mtp:1] \\
        [--responses 256] [--tokens 128]

    # the answers of a trained model to a file of chats
    python benchmarks/speculative_h200.py 0.5B --trained DIR --rows val.jsonl

The model is a MiMo with a shape of Qwen2.5. benchmarks/shapes.py explains its weights, and why
drafts are right as often as they are. A way is a drafter and the number of tokens that it drafts at
once; suffix:8 needs arctic-inference.

Prints a Markdown table: seconds and tokens per second for responses of equal lengths, of log-normal
lengths (sigma 1) with the same mean, and for a few long ones; the share of drafts that were
accepted; and how many responses equal those of the first way to the last token. A trained model
ends its responses itself; it answers all questions, then a few.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.generation_profile import Generation, log_normal_lengths
from benchmarks.harness import (
    MODELS,
    add_settings,
    make_parser,
    model_settings,
    print_header,
    print_row,
    read_lines,
)
from benchmarks.shapes import CIRCLE, MTP, make_model
from config import load
from engines.model.model_files import weight_files
from engines.parallel import device
from rollout.responses import Responses
from rollout.vllm.engine import Rollout
from rollout.vllm.speculation import draft_metrics

FEW = 16  # long responses
LONGEST = 6  # times the mean, of log-normal lengths
STARTED = "started\n"  # the line with which a process reports that its vLLM is ready


@dataclass
class Measurement:
    """One call of one way's vLLM.

    Attributes:
        lengths: the case: "equal", "log-normal" or "its own".
        limits: the largest length of each response, as text.
        tokens: number of tokens in all responses.
        responses: a hash of each response.
        accept_rate, accept_length: see `draft_metrics`.
    """

    way: str
    temperature: float
    lengths: str
    limits: str
    seconds: float
    tokens: int
    responses: list[str]
    accept_rate: float
    accept_length: float


# ---- one way, in a process of its own ----


class Generator:
    """vLLM with one way's drafter, awake, with the weights of the model's files."""

    def __init__(self, config: DictConfig, this_device: torch.device, prompts: list[list[int]]):
        self.config = config
        self.prompts = prompts
        self.rollout = Rollout(config, this_device)
        self.rollout.wake("weights")
        self.rollout.update_weights(stored_weights(Path(config.model.path), this_device))
        self.rollout.wake("kv_cache")

    def generate(self, limits: list[int], temperature: float) -> Generation:
        """Generate at most limits[i] tokens to each of the first prompts."""
        params = []
        for seed, limit in enumerate(limits):
            changes = {"max_tokens": limit, "temperature": temperature}
            sampling = OmegaConf.merge(self.config.rollout, changes)
            params.append(self.rollout.sampling_params(sampling, seed))
        responses = Responses(len(limits), max(limits), 0)
        self.rollout.drafts.counts.zero_()
        self.rollout.llm.reset_prefix_cache()
        start = time.perf_counter()
        self.rollout.fill(responses, self.prompts[: len(limits)], params)
        return Generation(time.perf_counter() - start, responses)


def stored_weights(path: Path, this_device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name).to(this_device)


def drafter_settings(way: str) -> list[str]:
    """Return the settings of a way, such as plain, mtp:1 or ngram:4."""
    drafter, _, num_tokens = way.partition(":")
    if drafter == "plain":
        return []
    if drafter == "mtp":
        return [
            "model.mtp.enable=true",
            "model.mtp.enable_rollout=true",
            f"model.mtp.num_speculative_tokens={num_tokens}",
        ]
    return [f"rollout.speculative={drafter}", f"rollout.num_speculative_tokens={num_tokens}"]


def make_prompts(arguments: argparse.Namespace) -> list[list[int]]:
    """Return circles of the made model, or the questions of the trained one."""
    if not arguments.trained:
        starts = range(0, CIRCLE * arguments.responses, CIRCLE)
        return [list(range(start, start + CIRCLE)) for start in starts]
    tokenizer = AutoTokenizer.from_pretrained(arguments.trained)
    rows = read_lines(arguments.rows)
    return [
        tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_dict=False
        )
        for row in rows[: arguments.responses]
    ]


def load_config(arguments: argparse.Namespace, prompts: list[list[int]]) -> DictConfig:
    longest = LONGEST * arguments.tokens
    settings = [
        *model_settings(arguments.trained or arguments.models / f"{arguments.shape}-MTP"),
        f"data.max_prompt_length={max(len(prompt) for prompt in prompts)}",
        f"rollout.max_tokens={longest}",
        f"validation.max_tokens={longest}",
        f"rollout.max_num_seqs={arguments.responses}",
        "rollout.kv_cache_gib=8",
        "rollout.gpu_memory_utilization=0.2",
        *drafter_settings(arguments.way),
        *arguments.settings,
    ]
    return load("ppo.yaml", settings)


def limits_by_case(arguments: argparse.Namespace, num_prompts: int) -> list[tuple[str, list[int]]]:
    """Return (name of the lengths, the limit of each response) for each case."""
    mean = arguments.tokens
    longest = LONGEST * mean
    few = min(FEW, num_prompts)
    if arguments.trained:
        return [("its own", [longest] * num_prompts), ("its own", [longest] * few)]
    return [
        ("equal", [mean] * num_prompts),
        ("log-normal", log_normal_lengths(num_prompts, mean, longest)),
        ("equal", [2 * mean] * few),
    ]


def hashes(responses: Responses) -> list[str]:
    rows = zip(responses.tokens, responses.lengths)
    return [str(hash(tuple(tokens[:length].tolist()))) for tokens, length in rows]


def measure_way(arguments: argparse.Namespace) -> None:
    """Start vLLM, wait for a line on standard input, and print a Measurement as JSON per case."""
    this_device = device.init()
    prompts = make_prompts(arguments)
    config = load_config(arguments, prompts)
    start = time.perf_counter()
    generator = Generator(config, this_device, prompts)
    seconds = time.perf_counter() - start
    print(f"{arguments.way}: vLLM started in {seconds:.0f} s", file=sys.stderr, flush=True)
    generator.generate([8] * len(prompts), 1.0)  # compiles what is compiled at first use
    print(STARTED, end="", flush=True)
    sys.stdin.readline()
    for temperature in arguments.temperatures:
        for lengths, limits in limits_by_case(arguments, len(prompts)):
            generation = generator.generate(limits, temperature)
            drafts = draft_metrics(generator.rollout.drafts.counts)
            measurement = Measurement(
                way=arguments.way,
                temperature=temperature,
                lengths=lengths,
                limits=str(limits),
                seconds=generation.seconds,
                tokens=int(generation.responses.lengths.sum()),
                responses=hashes(generation.responses),
                accept_rate=drafts["mtp/accept_rate"],
                accept_length=drafts["mtp/accept_length"],
            )
            print(json.dumps(asdict(measurement)), flush=True)
    generator.rollout.shutdown()


# ---- all ways ----


def measure_ways(ways: list[str]) -> list[Measurement]:
    """Start a vLLM for every way at the same time, then let them generate in turn."""
    runs = {}
    for way in ways:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        runs[way] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    measurements = []
    try:
        for way, run in runs.items():
            if STARTED not in run.stdout:  # reads up to that line
                sys.exit(f"{way} failed")
        for way, run in runs.items():
            output, _ = run.communicate(input="generate\n")
            if run.returncode:
                sys.exit(f"{way} failed:\n{output}")
            lines = [line for line in output.splitlines() if line.startswith("{")]
            measurements += [Measurement(**json.loads(line)) for line in lines]
    finally:
        for run in runs.values():
            run.kill()
    return measurements


def print_table(shape: str, measurements: list[Measurement]) -> None:
    print_header(
        "shape",
        "drafts",
        "temperature",
        "responses x tokens",
        "s",
        "tokens/s",
        "speed",
        "accepted",
        "tokens per step",
        "the same",
    )
    first_way = measurements[0].way
    references = {
        (reference.temperature, reference.limits): reference
        for reference in measurements
        if reference.way == first_way
    }
    for row in measurements:
        reference = references[row.temperature, row.limits]
        num_responses = len(row.responses)
        pairs = zip(row.responses, reference.responses)
        num_same = sum(response == expected for response, expected in pairs)
        print_row(
            shape,
            row.way,
            row.temperature,
            f"{num_responses} x {row.tokens / num_responses:.0f} {row.lengths}",
            f"{row.seconds:.2f}",
            f"{row.tokens / row.seconds:,.0f}",
            f"{reference.seconds / row.seconds:.2f}",
            f"{row.accept_rate:.2f}",
            f"{row.accept_length:.2f}",
            f"{num_same} of {num_responses}",
        )


# ---- the command ----


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("shape", choices=[shape.removesuffix("-MTP") for shape in MTP])
    add_settings(parser)
    parser.add_argument("--ways", nargs="+", default=["plain", "ngram:4", "mtp:1"])
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of a response, on average")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.25])
    parser.add_argument(
        "--trained",
        type=Path,
        help="a trained model of that shape with an MTP layer, in Hugging Face format",
    )
    parser.add_argument(
        "--rows",
        type=Path,
        help="a .jsonl of chats; their first turns are the trained model's questions",
    )
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_intermixed_args()
    if bool(arguments.trained) != bool(arguments.rows):
        parser.error("--trained and --rows belong together: give both or neither")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.way:
        measure_way(arguments)
        return
    if not arguments.trained:
        make_model(f"{arguments.shape}-MTP", arguments.models)
    print_table(arguments.shape, measure_ways(arguments.ways))


if __name__ == "__main__":
    main()
