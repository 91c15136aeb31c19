"""Routing replay: both engines compute with given experts, as a written-out model in fp64 does.

The cases run in megatron_worker.py. Each makes one step with a large epsilon and learning rate of
AdamW, from which the gradients can be told exactly: see gradients().
"""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from config import load
from data.batching.batch import Batch
from engines.base import Engine
from engines.fsdp.engine import FSDPEngine
from engines.megatron.engine import MegatronEngine
from engines.model.hf import read_hf_config
from engines.model.routes import FIELD, no_route, route_dtype
from tests.engines.megatron_worker import (
    AUTO,
    CASES,
    CP2,
    EP2,
    FULL,
    PADDED,
    PP2,
    TP2,
    VPP2,
    keys,
    new_layout,
    save_tensors,
)
from tests.support.cases import case_params
from tests.support.guarded import unguarded
from tests.support.plain import plain_model, weights_in_files
from tests.support.training import SETTINGS, gather, make_batch, share_of

pytestmark = pytest.mark.slow

RECOMPUTE = "activation_checkpointing=true"
NO_AUX = "router_aux_loss_coef=0"
# (number of ranks, name): (engine, family, settings)
REPLAYS = {
    (1, "fsdp"): (FSDPEngine, "qwen3_moe", ""),
    (1, "fsdp recompute"): (FSDPEngine, "qwen3_moe", RECOMPUTE),
    (1, "fsdp padded"): (FSDPEngine, "mixtral", PADDED),
    (1, "fsdp raw"): (FSDPEngine, "qwen3_moe_raw", f"{RECOMPUTE} {NO_AUX}"),
    # Sigmoid scores with a bias, groups of experts, a shared expert, a first layer without experts.
    (1, "fsdp grouped"): (FSDPEngine, "glm4_moe", RECOMPUTE),
    (2, "fsdp two"): (FSDPEngine, "qwen3_moe", RECOMPUTE),
    (2, "fsdp cp2"): (FSDPEngine, "qwen3_moe", f"{CP2} {RECOMPUTE}"),
    (2, "fsdp auto"): (FSDPEngine, "qwen3_moe", f"{AUTO} data.max_tokens_per_micro_batch=24"),
    (1, "megatron"): (MegatronEngine, "qwen3_moe", ""),
    (1, "megatron full"): (MegatronEngine, "qwen3_moe", FULL),
    (1, "megatron padded"): (MegatronEngine, "mixtral", PADDED),
    (1, "megatron raw"): (MegatronEngine, "qwen3_moe_raw", f"{FULL} {NO_AUX}"),
    (2, "megatron tp2"): (MegatronEngine, "qwen3_moe", f"{TP2} {FULL}"),
    (2, "megatron pp2"): (MegatronEngine, "qwen3_moe", f"{PP2} {FULL}"),
    (2, "megatron vpp2"): (MegatronEngine, "qwen3_moe", f"{PP2} {VPP2} {FULL}"),
    (2, "megatron cp2"): (MegatronEngine, "qwen3_moe", f"{CP2} {FULL}"),
    (2, "megatron ep2"): (MegatronEngine, "qwen3_moe", f"{EP2} {FULL}"),
    (4, "megatron tp2 pp2"): (MegatronEngine, "qwen3_moe", f"{TP2} {PP2} {EP2} {FULL}"),
    (4, "megatron tp2 cp2"): (MegatronEngine, "qwen3_moe", f"{TP2} {CP2} {EP2} {FULL}"),
}
# Measured: at most 9.2e-7 nats, and 1.1e-6 of the largest gradient. With experts of the next layer:
# 0.27 nats. With those of the next token in the recomputation: 0.38 of the largest gradient.
LOG_PROB_BOUND = 1e-5
GRADIENT_BOUND = 1e-5


# -- the worker ------------------------------------------------------------------------------------


