"""The losses of reward models, written out in fp64, and how a batch is put together."""

import math

import pytest
import torch
from omegaconf import OmegaConf

from algorithms.reward_losses import REWARD_LOSSES
from config import InputError, load
from data.batching.batch import make_cu_seqlens
from data.reward_dataset import with_score_tokens
from reward_models.losses import Counts, RewardLoss


def loss_of(**algorithm) -> RewardLoss:
    config = load("rm.yaml", ["model.path=/m", "data.train_files=/f"])
    return RewardLoss.of(OmegaConf.merge(config, {"algorithm": algorithm}))


def batch_of(lengths: list[int], answers: list[int], targets: list[float]):
    """Return a batch of conversations, whose tokens are numbered."""
    batch = with_score_tokens(torch.arange(sum(lengths)), lengths)
    lengths = batch.cu_seqlens.diff()
    batch.fields["answer"] = torch.tensor(answers).repeat_interleave(lengths)
    batch.fields["target"] = torch.tensor(targets).repeat_interleave(lengths)
    return batch


def test_a_score_belongs_to_the_token_after_a_conversation():
    batch = batch_of([3, 2], [0, 1], [0.5, 0.5])
    assert batch.input_ids.tolist() == [0, 1, 2, 2, 3, 4, 4]
    assert batch.lengths == [4, 3]
    assert batch.fields["loss_mask"].tolist() == [0, 0, 0, 1, 0, 0, 1]
    assert batch.fields["answer"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert torch.equal(batch.cu_seqlens, make_cu_seqlens(torch.tensor([4, 3])))


# Chosen, rejected, chosen, ... Their sum is not 0, so that a mean shows its denominator.
SCORES = [1.5, -0.25, 0.75, 1.0, -2.0, -1.25]
MARGINS = [0.0, 0.5, 1.25]


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_bradley_terry_is_the_formula_in_fp64(center):
    loss = loss_of(loss="bradley_terry", center_rewards_coefficient=center)
    targets = [margin for margin in MARGINS for _ in range(2)]
    batch = batch_of([2] * 6, list(range(6)), targets)
    values = torch.full((len(batch.input_ids),), 99.0, dtype=torch.float64)
    values[batch.cu_seqlens[1:] - 1] = torch.tensor(SCORES, dtype=torch.float64)
    values.requires_grad_()
    result, amounts = loss.of_batch(Counts.of(batch))(values, batch.fields)

    pairs = list(zip(SCORES[::2], SCORES[1::2], MARGINS))
    losses = [math.log(1 + math.exp(-(c - r - m))) + center * (c + r) ** 2 for c, r, m in pairs]
    assert result.item() == pytest.approx(sum(losses) / 3, rel=1e-12)
    assert amounts["accuracy"].item() == pytest.approx(1 / 3)
    assert amounts["margin"].item() == pytest.approx(sum(c - r for c, r, _ in pairs) / 3)
    assert amounts["rewards/chosen"].item() == pytest.approx(sum(SCORES[::2]) / 3)
    assert amounts["rewards/rejected"].item() == pytest.approx(sum(SCORES[1::2]) / 3)
    assert amounts["mean_reward"].item() == pytest.approx(sum(SCORES) / 6)

    result.backward()
    gradient = values.grad[batch.cu_seqlens[1:] - 1]
    for number, (c, r, m) in enumerate(pairs):
        slope = -1 / (1 + math.exp(c - r - m)) / 3
        centering = center * 2 * (c + r) / 3
        assert gradient[2 * number].item() == pytest.approx(slope + centering, rel=1e-12)
        assert gradient[2 * number + 1].item() == pytest.approx(-slope + centering, rel=1e-12)
    assert values.grad.count_nonzero() == 6, "no other token has a score"


def test_micro_batches_add_up_to_the_batch():
    loss = loss_of(loss="bradley_terry", center_rewards_coefficient=0.1)
    targets = [margin for margin in MARGINS for _ in range(2)]
    batch = batch_of([2, 3, 1, 4, 2, 2], list(range(6)), targets)
    batch.fields["values"] = torch.arange(len(batch.input_ids)).sin()
    counts = Counts.of(batch)
    totals = {}
    for members in ([4, 5], [0, 1, 2, 3]):
        part = batch.select(members)
        values = part.fields.pop("values")
        result, amounts = loss.of_batch(counts)(values, part.fields)
        for name, amount in {"loss": result, **amounts}.items():
            totals[name] = totals.get(name, 0) + amount.item()
    values = batch.fields.pop("values")
    result, amounts = loss.of_batch(counts)(values, batch.fields)
    for name, amount in {"loss": result, **amounts}.items():
        assert totals[name] == pytest.approx(amount.item(), rel=1e-6), name


def test_a_tie_is_not_correct():
    """A new value head scores every answer 0, which must not look perfect."""
    loss = loss_of(loss="bradley_terry")
    batch = batch_of([2, 2], [0, 1], [0.0, 0.0])
    _, amounts = loss.of_batch(Counts.of(batch))(torch.zeros(6), batch.fields)
    assert amounts["accuracy"].item() == 0


def test_regression_is_the_squared_error():
    loss = loss_of(loss="regression")
    targets = [1.0, -0.5, 3.0]
    batch = batch_of([2, 3, 4], [0, 2, 4], targets)
    values = torch.zeros(len(batch.input_ids), dtype=torch.float64)
    values[batch.cu_seqlens[1:] - 1] = torch.tensor([0.5, 0.5, 2.0], dtype=torch.float64)
    result, amounts = loss.of_batch(Counts.of(batch))(values, batch.fields)
    assert result.item() == pytest.approx((0.25 + 1 + 1) / 3)
    assert amounts["mean_absolute_error"].item() == pytest.approx((0.5 + 1 + 1) / 3)
    assert amounts["mean_reward"].item() == pytest.approx(1.0)


OWN = """
def hinge(chosen_scores, rejected_scores, *, gap: float = 1.0, **_):
    return (gap - chosen_scores + rejected_scores).clamp(min=0)

def mixed(chosen_scores, scores, **_):
    return scores

def summed(chosen_scores, rejected_scores, **_):
    return (chosen_scores - rejected_scores).sum()
"""


def test_a_loss_of_your_own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    batch = batch_of([2, 2], [0, 1], [0.0, 0.0])
    values = torch.tensor([0, 0, 1.0, 0, 0, 0.5])
    hinge = loss_of(loss=f"{file}:hinge", loss_kwargs={"gap": 2.0})
    assert hinge.takes_pairs
    assert hinge.of_batch(Counts.of(batch))(values, batch.fields)[0].item() == 1.5
    with pytest.raises(InputError, match=f"^algorithm.loss={file}:mixed must read either pairs"):
        loss_of(loss=f"{file}:mixed")
    with pytest.raises(InputError, match=r"one loss per pair, shape \[1\], not \[\]"):
        loss_of(loss=f"{file}:summed").of_batch(Counts.of(batch))(values, batch.fields)


def test_centering_is_for_pairs():
    with pytest.raises(InputError, match="learns from single answers: leave it out"):
        loss_of(loss="regression", center_rewards_coefficient=0.1)
    assert set(REWARD_LOSSES) == {"bradley_terry", "regression"}
