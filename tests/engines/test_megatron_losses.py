"""Losses of Megatron's engine: of routers, of layers that predict further ahead, and their sums."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from config import load
from data.batching.batch import Batch, make_cu_seqlens
from engines.build import create_groups
from engines.megatron.distributed_optimizer import smallest_stage_gradient
from engines.megatron.moe import Router, add_routes, mean_aux_loss, split_routes
from engines.megatron.step_loss import MTPLoss, StepLoss, count_mtp_targets
from engines.megatron.without_cuda import cuda_is_cpu
from engines.model.routes import Mismatch, no_route
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")
NUM_EXPERTS = 4
NUM_TOKENS = 5


# -- routers ---------------------------------------------------------------------------------------


def make_tokens() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [t, h], the router's weight, and padding [t]."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(NUM_TOKENS, 6, generator=generator)
    weight = torch.randn(NUM_EXPERTS, 6, generator=generator)
    return tokens, weight, torch.tensor([False, False, True, False, False])


def route(pre_softmax: bool) -> dict[str, list]:
    """Return what a router chooses, and its auxiliary loss, freely and with given experts."""
    create_groups(load("sft.yaml", ["model_engine=megatron", "model.path=m", "data.train_files=t"]))
    tokens, weight, padding = make_tokens()
    shape = dict(num_layers=3, num_attention_heads=1, hidden_size=6, num_moe_experts=NUM_EXPERTS)
    config = TransformerConfig(moe_router_topk=2, moe_router_pre_softmax=pre_softmax, **shape)
    with cuda_is_cpu():
        router = Router(config)
    router.weight.data = weight
    router.layer = 1
    router.mismatch = Mismatch(CPU)
    router.begin_batch(0.5, 10)
    weights, chosen = router(tokens, padding)
    results = {"weights": weights.tolist(), "chosen": chosen.tolist(), "aux": router.aux_loss}
    weights.sum().backward()
    results["gradient"] = router.weight.grad.clone()
    routes = torch.zeros(NUM_TOKENS, 3, 2, dtype=torch.uint8)
    routes[:, 1] = torch.tensor([3, 1])
    routes[4] = no_route(torch.uint8)
    router.begin_batch(0.5, 10)
    router(tokens, padding, routes)
    results["aux with given"] = router.aux_loss
    router.mismatch.reset()
    router.begin_batch(0.5, 10)
    with torch.no_grad():
        weights, given = router(tokens, padding, routes)
    results |= {"given": given.tolist(), "weights of given": weights.tolist()}
    return results | {"without gradient": router.aux_loss, "counts": router.mismatch.counts}


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_a_router_weighs_its_experts_and_rewards_balance(tmp_path, pre_softmax):
    (found,) = on_ranks(1, tmp_path, route, pre_softmax)
    tokens, weight, padding = make_tokens()
    weight.requires_grad_()
    probs = (tokens @ weight.T).softmax(-1)
    top, chosen = probs.topk(2)
    share = torch.zeros(NUM_EXPERTS)
    for experts in chosen[~padding]:
        share[experts] += 1 / (2 * 4)  # two choices of each of four tokens
    aux_loss = NUM_EXPERTS * (share * probs[~padding].sum(0)).sum() / 10
    weights = top if pre_softmax else top / top.sum(-1, keepdim=True)
    (weights.sum() + 0.5 * aux_loss).backward()
    assert found["chosen"] == chosen.tolist()
    torch.testing.assert_close(torch.tensor(found["weights"]), weights.detach())
    torch.testing.assert_close(found["aux"], aux_loss.detach())
    # It has to balance its own choices.
    torch.testing.assert_close(found["aux with given"], aux_loss.detach())
    torch.testing.assert_close(found["gradient"], weight.grad)

    given = torch.tensor([[3, 1]] * 4 + [chosen[4].tolist()])
    assert found["given"] == given.tolist()
    of_given = probs.detach().gather(1, given)
    if not pre_softmax:
        of_given = of_given / of_given.sum(-1, keepdim=True)
    torch.testing.assert_close(torch.tensor(found["weights of given"]), of_given)
    assert found["without gradient"] == 0
    differs = [{*experts} != {3, 1} for experts in chosen[:4].tolist()]
    assert found["counts"].tolist() == [sum(differs), 4]


def mean_on_stages() -> float:
    """Return the mean of routers on two stages: one with losses 1 and 2, one with a loss 6."""
    losses = [[1.0, 2.0], [6.0]][dist.get_rank()]
    routers = [SimpleNamespace(aux_loss=torch.tensor(loss)) for loss in losses]
    return mean_aux_loss(routers, num_layers=3)


def test_the_routers_loss_is_the_mean_over_the_layers_of_all_stages(tmp_path):
    assert on_ranks(2, tmp_path, mean_on_stages) == [3.0, 3.0]


def test_routes_travel_with_the_padding():
    padding = torch.tensor([[False, True, False]])
    routes = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
    mask = add_routes(padding, routes)
    assert mask.shape == (1, 3, 3, 2)
    again, of_tokens = split_routes(mask[0])
    assert torch.equal(again, padding[0])
    assert torch.equal(of_tokens, routes[0])
    assert add_routes(padding, None) is padding
    assert split_routes(padding[0])[1] is None


# -- the loss of a step ----------------------------------------------------------------------------


def make_batch() -> Batch:
    """Return sequences of four, one and three tokens; the third token has no loss."""
    loss_mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 1])
    return Batch(
        torch.arange(8), make_cu_seqlens(torch.tensor([4, 1, 3])), {"loss_mask": loss_mask}
    )


def test_layers_further_ahead_predict_fewer_tokens():
    # Tokens at positions 2 and 3 of the first sequence, and 2 of the last one, are far enough.
    assert count_mtp_targets(make_batch(), 3).tolist() == [2, 1, 0]
    without_mask = Batch(torch.arange(8), make_cu_seqlens(torch.tensor([4, 1, 3])))
    assert count_mtp_targets(without_mask, 2).tolist() == [3, 1]


class StubOutputs:
    """The outputs of a token are its hidden numbers; an MTP layer's loss is their sum."""

    head = SimpleNamespace(num_outputs=3, num_differentiable=2)

    def compute(self, micro_batch, hidden: Tensor) -> tuple[Tensor, ...]:
        return (hidden[:, 0, 0], hidden[:, 0, 1], hidden[:, 0, 0])

    def mtp_loss(self, ahead, hidden: Tensor) -> Tensor:
        return ahead * hidden.sum()


