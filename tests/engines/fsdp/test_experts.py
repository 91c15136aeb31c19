"""Mixtures of experts."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from config import InputError
from engines.model import experts
from tests.engines.fsdp.cases import (
    AUX,
    BF16,
    build,
    make_config,
    token_cap,
    train,
    worker_case,
)
from tests.engines.fsdp.test_training import BALANCED, CASES, result_of
from tests.support.cases import case_params, needs
from tests.support.models import FAMILIES, GROUPED_EXPERTS, write_model
from tests.support.plain import NORM_BOUND, plain_loss, plain_model, worst
from tests.support.ranks import group_beside_rank0, on_ranks
from tests.support.training import LONGEST, make_batch, make_loss


@worker_case(1)
def grouped(folder: Path, device: torch.device) -> dict:
    """Compare products of all experts at once with a loop over experts, in bf16.

    Returns which of the two an engine uses by default; the relative differences of a layer's output
    and of each expert's gradient; and for experts without a token, their number and the sum of
    their gradients.
    """
    engine = build(folder / "qwen3_moe", device, f"{BF16} torch_compile=never")
    default = engine.hf.config._experts_implementation
    layer = next(module for name, module in engine.hf.named_modules() if name.endswith(".experts"))
    generator = torch.Generator().manual_seed(0)
    outputs = {}
    gradients = {}
    hidden = torch.randn(40, engine.hf_config.hidden_size, generator=generator).to(
        device, torch.bfloat16
    )
    chosen = torch.tensor([[0, 1, 3], [1, 3, 5], [3, 5, 0], [1, 5, 0]], device=device).repeat(10, 1)
    weights = torch.rand(chosen.shape, generator=generator).to(device, torch.bfloat16)
    for kind in ("grouped_mm", "eager"):
        engine.hf.config._experts_implementation = kind
        outputs[kind] = layer(hidden, chosen, weights)
        outputs[kind].float().square().sum().backward()
        gradients[kind] = [expert.float() for p in layer.parameters() for expert in p.grad]
        engine.model.zero_grad()
    pairs = list(zip(*gradients.values()))
    without_token = [at_once for at_once, looped in pairs if not looped.any()]
    return {
        "default": default,
        "number": len(without_token),
        "left alone": sum(x.abs().sum().item() for x in without_token),
        "output": relative_distance(*outputs.values()),
        "gradient": max(relative_distance(*pair) for pair in pairs if pair[1].any()),
    }


def relative_distance(measured: torch.Tensor, expected: torch.Tensor) -> float:
    return ((measured - expected).float().norm() / expected.float().norm()).item()


@pytest.mark.parametrize("size, coefficient", [(1, "null"), (2, "null"), (1, "0.5"), (2, "0.5")])
@pytest.mark.parametrize(
    "family, has_experts, has_loss",
    [
        ("qwen3_moe", True, True),
        ("moe without a coefficient", True, False),
        ("llama", False, False),
        ("nowhere", True, True),  # the check of its path reports it
    ],
)
def test_another_model_has_only_the_settings_for_experts_that_it_can_use(
    folder, tmp_path, family, has_experts, has_loss, size, coefficient
):
    path = folder / family
    if family == "moe without a coefficient":
        path = write_model(tmp_path / "model", **GROUPED_EXPERTS)
        assert not hasattr(AutoConfig.from_pretrained(path), "router_aux_loss_coef")
    pairs = ["model_engine=megatron", f"engine.expert_model_parallel_size={size}"]
    pairs += [f"model.path={path}", f"engine.router_aux_loss_coef={coefficient}"]
    config = make_config(folder, *pairs)
    own = experts.with_own_experts(config)
    expected = dict(config.engine)
    if not has_experts:
        expected["expert_model_parallel_size"] = 1
    if not has_loss:
        expected["router_aux_loss_coef"] = None
    assert own.engine == expected
    assert own.model == config.model


@pytest.mark.slow
@needs((1, "grouped"))
def test_products_of_all_experts_at_once_are_those_of_a_loop(results):
    check_grouped(results(1)["grouped"])


def check_grouped(result):
    assert result["default"] == "grouped_mm"
    assert 0 < result["output"] < 0.01
    assert result["gradient"] < 0.02
    assert result["left alone"] == 0, "an expert without a token has a gradient"
    assert result["number"] == 2 * (8 - 4)


@pytest.mark.slow
@pytest.mark.parametrize("world, name", case_params(BALANCED))
def test_the_auxiliary_loss_of_routers(results, folder, world, name):
    """It is transformers' loss of each layer in each micro-batch, divided by the experts per token.

    Micro-batches are weighted by their tokens. The Megatron engine computes the same.
    """
    result = result_of(results, world, name)
    batch = make_batch(0)
    model = plain_model(folder / CASES[world, name].family)
    aux = 0.0
    total = 0.0
    micro_batches = result["micro-batches of the first step"]
    for part in micro_batches:
        loss, routers = plain_loss(model, batch, part)
        terms = [
            load_balancing_loss_func((layer,), 8, 3) / 3 * len(layer) / len(batch.input_ids)
            for layer in map(torch.cat, zip(*routers))
        ]
        (loss + 0.3 * sum(terms)).backward()
        total = total + loss.item()
        aux = aux + sum(terms).item() / len(terms)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert sorted(i for part in micro_batches for i in part) == list(range(len(batch)))
    assert len(micro_batches) > 2
    (step,) = result["steps"]
    for key, want in (("loss", total), ("router_aux_loss", aux), ("grad_norm", norm)):
        assert worst([step[key]], [want]) < NORM_BOUND, key
    assert aux > 1.01


def test_the_auxiliary_loss_of_a_step_does_not_include_earlier_steps(folder):
    """With a learning rate of 0, the same batch has the same loss in every step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = build(
            folder / "qwen3_moe",
            torch.device("cpu"),
            f"{AUX} torch_compile=never",
            more=["optim.lr=0"],
        )
        first = train(engine, [0])[0]["router_aux_loss"]
        second = train(engine, [0])[0]["router_aux_loss"]
    finally:
        dist.destroy_process_group()
    assert first > 1
    assert second == first


