"""What the engine rejects before it reads weights."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from config import InputError, load
from engines.fsdp.attention import has_whole_heads
from engines.fsdp.engine import FSDPEngine
from engines.fsdp.tracing import check_forward_pass
from engines.model.hf import build_on_meta, read_hf_config
from engines.model.logits import logit_constants
from tests import families
from tests.engines.fsdp.cases import LORA, make_config
from tests.engines.fsdp.model_files import add_weight, rewrite_weights
from tests.support.foreign import LATENT
from tests.support.models import SHAPE, make_model, write_model
from tests.support.plain import plain_model


@pytest.mark.parametrize(
    "world, pairs, message",
    [
        (
            3,
            ["engine.context_parallel_size=2"],
            "context_parallel_size=2 does not divide the number of ranks, 3",
        ),
        (4, ["engine.fsdp_size=3"], "fsdp_size=3 does not divide the number of ranks, 4"),
        (
            2,
            ["engine.sync_each_micro_batch=false", "engine.cpu_offload=true"],
            "set one of them to its default",
        ),
        (
            2,
            ["engine.sync_each_micro_batch=false", "engine.reduce_dtype=bfloat16"],
            "set engine.reduce_dtype=float32",
        ),
        (2, ["engine.fsdp_size=4"], "fsdp_size=4 does not divide the number of ranks, 2"),
        (
            2,
            [
                "engine.context_parallel_size=2",
                "engine.use_remove_padding=false",
                "data.max_tokens_per_micro_batch=1022",
            ],
            "max_tokens_per_micro_batch=1022 must be a multiple of 4",
        ),
        (
            2,
            [
                "engine.context_parallel_size=auto",
                "engine.use_remove_padding=false",
                "data.max_tokens_per_micro_batch=1023",
            ],
            "max_tokens_per_micro_batch=1023 must be a multiple of 2",
        ),
        (
            2,
            ["engine.context_parallel_size=2", "engine.context_parallel_costs=[400,170,280,0.1]"],
            r"context_parallel_costs=\[400, 170, 280, 0.1\] has no effect with "
            "engine.context_parallel_size=2: leave it out, or set .*=auto",
        ),
        (
            4,
            ["data.train_batch_size=3"],
            "train_batch_size=3 is less than the 4 data-parallel ranks",
        ),
        (
            4,
            ["data.train_batch_size=1", "engine.context_parallel_size=2"],
            "train_batch_size=1 is less than the 2 data-parallel ranks",
        ),
        (
            1,
            ["optim.lr_scheduler_type=constant", "optim.min_lr_ratio=0.1"],
            "no effect with a constant schedule",
        ),
        (1, ["model.path=/nowhere"], "contains no config.json"),
    ],
)
def test_layouts_that_cannot_work(folder, world, pairs, message):
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(make_config(folder, *pairs), world)


@pytest.mark.parametrize(
    "shape, message",
    [
        (dict(model_type="rwkv"), "model_type=rwkv has no attention heads"),
        (
            dict(
                **SHAPE,
                model_type="llama",
                rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
            ),
            "changes the frequencies beyond 512 tokens: lower data.max_length=513",
        ),
    ],
)
def test_shapes_that_cannot_work(folder, tmp_path, shape, message):
    AutoConfig.for_model(**shape).save_pretrained(tmp_path)
    config = make_config(folder, f"model.path={tmp_path}", "data.max_length=513")
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(config, 1)


def test_an_adapter_is_not_a_model(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match=f"^model.path={tmp_path} is a PEFT adapter, .* --merge$"):
        FSDPEngine.check(make_config(folder, f"model.path={tmp_path}"), 1)


def test_ranks_for_which_there_are_no_whole_heads():
    """All ranks need equally many heads; key-value heads can be repeated."""

    def possible_sizes(shape):
        return [size for size in range(1, 13) if has_whole_heads(shape, size)]

    grouped = SimpleNamespace(num_attention_heads=12, num_key_value_heads=3)
    assert possible_sizes(grouped) == [1, 3, 6, 12]
    assert possible_sizes(SimpleNamespace(num_attention_heads=4)) == [1, 2, 4]
    laguna = SimpleNamespace(num_attention_heads=4, num_attention_heads_per_layer=[4, 6, 4])
    assert possible_sizes(laguna) == [1, 2]
    gemma4 = AutoConfig.for_model(
        "gemma4_text",
        num_attention_heads=12,
        num_key_value_heads=3,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    )
    assert gemma4.is_heterogeneous
    assert possible_sizes(gemma4) == [1, 3, 6, 12]


def test_logits_that_are_computed_in_another_way_are_refused(folder):
    hf = build_on_meta(read_hf_config(folder / "llama"), torch.float32)
    assert logit_constants(hf) == (1.0, None)
    hf.forward = lambda **inputs: SimpleNamespace(logits=type(hf).forward(hf, **inputs).logits ** 3)
    with pytest.raises(
        InputError, match="LlamaForCausalLM computes its logits in a way that is not supported"
    ):
        logit_constants(hf)


@pytest.mark.parametrize(
    "family, pairs, message",
    [
        (
            "llama",
            ["engine.router_aux_loss_coef=0.1"],
            "router_aux_loss_coef=0.1 needs a mixture of experts",
        ),
        (
            "qwen3_moe",
            LORA,
            "all-linear would adapt experts and routers too, which is not supported: "
            "give model.lora.target_modules",
        ),
        (
            "bamba",
            ["engine.context_parallel_size=2"],
            "BambaForCausalLM carry a state from token to token, so ranks cannot share",
        ),
        (
            "bamba",
            ["engine.context_parallel_size=auto"],
            "engine.context_parallel_size=auto: layers of BambaForCausalLM carry a state",
        ),
    ],
)
def test_what_experts_and_recurrent_layers_cannot_have(folder, family, pairs, message):
    pairs = [pair if pair.startswith("engine") else f"model.lora.{pair}" for pair in pairs]
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(make_config(folder, f"model.path={folder / family}", *pairs), 2)


def test_a_model_with_recurrent_layers_takes_packed_sequences(folder):
    FSDPEngine.check(make_config(folder, f"model.path={folder / 'bamba'}"), 2)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(model_type="mixtral", router_jitter_noise=0.1),
            r"random numbers in training \(uniform_\).*router_jitter_noise=0.1 to 0",
        ),
        (
            dict(model_type="bart", d_model=32),
            "BartForCausalLM does not compute its logits from its base model's",
        ),
    ],
)
def test_models_that_are_random_in_training_or_have_another_base(tmp_path, changes, message):
    make_model(tmp_path, "qwen2_tied", **changes)
    with pytest.raises(InputError, match=message):
        FSDPEngine.check(make_config(tmp_path, f"model.path={tmp_path}"), 1)


@pytest.mark.parametrize(
    "family, name, other",
    [
        ("qwen2_tied", "model.layers.0.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("qwen2_tied", "model.embed_tokens.weight", "embed_tokens.weight"),
        (
            "gemma3 with images",
            "language_model.model.layers.1.mlp.up_proj.weight",
            "model.language_model.layers.1.mlp.up_proj.weight",
        ),
    ],
)
def test_two_names_of_one_weight(tmp_path, family, name, other):
    """One of them would be lost, whichever is read first."""
    weight = load_file(make_model(tmp_path, family) / "model.safetensors")[name]
    add_weight(tmp_path, other, torch.zeros_like(weight))
    with pytest.raises(InputError) as error:
        FSDPEngine.check(make_config(tmp_path, f"model.path={tmp_path}"), 1)
    names = f" {min(name, other)} and {max(name, other)} are two names of one weight"
    assert names in str(error.value)
    assert "remove one of them from the files" in str(error.value)


def test_experts_that_transformers_transposes_where_they_do_not_fit(tmp_path):
    """The error's advice helps."""
    made = write_model(tmp_path / "made", **families.SHAPES["qwen3_vl_moe"])
    saved = tmp_path / "saved"
    FSDPEngine.check(make_config(made, f"model.path={made}"), 1)
    rewrite_weights(
        made, lambda name, x: (name, x.mT.contiguous() if name.endswith("experts.down_proj") else x)
    )
    with pytest.raises(
        InputError,
        match="transformers converts .*down_proj .* and save it with save_original_format=False",
    ):
        FSDPEngine.check(make_config(made, f"model.path={made}"), 1)
    plain_model(made).save_pretrained(saved, save_original_format=False)
    FSDPEngine.check(make_config(saved, f"model.path={saved}"), 1)


