"""Processor time of tokenization with a loss mask, compared with datasets.map.

    python benchmarks/tokenize_speed.py [--rows 4000] [--pairs 5] [--tokenizer DIR]

The other side is one call of transformers' apply_chat_template per row in datasets.map, which is
what TRL's SFTTrainer does with assistant_only_loss.

The time is measured from a .jsonl of chats to arrays on disk, in a new process each time. The two
run in turn, so that a busy machine slows both; the result is the ratio of each pair, in seconds of
user and system time. The chats are single-turn and five-turn, with words from Python's own library,
under a template with the structure of Qwen3's and the {% generation %} marks that the other side
needs. DIR holds a tokenizer; without it one of 16,000 tokens is trained on the same library.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import (
    make_parser,
    median_and_range,
    print_header,
    print_row,
    write_lines,
)

NUM_TURNS = {"single-turn": 1, "five-turn": 5}
LONGEST_QUESTION = 50  # words
LONGEST_ANSWER = 110
TEMPLATE = r"""
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
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
        {%- if loop.index0 > ns.query %}
            {{- '<think>\n' + thought + '\n</think>\n\n' + content }}
        {%- else %}{{- content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>\n' + call | tojson + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}{{ '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


# ---- data ----


def library() -> list[str]:
    """Return the texts of some files of Python's library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return [file.read_text(errors="ignore") for file in files[:150]]


def make_tokenizer(folder: Path) -> None:
    """Train a byte-level tokenizer and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trainer = trainers.BpeTrainer(
        vocab_size=16000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(library(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def make_rows(num_rows: int, num_turns: int) -> list[dict]:
    rng = random.Random(0)
    words = " ".join(library()).split()

    def message(role: str, longest: int) -> dict[str, str]:
        num_words = rng.randrange(10, longest)
        start = rng.randrange(len(words) - num_words)
        return {"role": role, "content": " ".join(words[start : start + num_words])}

    rows = []
    for _ in range(num_rows):
        messages = []
        for _ in range(num_turns):
            messages.append(message("user", LONGEST_QUESTION))
            messages.append(message("assistant", LONGEST_ANSWER))
        rows.append({"messages": messages})
    return rows


# ---- one side, in a process of its own ----


def tokenize_ours(tokenizer, data: Path, work: Path, folder: Path) -> None:
    """Tokenize with this repository. work: for files; folder: with the model's configuration."""
    from config import load
    from data.dataset import tokenize

    config = load(
        "sft.yaml",
        ["model.path=x", "data.train_files=x", "data.num_proc=1", "data.max_length=100000"],
    )
    tokenize(str(data), tokenizer, config.data, work, folder)


def tokenize_with_map(tokenizer, data: Path, work: Path, folder: Path) -> None:
    """Tokenize row by row with datasets.map."""
    import datasets

    def tokens(row: dict) -> dict:
        return tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=True
        )

    rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(work))
    cache_file = str(work / "tokens.arrow")
    rows.map(tokens, remove_columns=rows.column_names, cache_file_name=cache_file)


SIDES = {"ours": tokenize_ours, "map": tokenize_with_map}


def measure(side: str, folder: Path, name: str) -> float:
    """Return the seconds of processor time of one side, without imports."""
    import datasets  # noqa: F401
    from transformers import AutoTokenizer

    import data.dataset  # noqa: F401

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    with tempfile.TemporaryDirectory(dir=folder) as work:
        before = processor_seconds()
        SIDES[side](tokenizer, folder / f"{name}.jsonl", Path(work), folder)
        return processor_seconds() - before


def processor_seconds() -> float:
    """Return the user and system time of this process and its children."""
    seconds = 0.0
    for processes in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(processes)
        seconds += usage.ru_utime + usage.ru_stime
    return seconds


# ---- both sides ----


def measure_in_process(side: str, folder: Path, name: str) -> float:
    command = [sys.executable, __file__, "--measure", side, str(folder), name]
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    print_header(
        "chats",
        "datasets.map [rows/s]",
        "this [rows/s]",
        "ratio: median (smallest, largest) of pairs",
    )
    for name, num_turns in NUM_TURNS.items():
        write_lines(folder / f"{name}.jsonl", make_rows(arguments.rows, num_turns))
        map_seconds = []
        own_seconds = []
        for _ in range(arguments.pairs):
            map_seconds.append(measure_in_process("map", folder, name))
            own_seconds.append(measure_in_process("ours", folder, name))
        ratios = [theirs / own for theirs, own in zip(map_seconds, own_seconds)]
        print_row(
            name,
            f"{arguments.rows / median(map_seconds):,.0f}",
            f"{arguments.rows / median(own_seconds):,.0f}",
            median_and_range(ratios, ".2f"),
        )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, metavar="DIR")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        side, folder, name = arguments.measure
        print(json.dumps(measure(side, Path(folder), name)))
        return
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if arguments.tokenizer:
            copy_tokenizer(arguments.tokenizer, folder)
        else:
            make_tokenizer(folder)
        compare(arguments, folder)


if __name__ == "__main__":
    main()
