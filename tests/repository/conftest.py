"""The directory in which the commands of the pages run."""

from pathlib import Path

import pytest

from examples.arithmetic import build
from tests.repository.pages import SNIPPETS, block_containing
from tests.support.launch import ROOT

MY_YAML = """
model: {path: model}
data: {train_files: train.jsonl, train_batch_size: 16, max_tokens_per_micro_batch: 2048}
"""


def first_lines(path: Path, count: int) -> str:
    return "".join(path.read_text().splitlines(keepends=True)[:count])


@pytest.fixture(scope="session")
def docs_folder(tmp_path_factory) -> Path:
    """Return a directory with the files that the pages name.

    These are the demo's model and a part of its data, my.yaml, and the Python snippets.
    """
    folder = tmp_path_factory.mktemp("docs")
    build(folder)
    train_rows = first_lines(folder / "train.jsonl", 84)
    (folder / "problems.jsonl").write_text(train_rows)
    (folder / "train.jsonl").write_text(train_rows)
    val_rows = first_lines(folder / "val.jsonl", 8)
    (folder / "val.jsonl").write_text(val_rows)
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "my.yaml").write_text(MY_YAML)
    support = block_containing("docs/from_llamafactory.md", "text", "train_max_samples")
    (folder / "support.yaml").write_text(support)
    for name, code in SNIPPETS:
        (folder / name).write_text(code)
    return folder