def routed_batch(model: Path) -> Batch:
    """Return the first batch with random experts; 1 in 10 tokens has none, nor has a last one."""
    hf_config = read_hf_config(model)
    num_experts = getattr(hf_config, "num_experts", None) or hf_config.num_local_experts
    batch = make_batch(0)
    generator = torch.Generator().manual_seed(3)
    num_layers = hf_config.num_hidden_layers - getattr(hf_config, "first_k_dense_replace", 0)
    shape = (len(batch.input_ids), num_layers, num_experts)
    order = torch.rand(shape, generator=generator).argsort(-1)
    routes = order[..., : hf_config.num_experts_per_tok].to(route_dtype(num_experts))
    is_missing = torch.rand(len(routes), generator=generator) < 0.1
    is_missing[batch.cu_seqlens[1:] - 1] = True
    routes[is_missing] = no_route(routes.dtype)
    batch.fields[FIELD] = routes
    return batch


def run_replay(
    folder: Path, this_device: torch.device, title: str, case: tuple[type[Engine], str, str]
) -> dict[str, float]:
    """Compute log-probabilities, make one step, and write down both, and the share of mismatches.

    Writes {title}.safetensors with log_probs [ranks, T] (NaN where a rank has none), and the
    differences of all weights.
    """
    kind, family, settings = case
    new_layout()
    config = load(
        "ppo.yaml",
        [
            f"model_engine={'fsdp' if kind is FSDPEngine else 'megatron'}",
            f"model.path={folder / family}",
            "data.max_tokens_per_micro_batch=96",
            "data.max_prompt_length=8",
            "rollout.max_tokens=8",
            "rollout.routing_replay=true",
            *SETTINGS,
            "optim.lr_scheduler_type=constant",
            "optim.lr_warmup_steps_ratio=0",
            "optim.min_lr_ratio=0",
            "optim.lr=1",
            "optim.eps=1",
            "optim.weight_decay=0",
            "optim.clip_grad=0",
            *keys(settings),
        ],
    )
    engine = kind(config, this_device, 1)
    batch = routed_batch(folder / family)
    sequences, planned = share_of(engine, batch.lengths)
    share = batch.select(sequences)
    own_tokens = Batch(torch.arange(len(batch.input_ids)), batch.cu_seqlens).select(sequences)
    log_probs = torch.full((len(batch.input_ids),), torch.nan)
    log_probs[own_tokens.input_ids] = engine.log_probs(share, planned)[0].cpu()
    before = {name: weight.clone() for name, weight in engine.export_weights()}
    metrics = engine.train_batch(share, make_loss(len(batch.input_ids)), 0, planned)
    differences = {name: before[name] - weight for name, weight in engine.export_weights()}
    log_probs = torch.stack(gather(log_probs))
    save_tensors({"log_probs": log_probs, **differences}, folder / f"{title}.safetensors")
    return {"mismatch": metrics["routing_mismatch"], "loss": metrics["loss"]}


def make_loss(num_tokens: int):
    """Return the mean of the weighted negative log-likelihoods, as a loss function."""
    return lambda log_probs, _, fields: (-(log_probs * fields["weight"]).sum() / num_tokens, {})


for (num_ranks, name), case in REPLAYS.items():
    run = unguarded()(partial(run_replay, title=f"{num_ranks} {name}", case=case))
    CASES.add(num_ranks, name, run)


# -- the reference ---------------------------------------------------------------------------------


