"""Critics, and checkpoints of actor and critic. Judges the launches of rollout_worker.py."""

import pytest
import torch
from safetensors import safe_open

from tests.rollout.critic_cases import CRITIC_STEPS, make_returns
from tests.rollout.launches import LAUNCHES, WITH_CRITIC
from tests.support.cases import launch_params, needs

pytestmark = pytest.mark.slow


@pytest.fixture(params=launch_params(LAUNCHES, WITH_CRITIC))
def name(request):
    return request.param


@pytest.fixture
def critic(result):
    return result["critic"]


def test_a_critic_begins_at_zero_and_learns_the_returns(critic):
    batch = make_returns()
    returns = batch.fields["returns"]
    has_loss = batch.fields["loss_mask"] > 0
    assert has_loss.sum() > 50
    assert critic["first"] == [0.0] * len(batch.input_ids)
    last = torch.tensor(critic["last"])
    assert (last[~has_loss] == 0).all()
    assert (last[has_loss] != 0).all()
    assert (last - returns)[has_loss].abs().mean() < 0.2
    losses = critic["losses"]
    assert len(losses) == CRITIC_STEPS
    assert losses[-1] < 0.02 * losses[0]
    expected_first_loss = returns[has_loss].square().sum().item() / 100
    assert losses[0] == pytest.approx(expected_first_loss, rel=1e-5)


def test_a_value_depends_on_the_tokens_before_it_only(critic):
    # With other tokens at the end, experts compute products with other rounding.
    assert critic["another end"] == pytest.approx(critic["last"], abs=1e-6)


def test_an_exported_critic_keeps_its_value_head(critic, rollout_folder, name):
    assert critic["read again"] == critic["last"]
    file = rollout_folder / f"{name}_critic" / "model.safetensors"
    with safe_open(file, framework="pt") as tensors:
        assert tensors.get_slice("score.weight").get_shape()[0] == 1


@needs((1, "moe"), (2, "moe_dp2"))
def test_a_critic_is_the_same_on_one_rank_and_two(rollout_results):
    one_rank = rollout_results("moe")["critic"]
    two_ranks = rollout_results("moe_dp2")["critic"]
    assert two_ranks["losses"] == pytest.approx(one_rank["losses"], rel=1e-3)
    assert two_ranks["last"] == pytest.approx(one_rank["last"], abs=1e-3)


def test_a_checkpoint_restores_actor_and_critic(critic, name):
    assert critic["progress"] == {"step": 2, "kl_coef": 0.25}
    assert critic["restored"] == [True] * LAUNCHES[name].ranks
    assert critic["continued again"] == critic["continued"]
    assert len(critic["continued"]) == 4
