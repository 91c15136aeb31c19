"""Losses, rewards and gradient norms of several steps equal those of TRL on the same batches."""

import json
import math
import sys
from pathlib import Path

import pytest

from examples.arithmetic import make_rows, make_tokenizer
from tests.support.launch import metrics, run
from tests.support.models import make_model

pytestmark = pytest.mark.slow

NUM_STEPS = 3
BATCH_SIZE = 8
LR = 1e-3
DESIRABLE_WEIGHT = 1.5
SETTINGS = {
    "dpo": [],
    "ipo": [],
    "kto": [f"algorithm.loss_kwargs.desirable_weight={DESIRABLE_WEIGHT}"],
    "simpo": [],
    "orpo": [],
}
# TRL's name of a metric -> ours.
NAMES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/accuracies": "rewards/accuracies",
}


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    """A model whose tokenizer has no chat template, pairs, and answers with a label.

    With a template, TRL also trains the line break after the end token.
    """
    directory = tmp_path_factory.mktemp("assets")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    make_model(directory / "model", "qwen3", vocab_size=len(tokenizer))
    tokenizer.save_pretrained(directory / "model")
    train, _ = make_rows()
    pairs = []
    labels = []
    for i, row in enumerate(train[: NUM_STEPS * BATCH_SIZE]):
        question, answer = (message["content"] for message in row["messages"])
        pairs.append({"prompt": f"{question}=", "chosen": answer, "rejected": str(7 * i % 100)})
        # Most are undesirable, so that the estimate of the KL divergence becomes negative.
        completion = str(i) if i % 8 else answer
        labels.append({"prompt": f"{question}=", "completion": completion, "label": i % 8 == 0})
    for name, rows in (("pairs", pairs), ("labels", labels)):
        path = directory / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture(scope="module")
def logs_of_trl(assets) -> dict[str, list[dict]]:
    settings = {
        "model": str(assets / "model"),
        "pairs": str(assets / "pairs.jsonl"),
        "labels": str(assets / "labels.jsonl"),
        "num_steps": NUM_STEPS,
        "batch_size": BATCH_SIZE,
        "lr": LR,
        "desirable_weight": DESIRABLE_WEIGHT,
    }
    path = assets / "settings.json"
    path.write_text(json.dumps(settings))
    done = run([sys.executable, "tests/preferences/trl_worker.py", path], fresh=True)
    return json.loads(done.stdout.splitlines()[-1])


def train(assets: Path, loss: str) -> list[dict]:
    """Return the metrics of each step of ours."""
    rows = "labels" if loss == "kto" else "pairs"
    out = assets / f"out_{loss}"
    run(
        [
            sys.executable,
            "train_dpo.py",
            f"model.path={assets}/model",
            f"data.train_files={assets}/{rows}.jsonl",
            f"data.cache_dir={assets}/cache",
            f"data.train_batch_size={BATCH_SIZE}",
            "data.shuffle=false",
            "data.max_tokens_per_micro_batch=128",
            "engine.compute_dtype=float32",
            f"optim.lr={LR}",
            "optim.lr_scheduler_type=constant",
            "optim.lr_warmup_steps_ratio=0",
            f"trainer.total_steps={NUM_STEPS}",
            f"output_dir={out}",
            f"algorithm.loss={loss}",
            *SETTINGS[loss],
        ]
    )
    return metrics(out)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "simpo"])
def test_a_loss_is_that_of_trl(assets, logs_of_trl, loss):
    lines = train(assets, loss)
    for step, (expected, line) in enumerate(zip(logs_of_trl[loss], lines, strict=True), 1):
        for name, our_name in NAMES.items():
            if name in expected and (loss, name) != ("kto", "rewards/accuracies"):
                assert line[our_name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (
                    step,
                    name,
                )
        if loss == "kto":
            assert max(0, line["train/kl"]) == pytest.approx(expected["kl"], rel=1e-5, abs=1e-5)
    if loss == "kto":
        assert min(line["train/kl"] for line in lines) < -0.1
    if loss != "simpo":
        assert lines[0]["rewards/chosen"] == 0, "the reference is the model at the start"
    assert lines[-1]["rewards/chosen"] != 0


def test_the_odds_ratio_of_orpo_is_that_of_trl(assets, logs_of_trl):
    """TRL adds the likelihood of the prompt to that of the chosen answer; the rest is the same."""
    line = train(assets, "orpo")[0]
    expected = logs_of_trl["orpo"][0]
    nll = -line["rewards/chosen"] / 0.1
    log_odds_ratio = (nll - line["train/loss"]) / 0.1
    assert log_odds_ratio == pytest.approx(expected["log_odds_ratio"], rel=1e-4)
    assert not math.isclose(log_odds_ratio, -math.log(2), rel_tol=1e-3)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/accuracies"):
        assert line[name] == pytest.approx(expected[name], rel=1e-5)