class WrittenOutExperts(nn.Module):
    """A mixture of experts, written out for each token and expert.

    routes: [s, k], the experts of the current sequence's tokens
    """

    def __init__(self, block: nn.Module, hf_config):
        super().__init__()
        self.gate = block.gate
        self.experts = block.experts
        self.shared_experts = getattr(block, "shared_experts", None)
        self.is_normalized = getattr(hf_config, "norm_topk_prob", True)
        self.has_sigmoid = hasattr(self.gate, "e_score_correction_bias")
        self.factor = hf_config.routed_scaling_factor if self.has_sigmoid else 1.0
        self.num_mismatches = 0

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden[0]
        return torch.stack([self.compute(x, route) for x, route in zip(tokens, self.routes)])[None]

    def compute(self, x: Tensor, route: Tensor) -> Tensor:
        """Return the output for one token [h] with the experts of its route [k]."""
        logits = self.gate.weight @ x
        scores = logits.sigmoid() if self.has_sigmoid else logits.softmax(0)
        own = self.gate(x[None])[2][0].tolist()
        chosen = own
        if route[0] != no_route(route.dtype):
            chosen = route.tolist()
            self.num_mismatches += set(chosen) != set(own)
        total = sum(scores[expert] for expert in chosen) if self.is_normalized else 1.0
        output = torch.zeros_like(x)
        if self.shared_experts is not None:
            output = self.shared_experts(x)
        for expert in chosen:
            gate, up = (self.experts.gate_up_proj[expert] @ x).chunk(2)
            value = self.experts.down_proj[expert] @ (F.silu(gate) * up)
            output = output + self.factor * scores[expert] / total * value
        return output


@cache
def reference(model_path: Path) -> tuple[Tensor, dict[str, Tensor], float, float]:
    """Compute in fp64 (but norms in fp32, as transformers does), one sequence at a time.

    Returns:
        The log-probabilities [T], the gradients by name, the share of the choices that would have
        been others, and the loss.
    """
    model = plain_model(model_path).double()
    blocks = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp = WrittenOutExperts(layer.mlp, model.config)
            blocks.append(layer.mlp)
    batch = routed_batch(model_path)
    num_tokens = len(batch.input_ids)
    log_probs = torch.zeros(num_tokens, dtype=torch.float64)
    for start, length in zip(batch.cu_seqlens.tolist(), batch.lengths):
        tokens = slice(start, start + length)
        for number, block in enumerate(blocks):
            block.routes = batch.fields[FIELD][tokens, number]
        ids = batch.input_ids[tokens]
        logits = model(ids[None], use_cache=False, output_router_logits=False).logits[0, :-1]
        values = -F.cross_entropy(logits, ids[1:], reduction="none")
        mask = batch.fields["loss_mask"][tokens][1:]
        log_probs[tokens][1:] += values * mask
    loss = -(log_probs * batch.fields["weight"]).sum() / num_tokens
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    gradients = weights_in_files(model, lora=False)
    gradients = {name: g for name, g in gradients.items() if "correction_bias" not in name}
    num_routed = int((batch.fields[FIELD][:, 0, 0] != no_route(torch.uint8)).sum())
    num_mismatches = sum(block.num_mismatches for block in blocks)
    mismatch = num_mismatches / (num_routed * len(blocks))
    return log_probs.detach(), gradients, mismatch, loss.item()


def gradients(differences: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of AdamW's first step: with lr = eps = 1, it moves by g / (|g| + 1)."""
    return {name: d.double() / (1 - d.double().abs()) for name, d in differences.items()}


# -- the tests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world, name", case_params(REPLAYS))
def test_engines_replay_routes(megatron_results, megatron_folder, world, name):
    family = REPLAYS[world, name][1]
    expected, expected_gradients, mismatch, loss = reference(megatron_folder / family)
    result = megatron_results[world][name]
    stored = load_file(megatron_folder / f"{world} {name}.safetensors")
    log_probs = stored.pop("log_probs")
    assert (~log_probs.isnan()).any(0).all()  # every token is on some rank
    for of_rank in log_probs:
        is_own = ~of_rank.isnan()
        assert (of_rank - expected)[is_own].abs().max() < LOG_PROB_BOUND
    found = gradients({name: d for name, d in stored.items() if "correction_bias" not in name})
    assert found.keys() == expected_gradients.keys()
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for key, gradient in expected_gradients.items():
        assert (found[key] - gradient).abs().max() < GRADIENT_BOUND * largest, key
    assert result["mismatch"] == pytest.approx(mismatch, abs=1e-6)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
