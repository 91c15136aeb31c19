"""The cache of the reference's log-probabilities: what its name depends on, and what it spares."""

from pathlib import Path

import pytest

from config import load
from data.preference_dataset import PreferenceDataset, tokenize_preferences
from examples.arithmetic import make_tokenizer
from preferences.cache import cache_folder
from preferences.losses import PreferenceLoss
from preferences.reference import model_stages, role_configs
from tests.preferences.assets import make_pair, write_rows
from tests.support.models import make_model

QUESTION = {"role": "user", "content": "What is 1+1"}
ROWS = [
    {"messages": [QUESTION, {"role": "assistant", "content": str(number)}]} for number in range(4)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    tokenizer = make_tokenizer()
    for name, family in (("model", "qwen3"), ("other", "llama")):
        make_model(folder / name, family, vocab_size=len(tokenizer))
    pairs = [make_pair(number + 1, row) for number, row in enumerate(ROWS)]
    write_rows(folder / "rows.jsonl", pairs)
    write_rows(folder / "fewer.jsonl", pairs[:-1])
    return folder


def name_of(folder: Path, rows: str, *settings: str) -> str:
    """Return the name of the folder for a file of rows."""
    model = f"model.path={folder}/model"
    config = load("dpo.yaml", [model, f"data.train_files={folder}/{rows}", *settings])
    tokens = tokenize_preferences(
        config.data.train_files, make_tokenizer(), config.data, folder / "tokens", folder / "model"
    )
    return cache_folder(config, PreferenceDataset.load(tokens), folder).name


@pytest.mark.parametrize(
    "rows, settings",
    [
        ("fewer.jsonl", []),
        ("rows.jsonl", ["reference.path={folder}/other"]),
        ("rows.jsonl", ["model.path={folder}/other"]),
        ("rows.jsonl", ["model_engine=megatron"]),
        ("rows.jsonl", ["engine.compute_dtype=float32"]),
        ("rows.jsonl", ["engine.param_dtype=bfloat16"]),
        ("rows.jsonl", ["engine.float8=rowwise"]),
        ("rows.jsonl", ["engine.float8_exclude=[o_proj]"]),
        ("rows.jsonl", ["data.system_prompt=Add"]),
    ],
    ids=[
        "rows",
        "reference",
        "model",
        "engine",
        "precision",
        "precision of weights",
        "8 bits",
        "without 8 bits",
        "prompt",
    ],
)
def test_what_changes_the_log_probabilities_changes_the_name(folder, rows, settings):
    changed = [setting.format(folder=folder) for setting in settings]
    assert name_of(folder, rows, *changed) != name_of(folder, "rows.jsonl")


def test_nothing_else_changes_the_name(folder):
    settings = ["optim.lr=1", "data.train_batch_size=2", "algorithm.beta=0.3", "trainer.seed=5"]
    settings.append(f"reference.path={folder}/model")
    assert name_of(folder, "rows.jsonl", *settings) == name_of(folder, "rows.jsonl")


@pytest.mark.parametrize(
    "settings, expected",
    [
        ([], ["ref_compute_log_prob", "train_batch"]),
        (["reference.cache=true"], ["train_batch"]),
        (["algorithm.loss=simpo"], ["train_batch"]),
        (["algorithm.loss=kto"], ["compute_kl", "ref_compute_log_prob", "train_batch"]),
    ],
    ids=["reference", "cached", "no reference", "KL"],
)
def test_a_cached_reference_computes_in_no_stage_of_a_step(settings, expected):
    config = load("dpo.yaml", ["model.path=m", "data.train_files=t", *settings])
    loss = PreferenceLoss.of(config)
    assert model_stages(config, loss, has_validation=False) == expected
    assert model_stages(config, loss, has_validation=True) == [*expected, "validate"]
    has_engine = "ref_compute_log_prob" in expected
    assert ("reference" in role_configs(config, loss)) == has_engine
