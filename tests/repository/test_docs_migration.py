"""The pages for users of other projects agree with the answers to their keys (names.yaml)."""

import re
from functools import cache

import pytest
from omegaconf import OmegaConf

from config import load
from configs.files import flatten
from configs.names import readers, suggest
from tests.repository.pages import PAGES, block_containing

MIGRATIONS = [page for page in PAGES if page.startswith("docs/from_")]
SCRIPTS = ("sft.yaml", "dpo.yaml", "rm.yaml", "ppo.yaml")
NEEDED = ["model.path=m", "data.train_files=t"]
KEY = r"[a-z_]+(?:\.[a-z0-9_]+)+|output_dir|model_engine"
# Names in the tables that are no keys of the other project.
NO_KEYS = {
    "docs/from_trl.md": {"dataset", "model", "RLOOTrainer", "FSDP or DeepSpeed ZeRO-3", "ZeRO-2"},
    "docs/from_verl.md": {"reward.custom_reward_function.name"},
    "docs/from_llamafactory.md": {"full", "FORCE_TORCHRUN", "NPROC_PER_NODE", "NNODES"},
}


def rows_of_keys(page: str) -> list[tuple[str, str]]:
    """Return (names of the other project, ours) for the rows of the table of keys."""
    section = PAGES[page].partition("\n## Keys\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.MULTILINE)
    return rows[1:]


def names_in(cell: str) -> list[str]:
    """Return the keys in a cell of the other project, without values and remarks."""
    cell = re.sub(r"\([^)]*\)|\"[^\"]*\"|[=:]\s*[^,;]*", "", cell)
    names = [name.strip() for name in re.split(r", | and ", cell)]
    prefix = names[0].rpartition(".")[0]
    whole_names = [name if "." in name or not prefix else f"{prefix}.{name}" for name in names]
    return [name for name in whole_names if not name.endswith((".", "*"))]


CASES = [
    (page, name, ours)
    for page in MIGRATIONS
    for theirs, ours in rows_of_keys(page)
    for name in names_in(theirs)
    if name not in NO_KEYS[page]
]


@cache
def known_keys(script: str) -> dict:
    return flatten(load(script, NEEDED))


def answers(name: str) -> str:
    """Return the answers to an unknown key in all scripts."""
    return " ".join(suggest(name, known_keys(script)) for script in SCRIPTS)


def test_there_are_tables():
    assert len(MIGRATIONS) == 3
    assert len(CASES) > 100


@pytest.mark.parametrize("page, name, ours", CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_the_answer_to_a_key_agrees_with_the_table(page, name, ours):
    """The answer names one of the keys in the table's row, if the row has any."""
    answer = answers(name)
    assert answer, f"{name} has no answer"
    named = {key for key in re.findall(KEY, ours) if key in readers()}
    answered = {key for key in re.findall(KEY, answer) if key in readers()}
    if named and answered:
        assert named & answered, f"{name}: the page names {named}, the answer is {answer!r}"


def test_the_example_for_llamafactory_has_the_numbers_of_its_yaml(docs_folder):
    page = "docs/from_llamafactory.md"
    theirs = OmegaConf.create(block_containing(page, "text", "cutoff_len"))
    for key in theirs:
        assert answers(key), f"{key} has no answer"
    ours = load("sft.yaml", [str(docs_folder / "support.yaml")])
    rows_of_gpu = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps
    assert ours.data.train_batch_size == rows_of_gpu * 8
    longest = theirs.per_device_train_batch_size * theirs.cutoff_len
    assert ours.data.max_tokens_per_micro_batch == longest
    assert ours.data.val_size == theirs.val_size * theirs.max_samples
    assert ours.data.val_size + ours.data.train_max_samples == theirs.max_samples
    lora = ours.model.lora
    assert [lora.rank, lora.alpha] == [theirs.lora_rank, theirs.lora_alpha]
    assert lora.dropout == theirs.lora_dropout
    assert ours.optim.lr == theirs.learning_rate
