"""Processor time of tokenization with a loss mask: this repository against one call of transformers per row in datasets.map, which
is what TRL's SFTTrainer does with assistant_only_loss.

    python benchmarks/tokenize_speed.py [--rows 4000] [--pairs 5] [--tokenizer DIR]

From a .jsonl of chats to arrays on disk, in a process of its own each time, the two in turn, so that a busy machine slows both;
what counts is the ratio of each pair, in seconds of user and system time. Single-turn and five-turn chats of words of Python's
own library, under a template with the structure of Qwen3's, with the {% generation %} marks that the other side needs. DIR holds
a tokenizer; without it one of 16,000 tokens is trained on the same library.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TURNS = {"single-turn": 1, "five-turn": 5}
TEMPLATE = r"""
{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(query=messages | length - 1, found=false) %}
{%- for m in messages[::-1] %}
    {%- if not ns.found and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set ns.found = true %}{% set ns.query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content, thought = m.content, '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.query %}{{ '<think>\n' + thought + '\n</think>\n\n' + content }}{% else %}{{ content }}{% endif %}
        {%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + call | tojson + '\n</tool_call>' }}{% endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}{{ '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def library() -> list[str]:
    return [
        path.read_text(errors="ignore")
        for path in sorted(Path(os.__file__).parent.glob("*.py"))[:150]
    ]


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    backend.train_from_iterator(
        library(),
        trainers.BpeTrainer(
            vocab_size=16000,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(
        folder
    )


def make_rows(path: Path, num_rows: int, num_turns: int) -> None:
    rng, words = random.Random(0), " ".join(library()).split()

    def text(num_words: int) -> str:
        at = rng.randrange(len(words) - num_words)
        return " ".join(words[at : at + num_words])

    with path.open("w") as file:
        for _ in range(num_rows):
            messages = [
                {"role": role, "content": text(rng.randrange(10, length))}
                for _ in range(num_turns)
                for role, length in (("user", 50), ("assistant", 110))
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def ours(tokenizer, data: Path, work: Path, folder: Path) -> None:
    from config import load
    from data.dataset import tokenize

    config = load(
        "sft.yaml",
        ["model.path=x", "data.train_files=x", "data.num_proc=1", "data.max_length=100000"],
    )
    tokenize(str(data), tokenizer, config.data, work, folder)


def theirs(tokenizer, data: Path, work: Path, folder: Path) -> None:
    import datasets

    rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(work))
    rows.map(
        lambda row: tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        ),
        remove_columns=rows.column_names,
        cache_file_name=str(work / "tokens.arrow"),
    )


def measure(who: str, folder: Path, name: str) -> float:
    """Seconds of processor time, imports aside."""
    sys.path.insert(0, str(ROOT))
    import datasets  # noqa: F401
    from transformers import AutoTokenizer

    import data.dataset  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory(dir=folder) as work:
        before = used()
        {"ours": ours, "theirs": theirs}[who](
            tokenizer, folder / f"{name}.jsonl", Path(work), folder
        )
        return used() - before


def used() -> float:
    return sum(
        getattr(resource.getrusage(who), field)
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        for field in ("ru_utime", "ru_stime")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        who, folder, name = arguments.measure
        print(json.dumps(measure(who, Path(folder), name)))
        return
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if arguments.tokenizer:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(arguments.tokenizer).save_pretrained(folder)
        else:
            make_tokenizer(folder)
        print(
            "| chats | datasets.map [rows/s] | this [rows/s] | ratio: median (smallest, largest) of pairs |\n|---|---|---|---|"
        )
        for name, num_turns in TURNS.items():
            make_rows(folder / f"{name}.jsonl", arguments.rows, num_turns)
            pairs = []
            for _ in range(arguments.pairs):
                command = [sys.executable, __file__, "--measure"]
                env = {
                    **os.environ,
                    "TOKENIZERS_PARALLELISM": "false",
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                }
                pairs.append(
                    [
                        json.loads(
                            subprocess.run(
                                [*command, who, str(folder), name],
                                env=env,
                                check=True,
                                text=True,
                                capture_output=True,
                            ).stdout.splitlines()[-1]
                        )
                        for who in ("theirs", "ours")
                    ]
                )
            ratios = [theirs / ours for theirs, ours in pairs]
            speeds = [arguments.rows / statistics.median(seconds) for seconds in zip(*pairs)]
            print(
                f"| {name} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f}, "
                f"{max(ratios):.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