def test_a_coefficient_of_config_json_weighs_each_layer_as_in_transformers():
    """transformers pools the layers' tokens: it would not notice layers that even out."""
    generator = torch.Generator().manual_seed(0)
    prefers_early = torch.randn(50, 8, generator=generator) - torch.arange(8)
    prefers_late = prefers_early.flip(1)
    layers = (prefers_early, prefers_late, prefers_early, prefers_late)
    shape = AutoConfig.for_model(**FAMILIES["qwen3_moe"], output_router_logits=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ours = experts.aux_loss(
            [*layers], torch.zeros(50, dtype=torch.bool), 3, 50, dist.group.WORLD
        )
    finally:
        dist.destroy_process_group()
    coefficient = shape.router_aux_loss_coef
    weighted = experts.aux_loss_weight(None, shape, 4) * ours.item()
    by_layer = [load_balancing_loss_func((logits,), 8, 3).item() for logits in layers]
    assert weighted == pytest.approx(coefficient * sum(by_layer) / 4)
    assert weighted > 1.3 * coefficient * load_balancing_loss_func(layers, 8, 3).item()
    assert experts.aux_loss_weight(0.1, shape, 4) == 0.1, "as it is given"


NUM_TOKENS_OF_RANKS = (5, 4, 3)


def logits_of_rank(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the logits of two routers, and which of the rank's tokens are padding: the last."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = NUM_TOKENS_OF_RANKS[rank]
    logits = [torch.randn(num_tokens, 8, generator=generator) for _ in range(2)]
    return logits, torch.arange(num_tokens) == num_tokens - 1


def aux_loss_beside_rank0() -> float:
    logits, padding = logits_of_rank(dist.get_rank())
    return experts.aux_loss(logits, padding, 3, 20, group_beside_rank0()).item()


def test_only_ranks_that_share_a_micro_batch_balance_it_together(tmp_path):
    """Ranks 1 and 2 share theirs. Each token of the batch counts as one of 20."""
    found = on_ranks(3, tmp_path, aux_loss_beside_rank0)
    assert found[0] == pytest.approx(aux_loss_of_micro_batch([0]))
    assert found[1] + found[2] == pytest.approx(aux_loss_of_micro_batch([1, 2]))


def aux_loss_of_micro_batch(ranks: list[int]) -> float:
    """Return the sum of both layers' losses, as transformers computes them, for 20 tokens."""
    tokens_of_layers = [[], []]
    for rank in ranks:
        logits, padding = logits_of_rank(rank)
        for tokens, of_layer in zip(tokens_of_layers, logits):
            tokens.append(of_layer[~padding])
    total = 0.0
    for tokens in tokens_of_layers:
        of_layer = torch.cat(tokens)
        # transformers counts each of the three choices.
        mean = load_balancing_loss_func((of_layer,), 8, 3).item() / 3
        total += mean * len(of_layer) / 20
    return total


def aux_loss_of_a_long_sequence(model: Path, max_tokens: int, cp_size: str) -> float:
    """Return the routers' loss of a batch of one sequence."""
    cpu = torch.device("cpu")
    engine = build(model, cpu, f"{AUX} context_parallel_size={cp_size}", token_cap(max_tokens))
    batch = make_batch(0).select([1])
    plan = engine.plan(batch.lengths)
    assert plan.sequences == [0]
    loss_fn = make_loss(len(batch.input_ids))
    return engine.train_batch(batch, loss_fn, 0, plan.micro_batches)["router_aux_loss"]


def test_tokens_that_ranks_share_count_once_in_the_routers_loss(folder, tmp_path):
    model = folder / "qwen3_moe"
    (tmp_path / "alone").mkdir()
    (tmp_path / "shared").mkdir()
    (alone,) = on_ranks(1, tmp_path / "alone", aux_loss_of_a_long_sequence, model, LONGEST, "1")
    half = LONGEST // 2 + 2
    shared = on_ranks(2, tmp_path / "shared", aux_loss_of_a_long_sequence, model, half, "auto")
    assert alone > 0.1
    assert shared == pytest.approx([alone] * 2, rel=1e-5)


@pytest.mark.parametrize(
    "given, of_model, is_used, expected",
    [
        (None, 0.2, True, 0.2),
        (None, 0.2, False, 0.0),  # transformers does not add the loss, either
        (0.1, 0.2, False, 0.1),
        (0.0, 0.2, True, 0.0),
    ],
)
def test_the_coefficient_of_a_run_is_used_and_otherwise_that_of_transformers(
    given, of_model, is_used, expected
):
    shape = Qwen3MoeConfig(router_aux_loss_coef=of_model, output_router_logits=is_used)
    assert experts.aux_loss_coef(given, shape) == expected
    assert experts.aux_loss_coef(None, LlamaConfig()) == 0.0
    with pytest.raises(InputError, match="model_type=llama has none"):
        experts.aux_loss_coef(0.1, LlamaConfig())


def test_layers_may_have_different_numbers_of_experts_per_token():
    """Then there is no single number. Some families have another name for it."""
    shape = LlamaConfig()
    assert experts.experts_per_token(shape) == 0
    shape.num_experts_per_tok = [1, 2]
    assert experts.experts_per_token(shape) == 0
    shape.moe_topk = 3
    assert experts.experts_per_token(shape) == 3
