"""Parts of the Megatron engine that need neither torchrun nor a model's weights."""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoConfig

from config import InputError, load
from engines.megatron import layout
from engines.megatron.adapters import Adapter
from engines.megatron.engine import MegatronEngine
from engines.megatron.families import ROPE_TYPES, check_rope
from engines.megatron.mapping import row_runs
from engines.megatron.transformer_config import layout_fields, softmax_scale
from engines.megatron.without_cuda import cuda_is_cpu
from engines.model import lora
from engines.teacher import HiddenHead
from tests.engines.megatron_checks import make_config
from tests.support.estimates import checkpoint_bytes, estimate_bytes
from tests.support.guarded import unguarded
from tests.support.models import make_model
from tests.support.ranks import on_ranks
from tests.support.training import make_batch, make_loss


@pytest.mark.parametrize("rows_per_group", [[3], [2, 2], [4, 1, 1], [6, 2, 2]])
def test_the_rows_of_a_fused_matrix_come_from_where_they_belong(rows_per_group):
    """Groups follow one another; each has some rows of every source, in order."""
    num_groups = 4
    fused = []
    for group in range(num_groups):
        for source, num_rows in enumerate(rows_per_group):
            fused += [(source, group * num_rows + row) for row in range(num_rows)]
    for start, stop in itertools.combinations(range(len(fused) + 1), 2):
        rows = {}
        for run in row_runs(rows_per_group, start, stop):
            for offset, row in enumerate(range(run.first, run.last)):
                rows[run.start + offset] = (run.source, row)
        assert [*rows.items()] == [*enumerate(fused[start:stop])]


@pytest.mark.parametrize("factor", [None, 1, 1.0, 0.5, 2])
@pytest.mark.parametrize("rope_type", [*ROPE_TYPES, "dynamic"])
def test_rotary_embeddings_that_megatron_computes(factor, rope_type):
    hf_config = AutoConfig.for_model("llama")
    hf_config.rope_parameters = {"rope_type": rope_type, "partial_rotary_factor": factor}
    if rope_type in ROPE_TYPES and factor in (None, 1):
        check_rope(hf_config, "/model")
        return
    with pytest.raises(InputError) as error:
        check_rope(hf_config, "/model")
    reason = "does not support rope type 'dynamic', only default, llama3, linear, yarn"
    if rope_type in ROPE_TYPES:
        reason = f"partial_rotary_factor={factor} in config.json is not supported"
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "tp, sequence_parallel, cp_size, multiple",
    [(1, True, 1, 1), (4, True, 1, 4), (4, False, 1, 1), (1, True, 3, 6), (2, True, 2, 8)],
)
def test_lengths_are_padded_for_the_ranks_that_divide_tokens(
    tp, sequence_parallel, cp_size, multiple
):
    """Tensor-parallel ranks do so with sequence parallelism alone."""
    engine = OmegaConf.create(
        {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    )
    assert layout.padding_multiple(engine, cp_size) == multiple


@pytest.mark.parametrize("num_kv_heads, fitting", [(None, [1, 2, 4]), (2, [1, 2, 4]), (3, [1])])
def test_ranks_divide_heads_or_repeat_those_of_keys(num_kv_heads, fitting):
    """Of four heads of queries. Without a number, there are as many of keys."""
    shape = AutoConfig.for_model("llama", num_attention_heads=4)
    shape.num_key_value_heads = num_kv_heads
    for tp in (1, 2, 3, 4, 8):
        engine = OmegaConf.create({"tensor_model_parallel_size": tp})
        if tp in fitting:
            layout.check_heads(engine, shape)
            continue
        message = f"size={tp} does not divide the model's 4 attention heads and"
        with pytest.raises(InputError, match=message):
            layout.check_heads(engine, shape)


def test_ranks_divide_the_width_of_a_layers_mlp():
    shape = AutoConfig.for_model("llama", intermediate_size=50)
    settings = {"expert_model_parallel_size": 1, "router_aux_loss_coef": None}
    layout.check_mlp(OmegaConf.create(settings | {"tensor_model_parallel_size": 2}), shape, 4)
    engine = OmegaConf.create(settings | {"tensor_model_parallel_size": 4})
    with pytest.raises(InputError, match="size=4 does not divide intermediate_size=50. Lower it"):
        layout.check_mlp(engine, shape, 4)


def test_the_attention_scale_has_the_factor_of_queries_and_of_keys():
    hf_config = AutoConfig.for_model("llama", head_dim=16, max_position_embeddings=64)
    assert softmax_scale(hf_config) is None
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0)
    hf_config.rope_parameters = yarn | {"original_max_position_embeddings": 16}
    of_queries = 0.1 * math.log(4.0) + 1  # Peng et al. 2023, equation 22
    assert softmax_scale(hf_config) == pytest.approx(of_queries * of_queries / math.sqrt(16))


