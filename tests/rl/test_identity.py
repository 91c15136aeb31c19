"""The settings of a PPO run that must not change when it resumes."""

import json
from pathlib import Path

import pytest

import train_ppo
from engines.parallel import device
from examples.arithmetic import make_rows, make_tokenizer
from job.resume import IDENTITY_OF_REFERENCE
from tests.support.models import make_model
from tests.support.scripts import run_in_fork


def write_progress(config) -> None:
    """Set a run up, without any weights, and write down its progress before the first step."""
    grader = train_ppo.start_grader(config)
    run = train_ppo.set_up(config, grader)
    Path(config.output_dir, "progress.json").write_text(json.dumps(run.progress.to_json()))
    grader.close()
    device.shutdown()


@pytest.fixture(scope="module")
def identity_of(tmp_path_factory):
    """Return a function: settings -> the identity of a run."""
    folder = tmp_path_factory.mktemp("identity")
    tokenizer = make_tokenizer()
    shape = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "head_dim": 32}
    make_model(folder / "model", "qwen3", **shape)
    tokenizer.save_pretrained(folder / "model")
    rows = "".join(json.dumps(row) + "\n" for row in make_rows()[0][:8])
    (folder / "rows.jsonl").write_text(rows)

    def identity_of(*settings: str) -> dict:
        out = tmp_path_factory.mktemp("out")
        needed = [f"model.path={folder}/model", f"data.train_files={folder}/rows.jsonl"]
        needed += [f"output_dir={out}", f"data.cache_dir={folder}/cache", "reward.num_workers=1"]
        needed += ["data.train_batch_size=4", "reward.function=exact_match", "dry_run=true"]
        needed += ["data.max_prompt_length=40", "rollout.max_tokens=16"]
        run_in_fork(write_progress, "ppo.yaml", [*needed, *settings], out / "log.txt")
        return json.loads((out / "progress.json").read_text())["run"]

    return identity_of


@pytest.mark.slow  # vLLM checks the model
def test_it_has_what_determines_the_samples_and_the_engines(identity_of):
    identity = identity_of()
    changed = identity_of(
        "rollout.n=3",
        "rollout.partial.enable=true",
        "algorithm.rollout_is=token",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_loss=true",
        "trainer.seed=5",
        "optim.lr=1e-5",
    )
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
