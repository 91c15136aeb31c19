"""Show rows as the model will see them: the decoded tokens, with the trained ones highlighted.

    python -m data.preview FILE model.path=MODEL [my.yaml] [key=value ...]
    python -m data.preview --prompts FILE model.path=MODEL [my.yaml] [key=value ...]
    python -m data.preview --preferences FILE model.path=MODEL [my.yaml] [key=value ...]
    python -m data.preview --rewards FILE model.path=MODEL [my.yaml] [key=value ...]

The first form is for files of train_sft.py, the second for prompts of train_ppo.py, the third for
preferences of train_dpo.py, and the last for rows of train_rm.py. Trained tokens, and the answers
that train_rm.py scores, are green on a terminal, and between [[ and ]] elsewhere. Below the rows,
the output lists the columns and message fields that are read or ignored. --rows N shows N rows
instead of 3. With data.teacher_prompt_key, the prompt that the teacher sees follows each prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from config import InputError, load, report
from data import dataset, preference_dataset, prompts, reward_dataset
from data.chat.tokenizer import ChatTokenizer, load_tokenizer
from data.columns import report_lines, uses_of_file
from data.dataset import TokenDataset
from data.files import find_files, read_rows
from data.images.processor import load_processor
from data.lengths import LengthLimit
from data.preference_dataset import split_answers
from data.prompts import PromptDataset
from data.tokenization import CacheSpec, Source, plain_options, tokenize_rows

NUM_ROWS = 3
MAX_LENGTH = 2000  # characters shown of a run of tokens; the middle of a longer one is left out
TRAINED_ON_TERMINAL = ("\x1b[32m", "\x1b[0m")
TRAINED_ELSEWHERE = ("[[", "]]")
# The configuration file, and how a row is tokenized, by the kind of rows.
KINDS = {
    "training": ("sft.yaml", dataset.SPEC),
    "prompts": ("ppo.yaml", prompts.SPEC),
    "preferences": ("dpo.yaml", preference_dataset.SPEC),
    "rewards": ("rm.yaml", reward_dataset.SPEC),
}
KINDS_WITH_IMAGES = ("training", "prompts")
# Control characters, except tabs and line ends: they could change the terminal's state, or the
# direction of a text.
CONTROL_CHARACTER = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def preview_file(path: Path, spec: CacheSpec, config, num_rows: int) -> Iterator[str]:
    """Yield the lines of a preview of the first rows of a file.

    Args:
        spec: how a row is tokenized, from KINDS.

    Raises:
        InputError: the file, the tokenizer or the processor of images cannot be read.
    """
    tokenizer = load_tokenizer(config)
    processor = load_processor(config, tokenizer)
    chat = ChatTokenizer.load(tokenizer, model_directory(config.model.path), processor)
    if processor:
        spec = spec.with_images([path], processor)
    options = plain_options(config.data)
    limit = LengthLimit(spec.limit_key, getattr(options, spec.limit_key), options.truncation)
    with tempfile.TemporaryDirectory() as work:
        rows = read_rows(path, Path(work))
        num_rows = min(num_rows, len(rows))
        tokens = tokenize_rows(rows[:num_rows], range(num_rows), Source(path), spec, chat, options)
    for i in range(num_rows):
        row = {name: values[i] for name, values in tokens.items()}
        yield ""
        yield from row_lines(f"{path}:{i + 1}", row, chat, limit)
    uses = [{"values": use, "counts": 1} for use in tokens["use"]]
    is_training = "loss_mask" in spec.unused
    lines = list(report_lines([path], [uses_of_file(uses)], is_training))
    if lines:  # none if every row is an error or blank
        yield ""
        yield "in the first row:" if num_rows == 1 else f"in the first {num_rows:,} rows:"
        yield from lines


def model_directory(name: str) -> Path:
    """Return the directory of a model; small files of a model on the hub are downloaded."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*config.json"]))


def row_lines(name: str, row: dict, chat: ChatTokenizer, limit: LengthLimit) -> Iterator[str]:
    """Yield the lines for one tokenized row: its columns, as in CacheSpec.unused."""
    ids = row["input_ids"]
    if row.get("error"):
        yield f"error: {row['error']}"
    elif row["is_lost"]:
        yield f"{name}: dropped, because the template loses a part of it (data.lost_fields=drop)"
    elif row.get("is_identical"):
        yield f"{name}: not used: the chosen and the rejected answer are the same"
    elif not ids and not row["length"]:
        yield f"{name}: not used: the line is blank"
    elif row.get("cut"):
        yield f"{name}: not used: truncation to data.{limit.key}={limit.tokens} would cut an image"
    elif not ids and limit.is_exceeded(row["length"]):
        yield f"{name}: not used: {row['length']} tokens, more than data.{limit.key}={limit.tokens}"
    elif not ids:
        yield f"{name}: not used: no token is trained"
    elif "chosen_tokens" in row:
        answers = split_answers(name, ids, row["loss_mask"], row["chosen_tokens"])
        for answer_name, answer_ids, mask in answers:
            yield from token_lines(answer_name, answer_ids, mask, chat)
    else:
        yield from token_lines(name, ids, row.get("loss_mask"), chat)
        record = json.loads(row.get("record") or "{}")
        yield from teacher_lines(name, record.get("teacher_ids"), chat)


