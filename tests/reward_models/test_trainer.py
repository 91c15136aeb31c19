"""A step and a validation of a reward model, with an engine whose scores are simple."""

from types import SimpleNamespace

import pytest
from torch import Tensor

from config import InputError, load
from data.batching.batch import Batch
from engines.heads import Head
from reward_models import settings as settings_module
from reward_models.losses import RewardLoss
from reward_models.settings import check_model, check_settings
from reward_models.trainer import RewardTrainer
from tests.reward_models.test_losses import batch_of
from tests.support.planned import PlannedEngine

# The numbers of tokens of chosen and rejected answers. The score of an answer is a tenth of its
# last token, and tokens are numbered.
LENGTHS = [2, 3, 4, 1, 2, 5]


class Engine(PlannedEngine):
    """Scores are a tenth of the tokens. calls: also the steps that it has taken."""

    def values(self, batch: Batch, micro_batches) -> Tensor:
        return batch.input_ids / 10

    def train_batch(self, share: Batch, loss_fn, step: int, micro_batches) -> dict[str, float]:
        self.calls.append(("step", step))
        loss, amounts = loss_fn(self.values(share, micro_batches), share.fields)
        return {"loss": loss.item(), **{name: amount.item() for name, amount in amounts.items()}}


class Rows:
    """Three pairs, or the six answers of these with scores."""

    def __init__(self, has_pairs: bool):
        self.has_pairs = has_pairs

    def __len__(self) -> int:
        return 3 if self.has_pairs else 6

    def batch(self, rows: range) -> Batch:
        whole = batch_of(LENGTHS, list(range(6)), [0.5] * 6)
        if self.has_pairs:
            part = whole.select([answer for row in rows for answer in (2 * row, 2 * row + 1)])
            part.fields["answer"] = part.fields["answer"] - 2 * rows[0]
            return part
        part = whole.select(rows)
        part.fields["answer"] = 2 * (part.fields["answer"] - rows[0])
        return part


def make_trainer(loss: str) -> RewardTrainer:
    config = load("rm.yaml", ["model.path=m", "data.train_files=t", f"algorithm.loss={loss}"])
    return RewardTrainer(Engine(), RewardLoss.of(config))


def scores_of(rows: Rows) -> list[float]:
    batch = rows.batch(range(len(rows)))
    return (batch.input_ids[batch.fields["loss_mask"] > 0] / 10).tolist()


@pytest.mark.parametrize("loss, group_size", [("bradley_terry", 2), ("regression", 1)])
def test_a_step_trains_on_the_whole_batch(loss, group_size):
    trainer = make_trainer(loss)
    rows = Rows(has_pairs=group_size == 2)
    batch = rows.batch(range(len(rows)))
    results = trainer.train_batch(batch, 5)
    assert trainer.engine.calls == [group_size, ("step", 5)]
    assert results["perf/plan_efficiency"] == 0.75
    scores = scores_of(rows)
    assert results["mean_reward"] == pytest.approx(sum(scores) / 6)
    evaluated = trainer.evaluate(batch)
    assert evaluated["loss"] == pytest.approx(results["loss"])
    trainer.engine.others = (0, 1)
    mean = trainer.evaluate(batch)["mean_reward"]
    assert mean == pytest.approx(sum(scores[2:]) / 6), "another rank reports the first two"


@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_validation_of_pairs_covers_all_rows(process_group, batch_size):
    rows = Rows(has_pairs=True)
    metrics = make_trainer("bradley_terry").validate(rows, batch_size)
    scores = scores_of(rows)
    chosen = sum(scores[::2]) / 3
    rejected = sum(scores[1::2]) / 3
    loss = make_trainer("bradley_terry").evaluate(rows.batch(range(3)))["loss"]
    right = sum(a > b for a, b in zip(scores[::2], scores[1::2])) / 3
    assert metrics == pytest.approx(
        {
            "val/loss": loss,
            "val/mean_reward": sum(scores) / 6,
            "val/accuracy": right,
            "val/margin": chosen - rejected,
            "val/rewards/chosen": chosen,
            "val/rewards/rejected": rejected,
        }
    )


@pytest.mark.parametrize("batch_size", [4, 6])
def test_a_validation_of_scored_answers_has_the_error(process_group, batch_size):
    rows = Rows(has_pairs=False)
    metrics = make_trainer("regression").validate(rows, batch_size)
    scores = scores_of(rows)
    assert metrics.keys() == {"val/loss", "val/mean_reward", "val/mean_absolute_error"}
    error = sum(abs(score - 0.5) for score in scores) / 6
    assert metrics["val/mean_absolute_error"] == pytest.approx(error)
    assert metrics["val/mean_reward"] == pytest.approx(sum(scores) / 6)


@pytest.mark.parametrize(
    "settings, message",
    [
        (["model.images=true"], "model.images=true does not work with train_rm.py"),
        (
            ["model_engine=megatron", "model.mtp.enable=true"],
            "model.mtp.enable=true does not work with train_rm.py",
        ),
        (
            ["algorithm.loss=regression", "algorithm.center_rewards_coefficient=0.1"],
            "algorithm.center_rewards_coefficient=0.1 does nothing with algorithm.loss=regression",
        ),
        (["algorithm.center_rewards_coefficient=0.1"], None),
    ],
)
def test_settings_that_do_not_fit_a_reward_model_are_an_error(settings, message):
    config = load("rm.yaml", ["model.path=m", "data.train_files=t", *settings])
    if message is None:
        assert check_settings(config).center == 0.1
        return
    with pytest.raises(InputError, match=message):
        check_settings(config)


def test_a_model_is_checked_with_the_head_that_is_trained(monkeypatch):
    calls = []

    def check(config, world_size, head):
        calls.append((world_size, head))
        return "text config"

    def build(hf_config, dtype, head):
        calls.append((hf_config, head))
        return "model"

    monkeypatch.setattr(settings_module, "engine_class", lambda name: SimpleNamespace(check=check))
    monkeypatch.setattr(settings_module, "read_hf_config", lambda path: f"config of {path}")
    monkeypatch.setattr(settings_module, "build_on_meta", build)
    monkeypatch.setattr(settings_module, "check_trainable", lambda *values: calls.append(values))
    config = load("rm.yaml", ["model.path=m", "data.train_files=t"])
    assert check_model(config, 4) == "text config"
    assert calls == [
        (4, Head.VALUES),
        ("config of m", Head.VALUES),
        ("config of m", "model"),
    ]
