"""What the Megatron engine rejects before anything is built, and what it estimates; no torchrun."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import InputError
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from engines.megatron.distributed_optimizer import ddp_config
from engines.megatron.engine import MegatronEngine
from job.progress import Progress
from job.resume import find_resume
from tests.engines.megatron_checks import make_config
from tests.engines.megatron_worker import CP2, EP2, NO_SP, PP2, REPLICATED, TP2, VPP2
from tests.support.estimates import estimate_bytes
from tests.support.models import make_model
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")

MOE = "model.path=FOLDER/qwen3_moe"

# -- layouts and models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_ranks, pairs, message",
    [
        (
            3,
            ["engine.tensor_model_parallel_size=2"],
            "x context .1. parallel ranks do not divide the 3 ranks",
        ),
        (
            3,
            ["engine.tensor_model_parallel_size=3"],
            "does not divide the model's 4 attention heads",
        ),
        (
            8,
            ["engine.tensor_model_parallel_size=8"],
            "does not divide the model's 4 attention heads",
        ),
        (
            8,
            ["engine.pipeline_model_parallel_size=8"],
            "virtual pipeline .1. stages are more than the model's 4 layers",
        ),
        (
            4,
            [
                "engine.pipeline_model_parallel_size=2",
                "engine.virtual_pipeline_model_parallel_size=4",
            ],
            "pipeline .2. x virtual pipeline .4. stages are more than",
        ),
        (
            1,
            ["engine.virtual_pipeline_model_parallel_size=2"],
            "needs engine.pipeline_model_parallel_size > 1",
        ),
        (
            2,
            ["engine.context_parallel_size=2", "data.max_tokens_per_micro_batch=1022"],
            "must be a multiple of 4",
        ),
        (
            4,
            [
                "engine.tensor_model_parallel_size=2",
                "engine.context_parallel_size=2",
                "data.max_tokens_per_micro_batch=1020",
            ],
            "must be a multiple of 8",
        ),
        (
            4,
            [
                "engine.tensor_model_parallel_size=2",
                "engine.context_parallel_size=auto",
                "data.max_tokens_per_micro_batch=1023",
            ],
            "must be a multiple of 4",
        ),
        (
            2,
            [MOE, "engine.context_parallel_size=auto", "engine.router_aux_loss_coef=0.1"],
            "model_engine=megatron does not support engine.context_parallel_size=auto with the "
            "routers' auxiliary loss .coefficient 0.1.",
        ),
        (
            2,
            [f"{MOE}_raw", "engine.context_parallel_size=auto"],
            "auxiliary loss .coefficient 0.4.. .* or engine.router_aux_loss_coef=0",
        ),
        (
            2,
            ["engine.context_parallel_costs=[400,170,280,0.1]"],
            r"context_parallel_costs=\[400, 170, 280, 0.1\] has no effect with "
            "engine.context_parallel_size=1",
        ),
        (
            2,
            ["engine.expert_model_parallel_size=2"],
            "expert_model_parallel_size=2 needs a mixture of experts",
        ),
        (
            1,
            ["engine.router_aux_loss_coef=0.1"],
            "router_aux_loss_coef=0.1 needs a mixture of experts",
        ),
        (
            3,
            [MOE, "engine.expert_model_parallel_size=3"],
            "parallel_size=3 does not divide the model's 8 experts",
        ),
        (2, [MOE, "engine.expert_model_parallel_size=4"], "and the 2 ranks of a pipeline stage"),
        (
            4,
            [MOE, "engine.expert_model_parallel_size=4", "engine.pipeline_model_parallel_size=2"],
            "and the 2 ranks",
        ),
        (
            2,
            [MOE, "engine.tensor_model_parallel_size=2", "engine.sequence_parallel=false"],
            "mixture of experts with engine.tensor_model_parallel_size > 1 needs "
            "engine.sequence_parallel=true",
        ),
        (
            4,
            ["data.train_batch_size=3"],
            "train_batch_size=3 is less than the 4 data-parallel ranks",
        ),
        (
            4,
            ["data.train_batch_size=1", "engine.tensor_model_parallel_size=2"],
            "train_batch_size=1 is less than the 2 data-parallel ranks",
        ),
        (
            4,
            ["model.lora.rank=4", "engine.tensor_model_parallel_size=4"],
            "parallel_size=4 does not divide the model's 2 key-value heads, as model.lora",
        ),
        (
            1,
            ["model.lora.rank=4", MOE],
            "would adapt experts and routers too, which is not supported: give",
        ),
        (
            1,
            ["model.lora.rank=4", MOE, "model.lora.target_modules=[q_proj,gate]"],
            "names model.layers.0.mlp.gate: adapters are supported",
        ),
        (
            1,
            ["model.lora.rank=4", MOE, "model.lora.target_modules=[gate_proj,up_proj]"],
            "model.layers.0.mlp.experts",
        ),
        (
            2,
            [
                "model.lora.rank=4",
                "engine.pipeline_model_parallel_size=2",
                r"model.lora.target_modules='.*\.[01]\..*_proj'",
            ],
            "leaves the pipeline stage of layers 2 to 3 without adapters",
        ),
        (
            2,
            [
                "model.lora.rank=4",
                "engine.pipeline_model_parallel_size=2",
                r"model.lora.target_modules='.*\.[012]\..*_proj'",
                "model.path=FOLDER/mistral",
            ],
            "leaves the pipeline stage of layers 3 to 4 without adapters",
        ),
        (
            1,
            ["optim.lr_scheduler_type=constant", "optim.min_lr_ratio=0.1"],
            "no effect with a constant schedule",
        ),
        (1, ["optim.name=muon"], "optim.name=muon needs model_engine=fsdp"),
        (1, ["model.path=/nowhere"], "contains no config.json"),
        (
            1,
            ["model.path=FOLDER/mistral", "engine.bridge=mbridge"],
            "engine.bridge=mbridge does not support mistral models, only llama, qwen2, ",
        ),
        (
            1,
            ["model.path=FOLDER/qwen3_windows", "engine.bridge=mbridge"],
            "attention_bias=True .* with engine.bridge=mbridge",
        ),
        (
            1,
            ["engine.override_ddp_config.use_distributed_optimizer=false"],
            "contradicts engine.use_distributed_optimizer=True",
        ),
        (
            1,
            [
                "engine.use_distributed_optimizer=false",
                "engine.override_ddp_config={use_distributed_optimizer: true}",
            ],
            "contradicts engine.use_distributed_optimizer=False",
        ),
        (1, ["engine.override_ddp_config.bucket=1"], "bucket is not supported"),
        (1, ["engine.override_ddp_config.bucket_size=many"], "must be of type int"),
        (
            1,
            ["engine.override_ddp_config.bucket_size=7"],
            "has no effect without engine.overlap_grad_reduce=true",
        ),
        (
            1,
            [
                "engine.override_ddp_config.pad_buckets_for_high_nccl_busbw=true",
                "engine.use_distributed_optimizer=false",
            ],
            "busbw has no effect without engine.use_distributed_optimizer=true",
        ),
        (
            1,
            ["engine.override_ddp_config.overlap_param_gather=true"],
            "overlap_param_gather is not supported",
        ),
        (
            1,
            ["engine.override_ddp_config.fsdp_double_buffer=true"],
            "fsdp_double_buffer is not supported, only grad_reduce_in_fp32,",
        ),
    ],
)
def test_layouts_that_cannot_work(megatron_folder, num_ranks, pairs, message):
    with pytest.raises(InputError, match=message):
        MegatronEngine.check(make_config(megatron_folder, *pairs), num_ranks)


@pytest.mark.parametrize(
    "family, patterns, message",
    [
        (
            "llama",
            "[visual]",
            "'visual' matches no name in the files of .*; the nearest are .*weight",
        ),
        (
            "llama",
            "[q_proj, v_proj]",
            "matches .*0.self_attn.q_proj.weight but not .*0.self_attn.k_proj.weight",
        ),
        (
            "mixtral",
            "[w1]",
            "matches .*0.block_sparse_moe.experts.0.w1.weight but not "
            ".*0.block_sparse_moe.experts.0.w3.weight",
        ),
        (
            "qwen3_moe",
            "['experts.[0-5].']",
            "matches .*0.mlp.experts.0.gate_proj.weight but not .*0.mlp.experts.6.gate_proj.weight",
        ),
        ("qwen2_tied", "[lm_head]", "matches lm_head.weight but not model.embed_tokens.weight"),
    ],
)
def test_parameters_that_cannot_be_frozen(megatron_folder, family, patterns, message):
    config = make_config(
        megatron_folder, f"model.path={megatron_folder / family}", f"model.freeze={patterns}"
    )
    with pytest.raises(InputError, match=message):
        MegatronEngine.check(config, 1)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(model_type="granite"), "does not support granite models"),
        (
            dict(model_type="mixtral", router_jitter_noise=0.1),
            "router_jitter_noise=0.1 in config.json is not supported",
        ),
        (
            dict(
                rope_parameters=dict(
                    rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
                )
            ),
            "partial_rotary_factor=0.5 in config.json is not supported",
        ),
        (dict(model_type="qwen2_moe", num_experts=4), "does not support qwen2_moe models"),
        (
            dict(model_type="qwen3_moe", mlp_only_layers=[0]),
            "mlp_only_layers=.0. in config.json is not supported",
        ),
        (
            dict(model_type="qwen3_moe", decoder_sparse_step=2),
            "decoder_sparse_step=2 in config.json is not supported",
        ),
        (
            dict(model_type="mixtral", num_experts_per_tok=1),
            "num_experts_per_tok=1 with norm_topk_prob=true",
        ),
        (
            dict(model_type="mistral", sliding_window=0),
            "sliding_window=0 in config.json leaves nothing to attend to",
        ),
        (
            dict(
                model_type="qwen3",
                head_dim=16,
                use_sliding_window=False,
                layer_types=["sliding_attention"] + 2 * ["full_attention"],
            ),
            "layer_types in config.json has sliding_attention, but there is no window",
        ),
        (dict(attention_dropout=0.1), "attention_dropout=0.1 in config.json is not supported"),
        (dict(hidden_act="gelu"), "hidden_act=gelu in config.json is not supported"),
        (
            dict(
                rope_parameters=dict(
                    rope_type="linear", rope_theta=10000.0, factor=2.0, partial_rotary_factor=0.5
                )
            ),
            "partial_rotary_factor=0.5 in config.json is not supported",
        ),
        (
            dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)),
            "does not support rope type 'dynamic'",
        ),
    ],
)
def test_models_without_a_faithful_translation(tmp_path, changes, message):
    make_model(tmp_path, "qwen2_tied", **changes)
    with pytest.raises(InputError, match=message):
        MegatronEngine.check(make_config(tmp_path, f"model.path={tmp_path}"), 1)


def test_tied_matrices_must_be_equal_in_the_files(tmp_path):
    model = make_model(tmp_path, "qwen2_tied")
    file = model / "model.safetensors"
    weights = load_file(file)
    output_matrix = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": output_matrix}, file, {"format": "pt"})
    for engine, name in ((MegatronEngine, "megatron"), (FSDPEngine, "fsdp")):
        engine.check(make_config(tmp_path, f"model.path={model}", f"model_engine={name}"), 1)

    output_matrix[-1, -1] += 1
    save_file(weights | {"lm_head.weight": output_matrix}, file, {"format": "pt"})
    message = "have different values, but config.json ties them: set tie_word_embeddings to false"
    for engine, name in ((MegatronEngine, "megatron"), (FSDPEngine, "fsdp")):
        config = make_config(tmp_path, f"model.path={model}", f"model_engine={name}")
        with pytest.raises(InputError, match=message):
            engine.check(config, 1)


def test_damaged_files(tmp_path):
    model = make_model(tmp_path, "qwen2_tied")
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match="model.safetensors is damaged or incomplete"):
        MegatronEngine.check(make_config(tmp_path, f"model.path={model}"), 1)


def test_config_json_that_transformers_rejects(tmp_path):
    model = make_model(tmp_path, "qwen2_tied")
    hf_config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(hf_config | {"head_dim": 7}))
    with pytest.raises(InputError, match="RoPE requires an even rotary dimension"):
        MegatronEngine.check(make_config(tmp_path, f"model.path={model}"), 1)


def test_resume_in_another_dtype_is_refused(megatron_folder, tmp_path):
    config = make_config(megatron_folder)
    identity = {"model_engine": "megatron"}
    written = {"run": identity, "export_dtype": "float32"}
    (tmp_path / "trainer.json").write_text(json.dumps(written))
    same = Progress(identity=identity, export_dtype="float32")
    assert find_resume(config, tmp_path, same, 1) == tmp_path
    other = Progress(identity=identity, export_dtype="bfloat16")
    message = "with engine.compute_dtype=float32, now it is bfloat16: set it back"
    with pytest.raises(InputError, match=message):
        find_resume(config, tmp_path, other, 1)


# -- DDP -------------------------------------------------------------------------------------------


def test_precedence_of_ddp_settings(megatron_folder):
    def ddp(*settings: str):
        pairs = [f"engine.{setting}" for setting in settings]
        return ddp_config(make_config(megatron_folder, *pairs).engine)

    default = ddp()
    assert default.grad_reduce_in_fp32
    assert default.use_distributed_optimizer
    assert not default.overlap_grad_reduce
    assert not ddp(REPLICATED).use_distributed_optimizer
    overlap = "overlap_grad_reduce=true"
    assert ddp(overlap).overlap_grad_reduce
    overridden = ddp(overlap, "override_ddp_config.overlap_grad_reduce=false")
    assert not overridden.overlap_grad_reduce
    assert not ddp("override_ddp_config.grad_reduce_in_fp32=false").grad_reduce_in_fp32
    assert ddp(overlap, "override_ddp_config.bucket_size=7").bucket_size == 7


# -- estimates -------------------------------------------------------------------------------------


def test_estimate_of_activations(megatron_folder):
    """What divides them, and how many micro-batches wait on which stage."""

    def estimates(num_ranks, *settings, family="llama", key="activations"):
        config = make_config(
            megatron_folder,
            f"model.path={megatron_folder / family}",
            "data.max_tokens_per_micro_batch=8192",
            *(f"engine.{setting}" for setting in settings),
        )
        return [stage[key] for stage in estimate_bytes(config, num_ranks, "cuda")]

    hidden = 8192 * 32 * 2  # bf16
    in_layer = 8192 * 2 * (4 * 32 + 3 * (32 + 16) + 3 * 48)
    one = estimates(1)[0]
    assert one == pytest.approx(4 * in_layer + hidden)
    assert estimates(1, "recompute=selective") == [one]
    assert estimates(1, "recompute=full")[0] == pytest.approx(in_layer + 5 * hidden)
    assert estimates(2) == [one]
    assert estimates(2, TP2)[0] == pytest.approx(2 * in_layer + hidden)
    # Keys and values of 2.5 tokens for each of a rank's own.
    gathered = 4 * 4096 * 2 * 1.5 * (16 + 16)
    assert estimates(2, CP2)[0] == pytest.approx(one / 2 + gathered)
    whole = 8192 * 2 * 8 * 32  # what tensor-parallel ranks each hold
    assert estimates(2, TP2, NO_SP)[0] == pytest.approx(2 * in_layer + whole + hidden)
    assert estimates(2, PP2) == pytest.approx([4 * in_layer, 2 * in_layer + hidden])
    assert estimates(2, PP2, VPP2) == pytest.approx([5 * in_layer, 3 * in_layer + hidden])

    experts = estimates(1, family="qwen3_moe")[0]
    assert estimates(2, EP2, family="qwen3_moe")[0] == experts
    assert experts > estimates(2, TP2, EP2, family="qwen3_moe")[0] > experts / 2

    optimizer = estimates(1, key="optimizer")[0]
    assert estimates(2, key="optimizer")[0] == optimizer / 2
    assert estimates(2, REPLICATED, key="optimizer")[0] == optimizer


def shapes_of_critic(folder: Path) -> dict[str, list[int]]:
    engine = MegatronEngine(make_config(folder), CPU, total_steps=1, head=Head.VALUES)
    return {name: list(tensor.shape) for name, tensor in engine.export_weights()}


def test_a_critic_needs_no_output_matrix_in_the_files(tmp_path):
    """As for a model without a head; an actor cannot be made of it."""
    make_model(tmp_path / "llama", "llama", num_hidden_layers=1)
    file = tmp_path / "llama" / "model.safetensors"
    weights = load_file(file)
    shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
    hidden_size = weights.pop("lm_head.weight").shape[1]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 weights of LlamaForCausalLM, such as lm_head"):
        MegatronEngine.check(make_config(tmp_path), 1)
    (exported,) = on_ranks(1, tmp_path, shapes_of_critic, tmp_path)
    assert exported == shapes | {"lm_head.weight": [1, hidden_size]}
