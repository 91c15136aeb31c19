"""What train_rm.py sets up before its model, on one rank."""

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig

import train_rm
from data.reward_dataset import OPTIONS
from job.run import Run
from reward_models.settings import ROLE, check_settings
from tests.preferences.assets import (
    NUM_ROWS,
    add_long_pair,
    arguments,
    longest_first_sampler,
    longest_rows,
)
from tests.reward_models.assets import make_reward_assets
from tests.support.scripts import (
    CHANGED,
    check_changed_settings,
    set_up_in_fork,
)


def set_up(config: DictConfig) -> Run:
    return train_rm.set_up(config, check_settings(config))


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """Pairs for training; scored answers and a long pair for validation."""
    directory = tmp_path_factory.mktemp("assets")
    make_reward_assets(directory)
    add_long_pair(directory)
    return directory


@pytest.fixture
def call(assets, tmp_path):
    """Return a function: settings -> what set_up() has made."""

    def call(val: str, *settings: str) -> dict:
        pairs = arguments(assets, tmp_path, f"data.val_files={assets}/{val}.jsonl", *settings)
        return set_up_in_fork(set_up, "rm.yaml", pairs, tmp_path / "log")

    return call


def test_a_run_knows_its_settings(call, assets):
    relative = f"model.path={os.path.relpath(assets / 'model')}"
    made = call("long", *CHANGED, relative, "data.max_tokens_per_micro_batch=1000")
    identity = check_changed_settings(made, assets / "model", OPTIONS)
    assert identity["algorithm.loss"] == "bradley_terry"
    assert made["progress"]["is_classifier"] is True
    assert made["rows"] == {"data.train_files": NUM_ROWS, "data.val_files": 1}
    assert made["stages"] == ["train_batch", "validate"]
    assert made["roles"] == [ROLE]
    assert "more than the model's max_position_embeddings=90" in made["log"]


def test_a_sampler_reads_the_rows(call, assets, tmp_path):
    made = call("val", longest_first_sampler(tmp_path))
    assert made["first batch"] == longest_rows(assets)


@pytest.mark.parametrize(
    "val, message",
    [
        ("long", "tokens, more than data.max_tokens_per_micro_batch=128: raise it"),
        ("scores", "44 of 44 rows of data.val_files are answers with a score"),
    ],
)
def test_the_rows_of_a_validation_are_checked_too(call, val, message):
    assert message in call(val)["error"]