def test_quantized_weights_are_refused(folder, tmp_path):
    shape = json.loads((folder / "qwen3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(shape | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(InputError, match="has quantized weights .* give the unquantized model"):
        read_hf_config(tmp_path)


# The forward pass of Llama fails with it.
PARTIAL_ROPE = dict(rope_type="linear", rope_theta=10000.0, factor=2.0, partial_rotary_factor=0.5)


@pytest.mark.parametrize(
    "shape, message",
    [
        (dict(model_type="qwen3", use_sliding_window=True, sliding_window=7), None),
        (
            dict(model_type="olmoe", num_experts=4, num_experts_per_tok=2, sliding_window=7),
            "only some of transformers' attention implementations apply its window of 7 tokens: "
            "set sliding_window=7 to null in config.json",
        ),
        (
            dict(
                model_type="qwen2_moe",
                num_experts=4,
                num_experts_per_tok=2,
                use_sliding_window=True,
                sliding_window=7,
                layer_types=3 * ["sliding_attention"],
            ),
            "only a mask limits its attention to a window of 7 tokens: "
            "set engine.use_remove_padding=false",
        ),
    ],
    ids=["a window of the layers", "a window of some implementations", "a window of the mask"],
)
def test_packed_sequences_need_a_window_that_attention_applies(tmp_path, shape, message):
    """Otherwise a run would train with whole sequences in view."""
    hf = build_on_meta(AutoConfig.for_model(**{**SHAPE, **shape}), torch.float32)
    config = make_config(tmp_path)
    if message is None:
        check_forward_pass(hf, config)
        return
    with pytest.raises(InputError) as error:
        check_forward_pass(hf, config)
    assert message in str(error.value)
    check_forward_pass(hf, make_config(tmp_path, "engine.use_remove_padding=false"))


def make_moe(window: int | None) -> nn.Module:
    """Build a model on the meta device whose window not all attention implementations apply."""
    shape = dict(model_type="olmoe", num_experts=4, num_experts_per_tok=2, sliding_window=window)
    return build_on_meta(AutoConfig.for_model(**{**SHAPE, **shape}), torch.float32)


def test_a_model_that_passes_does_not_vouch_for_another_one(tmp_path):
    """A run checks each of its models once; it may have two of one class."""
    packed = make_config(tmp_path)
    padded = make_config(tmp_path, "engine.use_remove_padding=false")
    check_forward_pass(make_moe(window=None), packed)
    check_forward_pass(make_moe(window=5), padded)
    with pytest.raises(InputError, match="apply its window of 5 tokens"):
        check_forward_pass(make_moe(window=5), packed)


def test_rows_that_ranks_share_are_checked_like_packed_ones(tmp_path):
    pairs = ["engine.use_remove_padding=false", "engine.context_parallel_size=auto"]
    with pytest.raises(InputError, match="apply its window of 6 tokens"):
        check_forward_pass(make_moe(window=6), make_config(tmp_path, *pairs))


@pytest.mark.parametrize(
    "shape, message",
    [
        (
            dict(model_type="llama", attention_dropout=0.25),
            "dropout is not supported: set attention_dropout=0.25 to 0 in config.json",
        ),
        (
            dict(model_type="mixtral", router_jitter_noise=0.1),
            "uses random numbers in training (uniform_), which is not supported: "
            "set router_jitter_noise=0.1 to 0 in config.json",
        ),
        (
            dict(model_type="llama", rope_parameters=PARTIAL_ROPE),
            "the forward pass of LlamaForCausalLM fails: RuntimeError",
        ),
        (
            dict(model_type="rwkv"),
            "carries a state from token to token, and so from one packed sequence to the next: "
            "set engine.use_remove_padding=false",
        ),
    ],
    ids=["dropout", "jitter", "a pass that fails", "a state"],
)
def test_a_pass_over_shapes_finds_what_cannot_be_trained(tmp_path, shape, message):
    hf = build_on_meta(AutoConfig.for_model(**{**SHAPE, **shape}), torch.float32)
    with pytest.raises(InputError) as error:
        check_forward_pass(hf, make_config(tmp_path))
    assert message in str(error.value)


PADDING = "set engine.use_remove_padding=false"


LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0] * 4,
    long_factor=[2.0] * 4,
    original_max_position_embeddings=64,
)


