"""What train_ppo.py sets up: above all the settings that must not change at a resume."""

import json

import pytest
from omegaconf import DictConfig

import train_ppo
from data.prompts import OPTIONS
from examples.arithmetic import make_rows, make_tokenizer
from job.resume import IDENTITY_OF_REFERENCE
from job.run import Run
from tests.support.models import make_model
from tests.support.scripts import (
    CHANGED,
    change_description,
    check_changed_settings,
    set_up_in_fork,
)


def set_up(config: DictConfig) -> Run:
    """Set a run up, without any weights."""
    grader = train_ppo.start_grader(config)
    try:
        return train_ppo.set_up(config, grader)
    finally:
        grader.close()


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Return a function: settings -> what set_up() has made."""
    folder = tmp_path_factory.mktemp("identity")
    tokenizer = make_tokenizer()
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "head_dim": 32}
    make_model(folder / "model", "qwen3", **shape)
    tokenizer.save_pretrained(folder / "model")
    change_description(folder / "model", num_nextn_predict_layers=1)
    rows = "".join(json.dumps(row) + "\n" for row in make_rows()[0][:9])
    (folder / "rows.jsonl").write_text(rows)

    def call(*settings: str) -> dict:
        out = tmp_path_factory.mktemp("out")
        needed = [f"model.path={folder}/model", f"data.train_files={folder}/rows.jsonl"]
        needed += [f"output_dir={out}", f"data.cache_dir={folder}/cache", "reward.num_workers=1"]
        needed += ["data.train_batch_size=4", "reward.function=exact_match", "dry_run=true"]
        needed += ["data.max_prompt_length=40", "rollout.max_tokens=16"]
        made = set_up_in_fork(set_up, "ppo.yaml", [*needed, *settings], out / "log.txt")
        return made | {"model": folder / "model"}

    return call


@pytest.mark.slow  # vLLM checks the model
def test_it_has_what_determines_the_samples_and_the_engines(call):
    identity = call()["progress"]["run"]
    made = call(
        "rollout.n=3",
        "rollout.partial.enable=true",
        "algorithm.rollout_is=token",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_loss=true",
        "trainer.seed=5",
        "optim.lr=1e-5",
    )
    changed = made["progress"]["run"]
    expected = {
        "rollout.n": (8, 3),
        "rollout.partial.enable": (False, True),
        "algorithm.adv_estimator": ("grpo", "gae"),
        "critic": (False, True),
        "trainer.seed": (identity["trainer.seed"], 5),
    }
    assert len(changed.pop(IDENTITY_OF_REFERENCE)) == 8
    assert identity.keys() == changed.keys()
    assert {
        key: (value, changed[key]) for key, value in identity.items() if value != changed[key]
    } == expected
    assert made["roles"] == ["actor", "critic", "reference"]
    assert {"compute_values", "critic_update", "actor_update"} < set(made["stages"])


@pytest.mark.slow  # vLLM checks the model
def test_a_run_knows_its_settings(call):
    made = call(*CHANGED, "algorithm.kl_ctrl.kl_coef=0.25", "algorithm.use_kl_in_reward=true")
    check_changed_settings(made, made["model"], OPTIONS)
    assert made["progress"]["kl_coef"] == 0.25
    assert made["roles"] == ["actor"], "without its adapters, it is the reference"
