"""A few steps of both engines give the same numbers, in layouts that start no torchrun.

test_megatron.py compares many more layouts with a plain loop; this is the quick check of them.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from config import load
from engines.build import create_groups
from engines.fsdp.engine import FSDPEngine
from engines.megatron.engine import MegatronEngine
from engines.megatron.moe import Experts
from engines.megatron.without_cuda import cuda_is_cpu
from tests.support.cases import id_of, slow_unless_quick
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.training import SETTINGS, make_batch, make_loss

NUM_STEPS = 3
# Imported above, so that forks need not do it.
ENGINES = {"fsdp": FSDPEngine, "megatron": MegatronEngine}
MEGATRON = "model_engine=megatron"
EXPERTS = "engine.router_aux_loss_coef=0.3"
# Layout -> the model, settings of both engines, Megatron's and FSDP's numbers of ranks, and
# settings of Megatron.
LAYOUTS = {
    "one rank": ("qwen3", (), 1, 1, ()),
    "adapters": ("qwen3", ("model.lora.rank=4",), 1, 1, ()),
    "trained biases": ("qwen2", ("model.freeze=['[qkv]_proj.weight']",), 1, 1, ()),
    "tensor parallel": ("qwen3", (), 2, 1, ("engine.tensor_model_parallel_size=2",)),
    "pipeline": ("qwen3", (), 2, 1, ("engine.pipeline_model_parallel_size=2",)),
    "experts": ("moe", (EXPERTS,), 2, 2, ("engine.expert_model_parallel_size=2",)),
}


@dataclass(frozen=True)
class Trained:
    """What the last rank knows: the last stage of a pipeline.

    metrics  of every step
    outputs  name -> an array, after the last step: the weights, the output matrix as a teacher's,
             log-probabilities, entropies and whether tokens are the most likely ones, and the
             FLOPs of two sequences
    modes    whether the model and its parts are in training mode after that evaluation
    """

    metrics: list[dict[str, float]]
    outputs: dict[str, np.ndarray]
    modes: set[bool]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function: trains a model on some ranks, with the same batches; only once."""
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "qwen3", "qwen3", num_hidden_layers=2)
    make_model(folder / "qwen2", "qwen2_tied", num_hidden_layers=2)
    make_model(folder / "moe", "qwen3_moe", num_hidden_layers=2)

    @cache
    def train_once(model: str, num_ranks: int, settings: tuple[str, ...]) -> Trained:
        meeting = tmp_path_factory.mktemp("ranks")
        return on_ranks(num_ranks, meeting, train, folder / model, settings)[-1]

    return train_once


def train(model: Path, settings: tuple[str, ...]) -> Trained:
    # Otherwise Adam would make a whole step of a rounding error in a tiny gradient.
    more = ["data.max_tokens_per_micro_batch=80", "optim.eps=1e-5", *settings]
    config = load("sft.yaml", [f"model.path={model}", *SETTINGS, *more])
    engine = ENGINES[config.model_engine](config, torch.device("cpu"), NUM_STEPS)
    metrics = []
    for step in range(NUM_STEPS):
        batch = make_batch(step)
        plan = engine.plan(batch.lengths)
        share = batch.select(plan.sequences)
        loss_fn = make_loss(len(batch.input_ids))
        metrics.append(engine.train_batch(share, loss_fn, step, plan.micro_batches))
        engine.offload("parameters", "optimizer")  # the next step, or an export, needs them again
        if isinstance(engine, MegatronEngine):
            buffers = [*engine.gradient_buffers()]
            assert buffers
            assert not any(buffer.untyped_storage().nbytes() for buffer in buffers)
    outputs = dict(engine.export_weights())
    outputs["FLOPs"] = torch.tensor(engine.flops([3, 5], 4))
    outputs["output matrix"] = engine.output_matrix()
    outputs["log-probabilities"] = torch.stack([x.float() for x in engine.log_probs(make_batch(1))])
    modes = {module.training for root in engine.modules() for module in root.modules()}
    return Trained(metrics, {name: x.float().numpy() for name, x in outputs.items()}, modes)


def params_of_layouts() -> list:
    # Four ranks in all take too long for quick tests.
    return slow_unless_quick(LAYOUTS, lambda name: name != "experts", id_of)