def fields_of_layout(settings: dict[str, int], num_mtp_layers: int, **shape) -> dict:
    needed = ["model_engine=megatron", "model.path=unused", "data.train_files=unused"]
    pairs = [f"engine.{name}={size}" for name, size in settings.items()]
    with cuda_is_cpu():
        layout.initialize(load("sft.yaml", [*needed, *pairs]).engine)
    hf_config = AutoConfig.for_model("llama", num_hidden_layers=5, **shape)
    return layout_fields(hf_config, num_mtp_layers)


@pytest.mark.parametrize(
    "settings, stages",
    [
        ({}, None),
        (
            {"pipeline_model_parallel_size": 2},
            [
                ["embedding", "decoder", "decoder", "decoder"],
                ["decoder", "decoder", "mtp", "loss"],
            ],
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            [
                ["embedding", "decoder", "decoder"],
                ["decoder"],
                ["decoder"],
                ["decoder", "mtp", "loss"],
            ],
        ),
    ],
    ids=["one stage", "two stages", "virtual stages"],
)
def test_fields_of_a_layout(tmp_path, settings, stages):
    fields, other = on_ranks(2, tmp_path, fields_of_layout, settings, 1)
    assert fields == other
    pp = settings.get("pipeline_model_parallel_size", 1)
    vpp = settings.get("virtual_pipeline_model_parallel_size")
    expected = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "variable_seq_lengths": True,
        "overlap_p2p_comm": vpp is not None,
        "batch_p2p_comm": False,
        "mtp_num_layers": 1,
    }
    if stages:
        expected["pipeline_model_parallel_layout"] = stages
    assert fields == expected


def numbers_of_expert_ranks() -> list[int]:
    """Return how many ranks divide a layer of a model with experts, and of a dense model."""
    settings = {"expert_model_parallel_size": 2}
    key = "expert_model_parallel_size"
    return [fields_of_layout(settings, 0, **shape)[key] for shape in ({"num_experts": 4}, {})]


def test_a_dense_model_beside_one_with_experts_is_divided_over_no_expert_ranks(tmp_path):
    for numbers in on_ranks(2, tmp_path, numbers_of_expert_ranks):
        assert numbers == [2, 1]


def dropped_inputs(model: Path, sequence_parallel: bool) -> dict[str, list[list[float]]]:
    """Return what dropout leaves of ones: name of an adapted matrix -> two draws of a first seed
    and one of a second; and what it leaves in an evaluation."""
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused"]
    pairs += ["engine.tensor_model_parallel_size=2", "model.lora.rank=2", "model.lora.dropout=0.25"]
    pairs.append(f"engine.sequence_parallel={sequence_parallel}")
    engine = MegatronEngine(load("sft.yaml", pairs), torch.device("cpu"), total_steps=1)
    draws = {}
    for name, module in engine.models[0].named_modules():
        if isinstance(module, Adapter):
            draws[name] = []
            for seed in (1, 1, 2):
                torch.manual_seed(seed)
                draws[name].append(module.dropped(torch.ones(400)).tolist())
            module.eval()
            draws[name].append(module.dropped(torch.ones(400)).tolist())
    return draws


