"""Routing replay in one process: which experts a model's layers use, and what is counted."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from config import InputError, load
from data.batching.batch import Batch, make_cu_seqlens
from engines.fsdp.engine import FSDPEngine
from engines.model.replay import ReplayedChoice, RoutingReplay, sends_to
from engines.model.routes import FIELD, Mismatch, no_route, replayed, route_dtype
from tests.engines.test_weights import loaded
from tests.support.models import make_model

pytestmark = pytest.mark.usefixtures("process_group")

CPU = torch.device("cpu")
NO_ROUTE = no_route(torch.uint8)
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3_moe", "qwen3_moe")


def experts_used(hf: nn.Module, replay: RoutingReplay) -> list[Tensor]:
    """Run the model, and return the experts [t, k] to which each layer sends tokens."""
    used = []

    def record(module, args: tuple) -> None:
        used.append(next(x for x in args if not x.is_floating_point()).clone())

    handles = [block.experts.register_forward_pre_hook(record) for block in replay.blocks]
    with torch.no_grad():
        hf(input_ids=torch.arange(NUM_TOKENS)[None])
    for handle in handles:
        handle.remove()
    return used


def test_layers_use_the_given_experts_and_choose_for_tokens_without_a_route(model):
    hf = loaded(model).eval()
    replay = RoutingReplay(hf, hf.config, CPU)
    num_layers = hf.config.num_hidden_layers
    assert len(replay.blocks) == num_layers
    with replay.replaying(None):
        free = experts_used(hf, replay)
    assert replay.mismatch.metrics() == {}

    k = hf.config.num_experts_per_tok
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(1, NUM_TOKENS, num_layers, hf.config.num_experts, generator=generator)
    routes = scores.argsort(-1)[..., :k].to(torch.uint8)
    routes[0, -1] = NO_ROUTE
    with replay.replaying(routes):
        used = experts_used(hf, replay)
    for layer, chosen in enumerate(used):
        assert torch.equal(chosen[:-1], routes[0, :-1, layer].long())
        assert (chosen[-1] < hf.config.num_experts).all()
    assert not torch.equal(used[0][:-1], free[0][:-1])

    # The layers are recomputed with the same experts, which do not count again.
    counts = replay.mismatch.counts.tolist()
    assert 0 < counts[0] <= counts[1] == (NUM_TOKENS - 1) * num_layers
    for again, chosen in zip(experts_used(hf, replay), used):
        assert torch.equal(again, chosen)
    assert replay.mismatch.counts.tolist() == counts
    replay.mismatch.reset()
    assert replay.mismatch.metrics() == {}


def test_only_a_choice_among_all_experts_is_replaced():
    """Routers may choose groups of experts before, also with topk."""
    scores = torch.tensor([[0.1, 0.5, 0.2, 0.4], [0.3, 0.1, 0.2, 0.9]])
    routes = torch.tensor([[3, 0], [NO_ROUTE, NO_ROUTE]], dtype=torch.uint8)
    choice = ReplayedChoice(routes, num_experts=4, mismatch=None)
    with choice:
        groups = torch.topk(scores[:, :2], 2).indices
        one = scores.topk(1).indices
        values, chosen = torch.topk(input=scores, k=2)
    assert groups.tolist() == [[1, 0], [0, 1]]
    assert one.tolist() == [[1], [3]]
    assert chosen.tolist() == [[3, 0], [3, 0]]
    torch.testing.assert_close(values, torch.tensor([[0.4, 0.1], [0.9, 0.3]]))
    choice.check(nn.Identity())


@pytest.mark.parametrize("number", [0, 2])
def test_a_layer_chooses_its_experts_once(number):
    scores = torch.rand(2, 4)
    choice = ReplayedChoice(torch.zeros(2, 2, dtype=torch.uint8), 4, None)
    with choice:
        for _ in range(number):
            scores.topk(2)
    with pytest.raises(InputError, match=f"Identity, which chooses experts with {number} calls"):
        choice.check(nn.Identity())


def test_routes_are_compared_as_sets():
    own = torch.tensor([[0, 1], [2, 3], [4, 5]])
    routes = torch.tensor([[1, 0], [2, 4], [NO_ROUTE, NO_ROUTE]], dtype=torch.uint8)
    mismatch = Mismatch(CPU)
    mismatch.add(own, routes)
    assert mismatch.counts.tolist() == [1, 2]
    assert replayed(own, routes).tolist() == [[1, 0], [2, 4], [4, 5]]
    assert sends_to(torch.tensor([[0, 1], [4, 2], [9, 9]]), routes)
    assert not sends_to(torch.tensor([[0, 1], [3, 2], [9, 9]]), routes)
    assert not sends_to(torch.tensor([[0.0, 1.0], [4.0, 2.0], [9.0, 9.0]]), routes)
    assert not sends_to(torch.tensor([0, 1]), routes)


def test_every_expert_and_the_mark_of_a_missing_route_have_different_numbers():
    assert route_dtype(255) == torch.uint8
    assert route_dtype(256) == torch.int16
    for num_experts in (255, 256):
        assert num_experts - 1 < no_route(route_dtype(num_experts))


def make_engine(model: Path, *settings: str) -> FSDPEngine:
    needed = [f"model.path={model}", "data.train_files=unused", "rollout.routing_replay=true"]
    config = load("ppo.yaml", [*needed, "engine.compute_dtype=float32", *settings])
    return FSDPEngine(config, CPU, total_steps=3)


def test_each_step_counts_its_own_mismatches(model):
    engine = make_engine(model, "optim.lr=1e-30")  # so that the routers stay as they are
    num_layers = engine.hf_config.num_hidden_layers
    k = engine.hf_config.num_experts_per_tok
    cu_seqlens = make_cu_seqlens(torch.tensor([NUM_TOKENS]))
    plan = engine.plan([NUM_TOKENS])

    def share_of_mismatches(step: int, first_expert: int) -> float:
        experts = torch.arange(first_expert, first_expert + k, dtype=torch.uint8)
        routes = experts.repeat(NUM_TOKENS, num_layers, 1)
        batch = Batch(torch.arange(NUM_TOKENS), cu_seqlens, {FIELD: routes})
        metrics = engine.train_batch(
            batch, lambda log_probs, *_: (log_probs.sum(), {}), step, plan.micro_batches
        )
        return metrics["routing_mismatch"]

    first = share_of_mismatches(0, first_expert=0)
    other = share_of_mismatches(1, first_expert=1)
    again = share_of_mismatches(2, first_expert=0)
    assert other != first
    assert again == first


def test_the_check_at_the_start_leaves_nothing_on_the_experts(model):
    engine = make_engine(model)
    blocks = [module for module in engine.hf.modules() if hasattr(module, "experts")]
    assert len(blocks) == engine.hf_config.num_hidden_layers
    assert not any(block.experts._forward_pre_hooks for block in blocks)