@pytest.mark.parametrize("name", params_of_layouts())
def test_megatron_trains_as_fsdp_does(trained, name):
    model, shared, num_ranks, num_fsdp_ranks, layout = LAYOUTS[name]
    expected = trained(model, num_fsdp_ranks, shared)
    actual = trained(model, num_ranks, (MEGATRON, *shared, *layout))
    for metrics, expected_metrics in zip(actual.metrics, expected.metrics, strict=True):
        assert metrics == pytest.approx(expected_metrics, rel=1e-4)
    # Otherwise the next step would have no dropout, and keep all activations.
    assert actual.modes == expected.modes == {True}
    assert actual.outputs.keys() == expected.outputs.keys()
    for key, output in expected.outputs.items():
        tolerance = 1e-4 if key == "log-probabilities" else 1e-5
        np.testing.assert_allclose(actual.outputs[key], output, rtol=0, atol=tolerance, err_msg=key)


def layers_with_routers(model: Path) -> list[int]:
    """Return the layers whose routers an engine of two virtual stages watches."""
    stages = ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"]
    layout = [f"engine.{stage}" for stage in stages]
    config = load("sft.yaml", [f"model.path={model}", *SETTINGS, MEGATRON, EXPERTS, *layout])
    engine = MegatronEngine(config, torch.device("cpu"), 1)
    return [router.layer for router in engine.routers]


def test_routers_of_all_virtual_stages_are_watched(tmp_path):
    model = make_model(tmp_path / "moe", "qwen3_moe", num_hidden_layers=4)
    assert on_ranks(2, tmp_path, layers_with_routers, model) == [[0, 2], [1, 3]]


def outputs_of_experts() -> tuple[Tensor, Tensor]:
    """Return what experts on two ranks compute for this rank's tokens, and what they should.

    Each expert gets another number of tokens from each rank.
    """
    shape = dict(hidden_size=6, moe_ffn_hidden_size=5, num_moe_experts=4)
    layout = f"engine.expert_model_parallel_size={dist.get_world_size()}"
    create_groups(load("sft.yaml", [MEGATRON, "model.path=unused", "data.train_files=u", layout]))
    generator = torch.Generator().manual_seed(0)
    gates_and_ups = torch.randn(4, 2 * 5, 6, generator=generator)
    downs = torch.randn(4, 6, 5, generator=generator)
    generator.manual_seed(1 + dist.get_rank())
    tokens = torch.randn(12, 6, generator=generator)
    weights, chosen = torch.rand(12, 4, generator=generator).topk(2)
    with cuda_is_cpu():
        experts = Experts(TransformerConfig(num_layers=1, num_attention_heads=1, **shape))
        experts.linear_fc1.data = gates_and_ups.chunk(dist.get_world_size())[dist.get_rank()]
        experts.linear_fc2.data = downs.chunk(dist.get_world_size())[dist.get_rank()]
        outputs = experts(tokens, weights, chosen).detach()
    expected = torch.zeros_like(tokens)
    for i, token in enumerate(tokens):
        for weight, expert in zip(weights[i], chosen[i]):
            gate, up = (gates_and_ups[expert] @ token).chunk(2)
            expected[i] += weight * (downs[expert] @ (F.silu(gate) * up))
    return outputs, expected


def test_tokens_are_computed_by_the_experts_of_other_ranks(tmp_path):
    for outputs, expected in on_ranks(2, tmp_path, outputs_of_experts):
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)


def error_of_other_experts() -> str:
    """Return the error of groups for experts after groups without them."""
    pairs = ["model_engine=megatron", "model.path=unused", "data.train_files=unused"]
    dense = load("sft.yaml", pairs)
    with_experts = load("sft.yaml", [*pairs, "engine.expert_model_parallel_size=2"])
    create_groups(dense)
    with pytest.raises(RuntimeError) as raised:
        create_groups(with_experts)
    return str(raised.value)


def test_groups_of_a_dense_model_are_not_used_for_experts(tmp_path):
    for error in on_ranks(2, tmp_path, error_of_other_experts):
        assert "were created for expert_model_parallel_size=1, not 2" in error
