"""Losses, metrics and gradient norms of several steps equal those of TRL's RewardTrainer."""

import json
import sys
from pathlib import Path

import pytest

from tests.preferences.assets import BATCH_SIZE
from tests.reward_models.assets import command, make_reward_assets
from tests.support.launch import metrics, run

pytestmark = pytest.mark.slow

NUM_STEPS = 3
LR = 1e-3
# name -> (file of pairs, coefficient of centering). TRL reads a margin only if every row has one.
RUNS = {
    "pairs": ("train", None),
    "centered": ("train", 0.05),
    "margins": ("all_margins", None),
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("assets")
    make_reward_assets(directory)
    rows = (directory / "margins.jsonl").read_text().splitlines()
    with_margins = [{"margin": 0.0} | json.loads(row) for row in rows]
    text = "".join(json.dumps(row) + "\n" for row in with_margins)
    (directory / "all_margins.jsonl").write_text(text)
    return directory


@pytest.fixture(scope="module")
def logs_of_trl(assets) -> dict[str, list[dict]]:
    settings = {
        "model": str(assets / "classifier"),
        "runs": {name: (f"{assets}/{file}.jsonl", c) for name, (file, c) in RUNS.items()},
        "num_steps": NUM_STEPS,
        "batch_size": BATCH_SIZE,
        "lr": LR,
    }
    path = assets / "settings.json"
    path.write_text(json.dumps(settings))
    done = run([sys.executable, "tests/reward_models/trl_worker.py", path], fresh=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_trl(assets, logs_of_trl, tmp_path, name):
    file, center = RUNS[name]
    settings = [
        "model.path=ASSETS/classifier",
        f"data.train_files=ASSETS/{file}.jsonl",
        "data.shuffle=false",
        f"algorithm.center_rewards_coefficient={center or 0.0}",
        f"optim.lr={LR}",
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps_ratio=0",
        f"trainer.total_steps={NUM_STEPS}",
    ]
    run(command(1, assets, tmp_path, *settings))
    lines = metrics(tmp_path)
    for step, (expected, line) in enumerate(zip(logs_of_trl[name], lines, strict=True), 1):
        for metric, value in expected.items():
            assert line[f"train/{metric}"] == pytest.approx(value, rel=1e-5, abs=1e-5), (
                step,
                metric,
            )
