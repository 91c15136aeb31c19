"""A run of train_rm.py of one step on one rank: what its parts pass to each other."""

import json
import os
from pathlib import Path

import pytest
from omegaconf import DictConfig

import train_rm
from examples.arithmetic import make_tokenizer
from reward_models import settings
from tests.reward_models.assets import NUM_ROWS, arguments, make_assets
from tests.support.launch import metrics
from tests.support.scripts import (
    STOPPING_LOSS,
    check_a_stopped_run_goes_on,
    check_first_checkpoint,
    limit_positions,
    print_base_names,
    print_roles,
    run_in_fork,
)

# They start neither torchrun nor vLLM, but a run takes four seconds.
pytestmark = pytest.mark.slow


def main(config: DictConfig) -> None:
    """Run the script, and print some of what its parts pass to each other."""
    choose_padding = settings.choose_padding

    def choose_and_print(run_config, tokenizer, datasets):
        print("padding for rows:", *map(len, datasets))
        return choose_padding(run_config, tokenizer, datasets)

    print_roles(train_rm)
    print_base_names()
    os.chdir(Path(config.output_dir).parent)  # model.path is relative
    settings.choose_padding = choose_and_print
    train_rm.main(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The directory of a run, and what it has printed."""
    folder = tmp_path_factory.mktemp("step")
    make_assets(folder)
    limit_positions(folder / "model", 8)
    out = folder / "out"
    rows = f"data.val_files={folder}/val.jsonl"
    pairs = arguments(folder, out, "model.path=model", rows, "trainer.total_steps=1")
    return out, run_in_fork(main, "rm.yaml", pairs, folder / "log.txt")


def test_the_log_tells_what_the_run_does(finished):
    out, printed = finished
    assert f"model: {out}/hf" in printed
    assert f"an export is based on {out.parent}/model\n" in printed
    assert "memory of trained reward model\n" in printed
    assert "more than the model's max_position_embeddings=8" in printed
    assert f"step 0 of 1 (5 per epoch), {NUM_ROWS} rows, 1 data-parallel rank on cpu" in printed
    before, line = metrics(out)  # the first one is the validation before training
    assert {"val/loss", "timing/validate"} <= before.keys()
    assert line["train/skipped"] == 0
    assert line["train/epoch"] == 1 / 5
    assert "timing/validate" in line
    assert "timing/save" in line, "it is added at the end of the run"
    assert {"train/loss", "val/loss", "val/margin"} <= line.keys()


def test_exports_and_checkpoints_name_the_padding_token(finished):
    out, printed = finished
    num_val_rows = len((out.parent / "val.jsonl").read_text().splitlines())
    assert f"padding for rows: {NUM_ROWS} {num_val_rows}\n" in printed
    for directory in (out / "hf", out / "checkpoints" / "step_00000001" / "hf"):
        config = json.loads((directory / "config.json").read_text())
        assert config["pad_token_id"] == make_tokenizer().pad_token_id
        assert config["id2label"].keys() == {"0"}


def test_a_checkpoint_names_the_settings_of_its_run(finished):
    out, _ = finished
    saved = check_first_checkpoint(out, batch_size=8)
    assert saved["is_classifier"] is True
    assert saved["run"]["algorithm.loss"] == "bradley_terry"


def test_a_stopped_run_exports_nothing_and_goes_on(tmp_path):
    make_assets(tmp_path)
    loss = STOPPING_LOSS.format(
        module="algorithms.reward_losses",
        loss="bradley_terry",
        arguments="chosen_scores, rejected_scores, margins",
        not_finite="result * float('nan')",
    )
    (tmp_path / "loss.py").write_text(loss)
    out = tmp_path / "out"
    pairs = arguments(tmp_path, out, f"algorithm.loss={tmp_path}/loss.py:mine")
    check_a_stopped_run_goes_on(train_rm.main, "rm.yaml", pairs, out)