def teacher_lines(name: str, ids: Sequence[int] | None, chat: ChatTokenizer) -> Iterator[str]:
    """Yield the lines for the prompt that the teacher sees; None: it sees the policy's."""
    if ids is not None:
        yield from token_lines(f"{name}, as the teacher sees it", ids, None, chat)


def preview_dataset(
    data: TokenDataset | PromptDataset, chat: ChatTokenizer, num_rows: int
) -> Iterator[str]:
    """Yield the lines of a preview of the first rows of a tokenized data set."""
    for i in range(min(num_rows, len(data))):
        if isinstance(data, TokenDataset):
            for name, ids, mask in data.sequences(i):
                yield from token_lines(name, ids, mask, chat)
            continue
        prompt = data[i]
        yield from token_lines(f"row {i + 1}", prompt.input_ids, None, chat)
        yield from teacher_lines(f"row {i + 1}", prompt.teacher_ids, chat)


def token_lines(
    name: str, ids: Sequence[int], mask: Sequence[int] | None, chat: ChatTokenizer
) -> Iterator[str]:
    """Yield a line with the numbers of tokens, and the lines of the decoded text."""
    trained = "" if mask is None else f", {sum(mask)} of them trained"
    yield f"{name}: {len(ids)} tokens{trained}"
    for line in highlight(ids, mask, chat).split("\n"):
        yield f"  | {line}"


def highlight(ids: Sequence[int], mask: Sequence[int] | None, chat: ChatTokenizer) -> str:
    """Return the text of the tokens, with marks around runs of trained tokens.

    Args:
        mask: 1 for each trained token, else 0; None: no token is trained.
    """
    before, after = TRAINED_ON_TERMINAL if has_colours() else TRAINED_ELSEWHERE
    if mask is None:
        mask = [0] * len(ids)
    shown = []
    for is_trained, run in itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]):
        text = shorten(decode([token for token, _ in run], chat))
        text = CONTROL_CHARACTER.sub(lambda match: ascii(match[0])[1:-1], text)
        shown.append(f"{before}{text}{after}" if is_trained else text)
    return "".join(shown)


def decode(ids: Sequence[int], chat: ChatTokenizer) -> str:
    """Return the text of these tokens, in which tokens of images are only counted."""
    if chat.processor is None:
        return chat.decode(ids)
    types = chat.processor.token_types([ids])[0].tolist()
    texts = []
    for is_image, run in itertools.groupby(zip(ids, types), key=lambda pair: pair[1] > 0):
        tokens = [token for token, _ in run]
        texts.append(f"<{len(tokens)} image tokens>" if is_image else chat.decode(tokens))
    return "".join(texts)


def has_colours() -> bool:
    """Return whether standard output shows colours: https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def shorten(text: str) -> str:
    """Leave out the middle of a long text."""
    if len(text) <= MAX_LENGTH:
        return text
    half = MAX_LENGTH // 2
    return f"{text[:half]} ... {text[-half:]}"


def row_count(text: str) -> int:
    """Return a number of rows. Raises ArgumentTypeError for numbers below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number of rows, at least 1")
    return int(text)


def main(arguments: list[str]) -> None:
    """Print a preview of the file that the arguments name."""
    import datasets

    parser = argparse.ArgumentParser("python -m data.preview", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kinds = parser.add_mutually_exclusive_group()
    scripts = {
        "prompts": "train_ppo.py",
        "preferences": "train_dpo.py",
        "rewards": "train_rm.py",
    }
    for kind, script in scripts.items():
        kinds.add_argument(
            f"--{kind}",
            dest="kind",
            action="store_const",
            const=kind,
            default="training",
            help=f"the rows are for {script}",
        )
    parser.add_argument("--rows", type=row_count, default=NUM_ROWS, help="number of rows to show")
    parser.add_argument("file", help="a data file, or a pattern or a directory of them")
    parser.add_argument("settings", nargs="*", help="YAML files and key=value pairs")
    args = parser.parse_intermixed_args(arguments)
    datasets.disable_progress_bars()  # they would interrupt the output
    defaults, spec = KINDS[args.kind]
    config = load(defaults, [*args.settings, f"data.train_files={args.file}"])
    if config.model.images and args.kind not in KINDS_WITH_IMAGES:
        raise InputError(
            f"model.images=true does not work with {scripts[args.kind]}: set model.images=false"
        )
    for path in find_files(config.data.train_files):
        for line in preview_file(path, spec, config, args.rows):
            print(line)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except InputError as error:
        report(error)
        sys.exit(2)