def loss_fn(log_probs: Tensor, entropy: Tensor, fields: dict) -> tuple[Tensor, dict]:
    return log_probs.sum() * fields["factor"], {"entropy": entropy.sum()}


@pytest.mark.parametrize("reports", [True, False])
def test_every_micro_batch_adds_to_the_loss_of_a_step(reports):
    mtp = MTPLoss.begin(make_batch(), 2, 0.3, lambda counts: 10 * counts)
    assert mtp.num_targets.tolist() == [20, 10]
    step_loss = StepLoss(loss_fn, StubOutputs(), lambda group: reports, CPU, mtp)
    hidden = torch.arange(12.0).view(6, 1, 2)  # two tokens, three times
    micro_batch = SimpleNamespace(fields={"factor": 2.0}, ahead=[1.0, 2.0], group=None)
    of_layers = [(4 + 5 + 6 + 7) / 20, 2 * (8 + 9 + 10 + 11) / 10]
    expected = (0 + 2) * 2.0 + 0.3 / 2 * sum(of_layers)
    for number in (1, 2):
        loss, num_tokens, metrics = step_loss(micro_batch, hidden)
        assert loss.item() == pytest.approx(expected)
        assert num_tokens == 0
        assert metrics == {}
        assert mtp.sums.tolist() == pytest.approx([number * x for x in of_layers])
    amounts = {name: amount.item() for name, amount in step_loss.amounts.items()}
    assert amounts == ({"loss": 8.0, "entropy": 8.0} if reports else {"loss": 0.0, "entropy": 0.0})


def test_without_layers_ahead_there_is_no_loss_of_them():
    assert MTPLoss.begin(make_batch(), 0, 0.3, lambda counts: counts) is None
    assert MTPLoss.begin(make_batch(), 3, 0.3, lambda counts: counts).num_targets[2] == 1


def metrics_of_rank() -> dict[str, float]:
    """Return the metrics of a step in which the ranks have 1, 2, 4 and 8 as their sums."""
    needed = ["model_engine=megatron", "model.path=m", "data.train_files=t"]
    layout = ["engine.pipeline_model_parallel_size=2", "engine.context_parallel_size=2"]
    create_groups(load("sft.yaml", [*needed, *layout]))
    sums = torch.tensor([2.0 ** dist.get_rank()])
    mtp = MTPLoss(torch.ones(1), 1.0, sums)
    step_loss = StepLoss(loss_fn, StubOutputs(), lambda group: True, CPU, mtp)
    step_loss.amounts["loss"] += sums.squeeze()
    return step_loss.reduce_metrics(
        lambda totals: 10 * totals, mpu.get_pipeline_model_parallel_group()
    )


def test_the_last_stage_knows_the_losses_and_tells_the_other_stages(tmp_path):
    """Ranks 2 and 3 are the last stage, and share all sequences."""
    found = on_ranks(4, tmp_path, metrics_of_rank)
    mtp_loss = {"mtp/loss_1": 4.0 + 8.0}
    assert found == 2 * [{"loss": 40.0, **mtp_loss}, {"loss": 80.0, **mtp_loss}]


# -- gradients of stages ---------------------------------------------------------------------------


def smallest_of(stages_of_ranks: list[list[list[list[float]]]]) -> float:
    """Return the result for stages with these gradients in their buffers."""
    stages = []
    for buffers in stages_of_ranks[dist.get_rank()]:
        tensors = [SimpleNamespace(grad_data=torch.tensor(values)) for values in buffers]
        stages.append(SimpleNamespace(buffers=tensors))
    return smallest_stage_gradient(stages, dist.group.WORLD, CPU)


@pytest.mark.parametrize(
    "second_stage, expected", [([[0.0, 0.0], [0.0]], 0.0), ([[0.0, 0.0], [0.25]], 0.25)]
)
def test_a_stage_without_a_gradient_is_known_to_all_ranks(tmp_path, second_stage, expected):
    """Each of two ranks has two virtual stages, and a stage may have several buffers."""
    stages_of_ranks = [[[[1.0, 0.0]], second_stage], [[[-2.0, 0.0]], [[0.0], [-0.5]]]]
    assert on_ranks(2, tmp_path, smallest_of, stages_of_ranks) == [expected, expected]