@pytest.mark.parametrize(
    "changes, pairs, message",
    [
        (
            dict(model_type="seed_oss", head_dim=8),
            [],
            "set attention_dropout=0.1, residual_dropout=0.1 to 0 in config.json",
        ),
        (dict(model_type="gpt2"), [], "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1"),
        (
            dict(model_type="bloom"),
            [],
            f"transformers implements it only with eager attention: {PADDING}",
        ),
        (
            dict(model_type="falcon"),
            [],
            f"transformers implements it only with sdpa attention: {PADDING}",
        ),
        (
            dict(model_type="falcon"),
            ["engine.context_parallel_size=auto"],
            f"attention: {PADDING} and engine.context_parallel_size=1",
        ),
        (
            dict(model_type="falcon"),
            ["engine.context_parallel_size=auto", "engine.use_remove_padding=false"],
            "attention: set engine.context_parallel_size=1",
        ),
        (
            dict(model_type="stablelm"),
            [],
            f"do not pass the sequence boundaries on to their attention: {PADDING}",
        ),
        (
            dict(model_type="olmoe", num_experts=4, num_experts_per_tok=2, sliding_window=7),
            [],
            "only some of transformers' attention implementations apply its window of 7 tokens: "
            "set sliding_window=7 to null in config.json",
        ),
        (
            dict(model_type="mamba"),
            [],
            "MambaForCausalLM does not take packed sequences: ValueError",
        ),
        (
            dict(model_type="doge", num_experts=0),
            [],
            "only a mask limits its attention to a window",
        ),
        (
            dict(model_type="opt"),
            ["engine.use_remove_padding=false"],
            "OPTForCausalLM does not compute its logits from its base",
        ),
        (
            dict(model_type="llama", rope_parameters=PARTIAL_ROPE),
            [],
            "the forward pass of LlamaForCausalLM fails: RuntimeError",
        ),
        (
            dict(model_type="phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64),
            ["data.max_length=65"],
            "rope_type=longrope in config.json changes the frequencies beyond 64 tokens: "
            "lower data.max_length=65",
        ),
        (
            dict(
                model_type="qwen3",
                head_dim=16,
                use_sliding_window=False,
                layer_types=["sliding_attention"] + 2 * ["full_attention"],
            ),
            [],
            "layer_types in config.json has sliding_attention, but there is no window: "
            "give sliding_window",
        ),
        (
            dict(
                model_type="gemma4_text",
                head_dim=8,
                global_head_dim=8,
                hidden_size_per_layer_input=0,
                vocab_size_per_layer_input=97,
                use_bidirectional_attention="all",
            ),
            [],
            "is_causal=False in its attention, which is not supported: "
            "set use_bidirectional_attention=all to null in config.json",
        ),
        (dict(model_type="jetmoe"), [], "the values of tensors determine what its layers compute"),
        (
            dict(
                model_type="deepseek_v2",
                n_routed_experts=4,
                moe_intermediate_size=24,
                first_k_dense_replace=1,
                **LATENT,
            ),
            [],
            "config.json has none (num_experts_per_tok)",
        ),
        (
            dict(model_type="hrm_text"),
            [],
            "transformers converts model.H_module.layers.0.attn.gqkv_proj.weight",
        ),
    ],
)
def test_models_that_cannot_work(folder, tmp_path, changes, pairs, message):
    """They are rejected before data is tokenized; the setting that the error names helps.

    It helps those alone that have it, although a model that passes is not checked again.
    """
    make_model(tmp_path, "qwen2_tied", **{"tie_word_embeddings": False, **changes})
    config = make_config(folder, f"model.path={tmp_path}", *pairs)
    with pytest.raises(InputError) as error:
        FSDPEngine.check(config, 1)
    assert message in str(error.value)
    if PADDING in message:
        padded = "engine.use_remove_padding=false"
        FSDPEngine.check(make_config(folder, f"model.path={tmp_path}", padded), 1)
        with pytest.raises(InputError):
            FSDPEngine.check(config, 1)


def test_a_model_that_has_passed_is_checked_again_with_other_settings(tmp_path):
    """A process may check a padded model, and then the same one packed, or another one."""
    settings = [f"model.path={tmp_path}", "data.train_files=t"]
    packed = load("sft.yaml", settings)
    padded = load("sft.yaml", [*settings, "engine.use_remove_padding=false"])
    shape = dict(model_type="bloom", n_layer=1)
    hf_config = AutoConfig.for_model(**{**SHAPE, **shape})
    check_forward_pass(build_on_meta(hf_config, torch.float32), padded)
    with pytest.raises(InputError, match="transformers implements it only with eager attention"):
        check_forward_pass(build_on_meta(hf_config, torch.float32), packed)
    hf_config.hidden_dropout = 0.1
    with pytest.raises(InputError, match="set hidden_dropout=0.1 to 0 in config.json"):
        check_forward_pass(build_on_meta(hf_config, torch.float32), padded)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(pad_token_id=97), "AssertionError: Padding_idx must be within num_embeddings"),
        (dict(hidden_act="relu3"), "KeyError: 'relu3'"),
        (
            dict(rope_parameters=dict(rope_type="unknown", rope_theta=10000.0)),
            "KeyError: 'unknown'",
        ),
    ],
)
def test_values_of_config_json_that_transformers_does_not_know(tmp_path, changes, message):
    file = make_model(tmp_path, "qwen3") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(InputError) as error:
        FSDPEngine.check(make_config(tmp_path, f"model.path={tmp_path}"), 1)
    reason = "transformers cannot build the model that config.json describes"
    assert str(error.value) == f"model.path={tmp_path}: {reason}: {message}"
