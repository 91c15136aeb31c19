"""A run of train_dpo.py of one step on one rank: what its parts pass to each other."""

import json
import os
from pathlib import Path

import pytest
from omegaconf import DictConfig

import train_dpo
from engines.model.model_files import fingerprint
from examples.arithmetic import make_tokenizer
from tests.preferences.assets import BATCH_SIZE, NUM_ROWS, arguments, make_assets
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
    """Run the script; print the roles whose memory it estimates, and the model of its export."""
    print_roles(train_dpo)
    print_base_names()
    os.chdir(Path(config.output_dir).parent)  # model.path is relative
    train_dpo.main(config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """The directory of a run, and what it has printed."""
    folder = tmp_path_factory.mktemp("step")
    make_assets(folder)
    limit_positions(folder / "model", 8)
    rows = f"data.val_files={folder}/val.jsonl"
    settings = ["model.path=model", rows, "trainer.total_steps=1"]
    out = folder / "out"
    pairs = arguments(folder, out, *settings, "trainer.max_checkpoints=1")
    return out, run_in_fork(main, "dpo.yaml", pairs, folder / "log.txt")


def test_exports_and_checkpoints_name_the_end_token_that_rows_teach(finished):
    out, printed = finished
    turn_end = make_tokenizer().eos_token_id
    assert f"teach the model to end a turn with <|im_end|> ({turn_end})" in printed
    for directory in (out / "hf", out / "checkpoints" / "step_00000001" / "hf"):
        generation = json.loads((directory / "generation_config.json").read_text())
        assert turn_end in generation["eos_token_id"]


def test_the_log_tells_what_the_run_does(finished):
    out, printed = finished
    assert f"model: {out}/hf" in printed
    assert f"an export is based on {out.parent}/model\n" in printed
    assert "memory of None reference\n" in printed
    assert "more than the model's max_position_embeddings=8" in printed
    assert f"step 0 of 1 (5 per epoch), {NUM_ROWS} rows, 1 data-parallel rank on cpu" in printed
    before, line = metrics(out)  # the first one is the validation before training
    assert {"val/loss", "timing/validate"} <= before.keys()
    assert line["train/skipped"] == 0
    assert line["train/epoch"] == 1 / 5
    assert "timing/validate" in line
    assert "timing/save" in line, "it is added at the end of the run"
    assert {"train/loss", "val/loss", "timing/ref_compute_log_prob"} <= line.keys()


def test_a_checkpoint_names_the_settings_of_its_run(finished):
    out, _ = finished
    saved = check_first_checkpoint(out, BATCH_SIZE)
    assert saved["run"]["algorithm.loss"] == "dpo"
    assert saved["run"]["the reference"] == fingerprint(out.parent / "model")


def test_a_stopped_run_exports_nothing_and_goes_on(tmp_path):
    make_assets(tmp_path)
    loss = STOPPING_LOSS.format(
        module="algorithms.preference_losses",
        loss="dpo",
        arguments="chosen_log_ratios, rejected_log_ratios",
        not_finite="tuple(x * float('nan') for x in result)",
    )
    (tmp_path / "loss.py").write_text(loss)
    out = tmp_path / "out"
    pairs = arguments(tmp_path, out, f"algorithm.loss={tmp_path}/loss.py:mine")
    check_a_stopped_run_goes_on(train_dpo.main, "dpo.yaml", pairs, out)