@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_drop_the_same_numbers_only_of_an_input_that_they_share(tmp_path, sequence_parallel):
    """Recomputation drops the same again. Tensor-parallel ranks share the input of a matrix that
    they divide by columns, unless each has its own tokens."""
    model = make_model(tmp_path / "llama", "llama", num_hidden_layers=1)
    first_rank, second_rank = on_ranks(2, tmp_path, dropped_inputs, model, sequence_parallel)
    assert len(first_rank) == 4
    for name, draws in first_rank.items():
        first, again, with_another_seed, in_evaluation = draws
        assert {*in_evaluation} == {1.0}
        assert first == again != with_another_seed
        assert sorted({*first}) == pytest.approx([0, 1 / 0.75])
        assert 250 < sum(number > 0 for number in first) < 350
        is_row_parallel = "linear_proj" in name or "linear_fc2" in name
        is_shared = not is_row_parallel and not sequence_parallel
        assert (second_rank[name] == draws) == is_shared


def adapters_and_merged_weights(model: Path, targets: str) -> tuple[dict, dict]:
    """Return random adapters of some projections, and the weights with these adapters in them."""
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused"]
    pairs += ["engine.compute_dtype=float32", f"model.lora.target_modules={targets}"]
    pairs += ["model.lora.rank=4", "model.lora.alpha=8"]
    engine = MegatronEngine(load("sft.yaml", pairs), torch.device("cpu"), 1, optimize=False)
    set_random_adapters(engine)
    return dict(engine.export_adapter()), dict(engine.export_weights())


def set_random_adapters(engine: MegatronEngine) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in engine.models[0].parameters():
        if parameter.requires_grad:
            parameter.data.normal_(generator=generator)


@pytest.mark.parametrize("targets", ["[v_proj,up_proj]", "[q_proj,k_proj,gate_proj]"])
def test_some_projections_of_a_fused_matrix_have_adapters(tmp_path, targets):
    """Whichever they are: Megatron has one matrix for q, k and v, and one for gate and up."""
    model = make_model(tmp_path / "llama", "llama", num_hidden_layers=1)
    ((adapters, merged),) = on_ranks(1, tmp_path, adapters_and_merged_weights, model, targets)
    adapted = set()
    for name, weight in load_file(model / "model.safetensors").items():
        if any(f".{target}." in name for target in targets.strip("[]").split(",")):
            stem = name.removesuffix(".weight")
            adapted.add(stem)
            a = adapters[f"{stem}.lora_A.weight"]
            b = adapters[f"{stem}.lora_B.weight"]
            weight = weight + 8 / 4 * b @ a
        torch.testing.assert_close(merged[name], weight)
    assert adapters.keys() == {f"{stem}.lora_{kind}.weight" for stem in adapted for kind in "AB"}


def answers_of_the_base(model: Path) -> list[list[float]]:
    """Return log-probabilities with new adapters, with random ones, without them, and with them
    again."""
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused"]
    pairs += ["engine.compute_dtype=float32", "model.lora.rank=4"]
    engine = MegatronEngine(load("sft.yaml", pairs), torch.device("cpu"), 1, optimize=False)
    batch = make_batch(0)
    answers = [engine.log_probs(batch)[0].tolist()]
    set_random_adapters(engine)
    answers.append(engine.log_probs(batch)[0].tolist())
    with engine.without_adapters():
        answers.append(engine.log_probs(batch)[0].tolist())
    answers.append(engine.log_probs(batch)[0].tolist())
    return answers


def test_without_its_adapters_a_model_is_the_base(tmp_path):
    """It is the reference of a policy. New adapters add nothing."""
    model = make_model(tmp_path / "llama", "llama", num_hidden_layers=1)
    (answers,) = on_ranks(1, tmp_path, answers_of_the_base, model)
    new, with_adapters, without, with_adapters_again = answers
    assert without == new != with_adapters
    assert with_adapters_again == with_adapters


def router_loss_of_a_step(model: Path) -> float:
    """Return the auxiliary loss of a step in which each rank has one sequence.

    All experts are equally likely, so the loss of each token is 1.
    """
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused"]
    pairs += ["engine.compute_dtype=float32", "engine.router_aux_loss_coef=0.3"]
    with unguarded():
        engine = MegatronEngine(load("sft.yaml", pairs), torch.device("cpu"), total_steps=1)
    for router in engine.routers:
        router.weight.data.zero_()
    batch = make_batch(0)
    loss_fn = make_loss(len(batch.input_ids))
    share = batch.select([[0], [2]][engine.dp_rank])
    return engine.train_batch(share, loss_fn, 0, [(1, [0])])["router_aux_loss"]


