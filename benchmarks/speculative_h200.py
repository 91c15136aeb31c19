"""Generation with and without drafts of the next tokens: a MiMo of a Qwen2.5 shape, vLLM as train_ppo.py runs it.

    python benchmarks/speculative_h200.py 0.5B [key=value ...] [--ways plain ngram:4 mtp:1] [--responses 256] [--tokens 128]
    python benchmarks/speculative_h200.py 0.5B --trained DIR --rows val.jsonl        what a trained model answers to a file of chats

A way is a drafter and the number of tokens that it drafts at once (suffix:8 needs arctic-inference). benchmarks/shapes.py says what
the weights are, and why drafts are right as often as they are. Prints a Markdown table: seconds and tokens per second for responses
of equal lengths, of log-normal lengths (sigma 1) with the same mean, and of a few long ones; how many drafts were accepted, and how
many responses are those of the first way to the last token. A trained model ends its responses itself: all of them, then a few.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from transformers import AutoTokenizer

from benchmarks.generation_profile import log_normal_lengths
from benchmarks.shapes import CIRCLE, MTP, make_model
from config import load
from engines.model.model_files import weight_files
from engines.parallel import device
from rollout.responses import Responses
from rollout.vllm.engine import Rollout
from rollout.vllm.speculation import draft_metrics

FEW = 16  # long responses
LONGEST = 6  # times the mean, of log-normal lengths
STARTED = "started\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=[shape.removesuffix("-MTP") for shape in MTP])
    parser.add_argument("settings", nargs="*", help="key=value")
    parser.add_argument("--ways", nargs="+", default=["plain", "ngram:4", "mtp:1"])
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.25])
    parser.add_argument(
        "--trained",
        type=Path,
        help="a trained model of that shape with an MTP layer, in Hugging Face format",
    )
    parser.add_argument(
        "--rows", type=Path, help="a .jsonl of chats for it, of which the first turn is asked"
    )
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/rankwise-models"))
    parser.add_argument("--way", help="of one process")
    arguments = parser.parse_intermixed_args()
    if bool(arguments.trained) != bool(arguments.rows):
        parser.error("--trained and --rows belong together")
    if arguments.way:
        return measure(arguments)
    arguments.trained or make_model(f"{arguments.shape}-MTP", arguments.models)
    # Every way starts its own vLLM at the same time; then they generate in turn.
    runs = {
        way: subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--way", way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in arguments.ways
    }
    rows = []
    try:
        for way, run in runs.items():
            if STARTED not in run.stdout:  # reads up to that line
                sys.exit(f"{way} failed")
        for way, run in runs.items():
            said = run.communicate(input="generate\n")[0]
            if run.returncode:
                sys.exit(f"{way} failed:\n{said}")
            rows += [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    finally:
        for run in runs.values():
            run.kill()
    print(
        "| shape | drafts | temperature | responses x tokens | s | tokens/s | speed | accepted | tokens per step | the same |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    firsts = {
        (row["temperature"], row["limits"]): row for row in rows if row["way"] == arguments.ways[0]
    }
    for row in rows:
        first = firsts[row["temperature"], row["limits"]]
        same = sum(a == b for a, b in zip(row["responses"], first["responses"]))
        print(
            f"| {arguments.shape} | {row['way']} | {row['temperature']} | "
            f"{len(row['responses'])} x {row['tokens'] / len(row['responses']):.0f} {row['lengths']} | {row['seconds']:.2f} | "
            f"{row['tokens'] / row['seconds']:,.0f} | {first['seconds'] / row['seconds']:.2f} | {row['accept_rate']:.2f} | "
            f"{row['accept_length']:.2f} | {same} of {len(row['responses'])} |"
        )


def measure(arguments) -> None:
    """One way, in this process; prints a JSON object for each row of the table."""
    name, _, number = arguments.way.partition(":")
    drafter = {
        "plain": [],
        "mtp": [
            "model.mtp.enable=true",
            "model.mtp.enable_rollout=true",
            f"model.mtp.num_speculative_tokens={number}",
        ],
    }.get(name, [f"rollout.speculative={name}", f"rollout.num_speculative_tokens={number}"])
    path = arguments.trained or arguments.models / f"{arguments.shape}-MTP"
    mean, longest, this_device = arguments.tokens, LONGEST * arguments.tokens, device.init()
    prompts = [list(range(CIRCLE * i, CIRCLE * (i + 1))) for i in range(arguments.responses)]
    if arguments.trained:
        prompts = questions(arguments.rows, AutoTokenizer.from_pretrained(path))[
            : arguments.responses
        ]
    config = load(
        "ppo.yaml",
        [
            f"model.path={path}",
            "data.train_files=none",
            f"data.max_prompt_length={max(map(len, prompts))}",
            f"rollout.max_tokens={longest}",
            f"validation.max_tokens={longest}",
            f"rollout.max_num_seqs={arguments.responses}",
            "rollout.kv_cache_gib=8",
            "rollout.gpu_memory_utilization=0.2",
            *drafter,
            *arguments.settings,
        ],
    )
    start = time.perf_counter()
    rollout = Rollout(config, this_device)
    rollout.wake("weights")
    rollout.update_weights(stored(path, this_device))
    rollout.wake("kv_cache")
    print(
        f"{arguments.way}: vLLM started in {time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )

    def generate(limits: list[int], temperature: float) -> tuple[float, Responses]:
        params = [
            rollout.sampling_params(
                OmegaConf.merge(config.rollout, {"max_tokens": limit, "temperature": temperature}),
                seed,
            )
            for seed, limit in enumerate(limits)
        ]
        responses = Responses(len(limits), max(limits), 0)
        rollout.drafts.counts.zero_()
        rollout.llm.reset_prefix_cache()
        start = time.perf_counter()
        rollout.fill(responses, prompts[: len(limits)], params)
        return time.perf_counter() - start, responses

    generate([8] * len(prompts), 1.0)  # compiles what is compiled at first use
    print(STARTED, end="", flush=True)
    sys.stdin.readline()
    for temperature in arguments.temperatures:
        few = min(FEW, len(prompts))
        for limits, lengths in (
            (([longest] * len(prompts), "its own"), ([longest] * few, "its own"))
            if arguments.trained
            else (
                ([mean] * len(prompts), "equal"),
                (log_normal_lengths(len(prompts), mean, longest), "log-normal"),
                ([2 * mean] * few, "equal"),
            )
        ):
            seconds, responses = generate(limits, temperature)
            tokens = int(responses.lengths.sum())
            rates = {
                key.removeprefix("mtp/"): value
                for key, value in draft_metrics(rollout.drafts.counts).items()
            }
            texts = [
                str(hash(tuple(row[:n].tolist())))
                for row, n in zip(responses.tokens, responses.lengths)
            ]
            print(
                json.dumps(
                    {
                        "way": arguments.way,
                        "temperature": temperature,
                        "seconds": seconds,
                        "tokens": tokens,
                        **rates,
                        "lengths": lengths,
                        "limits": str(limits),
                        "responses": texts,
                    }
                ),
                flush=True,
            )
    rollout.shutdown()


def questions(file: Path, tokenizer) -> list[list[int]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_dict=False
        )
        for row in rows
    ]


def stored(path: Path, this_device: torch.device):
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name).to(this_device)


if __name__ == "__main__":
    main()
