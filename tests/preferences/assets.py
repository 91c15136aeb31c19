"""A tiny model, and pairs of right and wrong answers, for runs of train_dpo.py."""

import json
import shutil
import sys
from pathlib import Path

from examples.arithmetic import make_rows, make_tokenizer
from tests.support.models import make_model
from tests.support.scripts import change_description

NUM_ROWS = 44
BATCH_SIZE = 8
SCRIPT = "train_dpo.py"
SAMPLER = """
def longest_first(rows, batch_size, **_):
    by_length = sorted(range(len(rows)), key=lambda row: -len(rows[row]["chosen"][0]["content"]))
    return by_length[:batch_size]
"""


def make_assets(directory: Path, kind: str = "qwen3") -> None:
    """Write model/, train.jsonl, val.jsonl, and labels.jsonl with labels instead of pairs."""
    tokenizer = make_tokenizer()
    make_model(directory / "model", kind, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(directory / "model")
    train, val = make_rows()
    write_rows(directory / "train.jsonl", [make_pair(*x) for x in enumerate(train[:NUM_ROWS])])
    write_rows(directory / "val.jsonl", [make_pair(*x) for x in enumerate(val[:12])])
    labels = [row | {"label": i % 3 > 0} for i, row in enumerate(train[:NUM_ROWS])]
    write_rows(directory / "labels.jsonl", labels)


def add_long_pair(directory: Path) -> None:
    """Write long.jsonl, a pair longer than the model allows, which also has an MTP layer now."""
    change_description(directory / "model", max_position_embeddings=90, num_nextn_predict_layers=1)
    row = json.loads((directory / "train.jsonl").read_text().splitlines()[0])
    answer = [{"role": "assistant", "content": "1" * 100}]
    write_rows(directory / "long.jsonl", [row | {"chosen": answer}])


def longest_first_sampler(directory: Path) -> str:
    """Write a sampler that begins with the longest chosen answers; return its setting."""
    (directory / "mine.py").write_text(SAMPLER)
    return f"data.sampler={directory}/mine.py:longest_first"


def longest_rows(assets: Path) -> list[int]:
    """Return the rows of the first batch of this sampler."""
    rows = [json.loads(line) for line in (assets / "train.jsonl").read_text().splitlines()]
    lengths = [len(row["chosen"][0]["content"]) for row in rows]
    return sorted(range(NUM_ROWS), key=lambda row: -lengths[row])[:BATCH_SIZE]


def settings_with_unknown_token(assets: Path) -> list[str]:
    """Return settings of a tokenizer and a row with a token that the model has no embedding for."""
    directory = assets / "unknown"
    shutil.copytree(assets / "model", directory, dirs_exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(directory)
    question = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "<new>"}
    pair = make_pair(1, {"messages": [question, answer]})
    write_rows(directory / "rows.jsonl", [pair] * BATCH_SIZE)
    return [f"model.path={directory}", f"data.train_files={directory}/rows.jsonl"]


def make_pair(number: int, row: dict) -> dict:
    """Return a row whose rejected answer is a number that has nothing to do with the question."""
    question, answer = row["messages"]
    wrong = {"role": "assistant", "content": str(7 * number)}
    return {"prompt": [question], "chosen": [answer], "rejected": [wrong]}


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(assets: Path, out: Path, *overrides: str) -> list[str]:
    """Train for 6 steps: 1.2 epochs of 5 steps each, with 4 rows left over."""
    return [
        f"model.path={assets}/model",
        f"data.train_files={assets}/train.jsonl",
        f"output_dir={out}",
        "trainer.report=false",
        f"data.cache_dir={assets}/cache",
        "engine.compute_dtype=float32",
        f"data.train_batch_size={BATCH_SIZE}",
        "data.max_tokens_per_micro_batch=128",
        "optim.lr=1e-3",
        "trainer.total_steps=6",
        *overrides,
    ]


def command(num_ranks: int, assets: Path, out: Path, *overrides: str) -> list[str]:
    start = [sys.executable]
    if num_ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*start, SCRIPT, *arguments(assets, out, *overrides)]
