"""Tiny models, pairs with and without margins, and scored answers, for runs of train_rm.py."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from examples.arithmetic import make_rows, make_tokenizer
from tests.preferences.assets import NUM_ROWS, arguments, make_assets, make_pair, write_rows
from tests.support.models import make_model

SCRIPT = "train_rm.py"


def make_reward_assets(directory: Path) -> None:
    """Write a language model, a classifier with a random score head, and rows.

    model/ and classifier/ have the same weights apart from their heads. train.jsonl and val.jsonl
    hold pairs, margins.jsonl pairs of which two in three have a margin, and scores.jsonl answers.
    """
    make_assets(directory)
    # vLLM's attention on a CPU needs heads of 32 numbers.
    make_model(directory / "model", "qwen3", vocab_size=len(make_tokenizer()), head_dim=32)
    make_classifier(directory / "model", directory / "classifier")
    train, _ = make_rows()
    margins = []
    scores = []
    for number, row in enumerate(train[:NUM_ROWS]):
        pair = make_pair(number, row)
        margin = {"margin": number % 7 / 4} if number % 3 else {}
        margins.append(pair | margin)
        scores.append(row | {"score": number % 5 - 1.5})
    write_rows(directory / "margins.jsonl", margins)
    write_rows(directory / "scores.jsonl", scores)


def make_classifier(language_model: Path, directory: Path) -> None:
    """Save a sequence classifier of transformers, with the tokenizer, for one label."""
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(language_model)
    model = AutoModelForSequenceClassification.from_pretrained(
        language_model, num_labels=1, dtype=torch.float32
    )
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def command(num_ranks: int, assets: Path, out: Path, *overrides: str) -> list[str]:
    """Return the command of 6 steps; ASSETS in an override stands for the directory of assets."""
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    replaced = [override.replace("ASSETS", str(assets)) for override in overrides]
    return [*start, SCRIPT, *arguments(assets, out, *replaced)]


@torch.no_grad()
def scores_of_transformers(model, tokenizer, chats: list[list[dict]]) -> torch.Tensor:
    """Return the scores of conversations, [n], computed in one padded batch."""
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    return model(**inputs).logits[:, 0]


def chats_of(rows: list[dict], side: str) -> list[list[dict]]:
    return [row["prompt"] + row[side] for row in rows]