def test_the_routers_loss_is_a_mean_over_the_tokens_of_all_ranks(tmp_path):
    """Otherwise it would weigh more, the more ranks there are."""
    first, _, second = make_batch(0).lengths[:3]
    assert first != second
    model = make_model(tmp_path / "moe", "qwen3_moe", num_hidden_layers=1)
    assert on_ranks(2, tmp_path, router_loss_of_a_step, model) == pytest.approx([1.0, 1.0])


@dataclass(frozen=True)
class Exported:
    """What one rank knows of a new engine.

    hidden  the last hidden states of a batch's tokens; empty on the first pipeline stage
    """

    weights: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]
    output_matrix: torch.Tensor
    log_probs: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def exported_by_rank(model: Path, setting: str) -> Exported:
    """Return what an engine exports while its parameters are offloaded, and what it computes."""
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused", setting]
    # Large enough adapters to be offloaded.
    pairs += ["model.lora.rank=64", "engine.compute_dtype=float32"]
    engine = MegatronEngine(load("sft.yaml", pairs), torch.device("cpu"), 1, optimize=False)
    engine.offload("parameters")
    adapters = {name: matrix.clone() for name, matrix in engine.export_adapter()}
    engine.offload("parameters")
    weights = dict(engine.export_weights())
    batch = make_batch(0)
    hidden = engine.token_outputs(batch, HiddenHead())
    return Exported(weights, adapters, engine.output_matrix(), engine.log_probs(batch)[0], hidden)


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_two_ranks_export_the_weights_in_the_files_and_new_adapters(tmp_path, axis):
    path = make_model(tmp_path / "llama", "llama", num_hidden_layers=2)
    setting = f"engine.{axis}_model_parallel_size=2"
    first, last = on_ranks(2, tmp_path, exported_by_rank, path, setting)
    in_files = load_file(path / "model.safetensors")
    for rank in (first, last):
        assert rank.weights.keys() == in_files.keys()
        for name, weight in in_files.items():
            assert rank.weights[name].equal(weight), name
        assert len(rank.adapters) == 2 * 7 * 2
        for name, matrix in rank.adapters.items():
            assert matrix.equal(lora.initial_matrix(name, matrix.shape, seed=0)), name
    assert first.log_probs.equal(last.log_probs)
    assert first.log_probs.any()
    has_whole_output = [axis == "tensor", True]
    for rank, is_last_stage in zip((first, last), has_whole_output):
        if not is_last_stage:
            assert rank.hidden == ()
            assert not rank.output_matrix.numel()
            continue
        (hidden,) = rank.hidden
        assert hidden.shape == (len(rank.log_probs), 32)
        assert rank.output_matrix.equal(in_files["lm_head.weight"])


def places_of_layers(model: Path) -> tuple[dict, list[list[int]]]:
    """Return the engine's coordinates, and the numbers of the layers of each virtual stage."""
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused"]
    pairs += ["engine.pipeline_model_parallel_size=2"]
    pairs += ["engine.virtual_pipeline_model_parallel_size=2"]
    engine = MegatronEngine(load("sft.yaml", pairs), torch.device("cpu"), 1, optimize=False)
    numbers = []
    for stage in engine.layers():
        numbers.append([number for number, _ in stage])
    return engine.coordinates(), numbers


def test_layers_of_virtual_stages_have_their_numbers_in_the_whole_model(tmp_path):
    model = make_model(tmp_path / "llama", "llama", num_hidden_layers=5)
    numbers = [[[0, 1], [3]], [[2], [4]]]
    for rank, place in enumerate(on_ranks(2, tmp_path, places_of_layers, model)):
        coordinates, numbers_of_layers = place
        assert numbers_of_layers == numbers[rank]
        assert coordinates == {
            "dp": [0, 1],
            "cp": [0, 1],
            "tp": [0, 1],
            "pp": [rank, 2],
            "first_layers": [stage[0] for stage in numbers[rank]],
            "sequence_parallel": False,
        }


def answers_around_another_head(model: Path) -> tuple[list[list[float]], list[int]]:
    """Return log-probabilities before the outputs of another head, after them, and after an error
    in a head; and the shape of the other head's outputs."""
    pairs = [f"model.path={model}", "model_engine=megatron", "data.train_files=unused"]
    config = load("sft.yaml", [*pairs, "engine.compute_dtype=float32"])
    engine = MegatronEngine(config, torch.device("cpu"), 1, optimize=False)
    batch = make_batch(0)
    answers = [engine.log_probs(batch)[0].tolist()]
    (hidden,) = engine.token_outputs(batch, HiddenHead())
    answers.append(engine.log_probs(batch)[0].tolist())
    with pytest.raises(TypeError):
        engine.token_outputs(batch, None)
    answers.append(engine.log_probs(batch)[0].tolist())
    return answers, [*hidden.shape]


def test_an_engine_has_its_own_head_again_after_another_one(tmp_path):
    model = make_model(tmp_path / "llama", "llama", num_hidden_layers=1)
    ((answers, shape),) = on_ranks(1, tmp_path, answers_around_another_head, model)
    before, after, after_error = answers
    assert before == after == after_error
    assert any(before)
    assert shape == [len(before), AutoConfig.from_pretrained(model).hidden_size]


@pytest.mark.parametrize(
    "settings, weight_bytes, gradient_bytes, optimizer_bytes",
    [
        (["engine.compute_dtype=float32"], 4, 4, 8),
        (["engine.compute_dtype=bfloat16"], 2, 4, 12),
        (
            [
                "engine.compute_dtype=bfloat16",
                "engine.override_ddp_config.grad_reduce_in_fp32=false",
            ],
            2,
            2,
            12,
        ),
    ],
    ids=["fp32", "bf16", "bf16 gradients"],
)
def test_estimate_of_states(
    megatron_folder, settings, weight_bytes, gradient_bytes, optimizer_bytes
):
    path = megatron_folder / "llama"
    config = make_config(megatron_folder, f"model.path={path}", *settings)
    number = sum(x.numel() for x in load_file(path / "model.safetensors").values())
    (stage,) = estimate_bytes(config, 1, "cuda")
    assert stage["parameters"] == number * weight_bytes
    assert stage["gradients"] == number * gradient_bytes
    assert stage["optimizer"] == number * optimizer_bytes
    (reference,) = estimate_bytes(config, 1, "cuda", "reference")
    assert reference["parameters"] == number * weight_bytes
    assert not reference.keys() & {"gradients", "optimizer"}
    in_fp32_too = 0 if weight_bytes == 4 else 4
    written = number * (weight_bytes + 2 * 4 + in_fp32_too)
    assert checkpoint_bytes(config) == written


def test_layers_for_multi_token_prediction_are_counted_if_they_are_trained(megatron_folder):
    path = megatron_folder / "mimo"
    weights = load_file(path / "model.safetensors")
    in_mtp_layers = sum(x.numel() for name, x in weights.items() if ".mtp_layers." in name)
    assert in_mtp_layers
    enabled = ["model.mtp.enable=true", "model.mtp.enable_train=true"]
    parameters = []
    for settings in ([], enabled):
        config = make_config(megatron_folder, f"model.path={path}", *settings)
        assert config.engine.compute_dtype == "bfloat16"
        (stage,) = estimate_bytes(config, 1, "cuda")
        parameters.append(stage["parameters"])
    assert parameters[1] - parameters[0] == in_mtp_layers * 2


def test_estimate_of_adapters(megatron_folder):
    """Only they have gradients, optimizer state and a place in checkpoints."""
    rank = 2
    settings = [f"model.lora.rank={rank}", "model.lora.dtype=float32"]
    path = megatron_folder / "llama"
    config = make_config(megatron_folder, f"model.path={path}", *settings)
    assert config.engine.compute_dtype == "bfloat16"
    weights = load_file(path / "model.safetensors")
    in_model = sum(x.numel() for x in weights.values())
    in_adapters = 0
    for name, weight in weights.items():
        if "layernorm" not in name and ".layers." in name:
            in_adapters += rank * sum(weight.shape)
    (stage,) = estimate_bytes(config, 1, "cuda")
    assert stage["parameters"] == in_model * 2 + in_adapters * 4
    assert stage["gradients"] == in_adapters * 4
    assert stage["optimizer"] == in_adapters * 8
    assert stage["gradient of the output matrix"] == 0
    assert checkpoint_bytes(config) == in_adapters * (4 + 8)
