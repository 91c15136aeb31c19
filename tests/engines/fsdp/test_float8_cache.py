"""engine.float8_cache_weights: weights that are rounded to FP8 once for several products."""

import pytest
import torch
from torch import Tensor, nn

from config import InputError, load
from engines.fsdp import sharded_memory
from engines.fsdp.checks import check_float8_cache
from engines.fsdp.transforms import build_model, prepare_layers, weights_kept_for_float8
from engines.heads import Head
from engines.model import float8
from engines.model.hf import read_hf_config
from tests.support.models import make_model
from tests.support.torchao import make_importable

IN = 64
OUT = 48
NUM_TOKENS = 40  # no multiple of 16
FP8 = ["engine.float8=tensorwise", "engine.torch_compile=never"]
CACHED = [*FP8, "engine.float8_cache_weights=true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    make_importable()
    return make_model(tmp_path_factory.mktemp("float8_cache"), "llama")


def config_of(path, *settings: str):
    return load("sft.yaml", [f"model.path={path}", "data.train_files=unused", *settings])


def model_with_layer(path, settings: list[str], bias: bool = False) -> tuple[nn.Module, nn.Linear]:
    """Return a model in which one layer is in host memory and multiplies in FP8, and this layer."""
    config = config_of(path, *settings)
    hf, _ = build_model(config, Head.LOG_PROBS)
    torch.manual_seed(0)
    layer = nn.Linear(IN, OUT, bias=bias)
    attention = hf.get_decoder().layers[0].self_attn
    attention.q_proj = layer
    prepare_layers(hf, config, "cpu")
    return nn.ModuleList([attention.q_proj]), attention.q_proj


def inputs() -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(2, NUM_TOKENS // 2, IN) * torch.logspace(-2, 2, IN)
    return x.requires_grad_()


def gradients(layer: nn.Linear) -> list[Tensor]:
    """Return the output of a layer and the gradients of its input and parameters."""
    x = inputs()
    output = layer(x)
    torch.manual_seed(2)
    output.backward(torch.randn_like(output))
    return [output.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_weights_rounded_in_every_pass(folder, bias):
    _, plain = model_with_layer(folder, FP8, bias)
    model, cached = model_with_layer(folder, CACHED, bias)
    expected = gradients(plain)
    with weights_kept_for_float8(model, config_of(folder, *CACHED), "cpu"):
        actual = gradients(cached)
    assert len(actual) == len(expected) == 3 + bias
    for value, expected_value in zip(actual, expected):
        assert torch.equal(value, expected_value)


def test_products_keep_the_weights_of_the_beginning_of_the_block(folder):
    """So the kept weights are used; after the block, the new ones are."""
    config = config_of(folder, *CACHED)
    model, layer = model_with_layer(folder, CACHED)
    x = inputs().detach()
    before = layer(x)
    with weights_kept_for_float8(model, config, "cpu"):
        with torch.no_grad():
            layer.weight.mul_(-3)
        assert torch.equal(layer(x), before)
    after = layer(x)
    assert not torch.equal(after, before)
    with weights_kept_for_float8(model, config, "cpu"):
        assert torch.equal(layer(x), after)


def test_the_memory_is_freed_at_the_end_and_after_an_error(folder):
    config = config_of(folder, *CACHED)
    model, layer = model_with_layer(folder, CACHED)
    with weights_kept_for_float8(model, config, "cpu"):
        assert layer.rounded.shape == (OUT, IN)
        assert layer.rounded_transpose.shape == (IN, OUT)
        assert layer.rounded_transpose.is_contiguous()
    assert layer.rounded is None
    assert layer.rounded_transpose is None
    with pytest.raises(KeyError), weights_kept_for_float8(model, config, "cpu"):
        raise KeyError
    assert layer.rounded is None


def test_a_frozen_weight_gets_no_gradient(folder):
    model, layer = model_with_layer(folder, CACHED)
    layer.weight.requires_grad_(False)
    x = inputs()
    with weights_kept_for_float8(model, config_of(folder, *CACHED), "cpu"):
        layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad.abs().sum() > 0


def test_fp8_can_be_disabled_for_a_check(folder):
    model, layer = model_with_layer(folder, CACHED)
    x = inputs().detach()
    exact = nn.functional.linear(x, layer.weight)
    with float8.disabled([model]):
        assert torch.equal(layer(x), exact)
    assert not torch.equal(layer(x), exact)


def test_nothing_is_kept_without_the_setting(folder):
    model, layer = model_with_layer(folder, FP8)
    with weights_kept_for_float8(model, config_of(folder, *FP8), "cpu"):
        assert not hasattr(layer, "rounded")


@pytest.mark.parametrize(
    "settings, world_size, message",
    [
        ([], 1, None),
        (["engine.param_dtype=bfloat16"], 1, None),
        (["engine.reshard_after_forward=false"], 2, None),
        (["engine.param_dtype=bfloat16"], 2, "set engine.reshard_after_forward=false"),
        (["engine.cpu_offload=true"], 1, "set engine.cpu_offload=false"),
        (["model.lora.rank=4", "engine.fsdp_size=1"], 2, None),
        (["model.lora.rank=4", "engine.fsdp_size=2"], 4, "set engine.reshard_after_forward=false"),
        (
            ["model.lora.rank=4", "engine.fsdp_size=1", "engine.cpu_offload=true"],
            2,
            "set engine.cpu_offload=false",
        ),
    ],
)
def test_weights_must_stay_gathered(folder, settings, world_size, message):
    bf16 = ["engine.param_dtype=bfloat16", "engine.compute_dtype=bfloat16"]
    config = config_of(folder, *CACHED, *(settings or bf16))
    if message is None:
        check_float8_cache(config, world_size)
        return
    with pytest.raises(InputError, match=message):
        check_float8_cache(config, world_size)


@pytest.mark.parametrize("recipe", ["none", "rowwise"])
def test_other_recipes_are_an_error(folder, recipe):
    config = config_of(folder, f"engine.float8={recipe}", "engine.float8_cache_weights=true")
    hf, _ = build_model(config, Head.LOG_PROBS)
    with pytest.raises(InputError, match=f"needs engine.float8=tensorwise, not {recipe}: "):
        float8.check(hf, config)


@pytest.mark.parametrize("compile_setting", ["always", "never"])
def test_the_estimate_counts_what_is_kept(folder, compile_setting):
    compiled = f"engine.torch_compile={compile_setting}"
    plain = config_of(folder, *FP8, compiled)
    cached = config_of(folder, *CACHED, compiled)
    (without,) = sharded_memory.estimate_memory(plain, 1, "cpu")
    (estimate,) = sharded_memory.estimate_memory(cached, 1, "cpu")
    hf, _ = build_model(cached, Head.LOG_PROBS)
    num_weights = sum(layer.weight.numel() for layer in float8.linear_layers(hf).values())
    assert without.rounded_weights is None
    assert estimate.rounded_weights == 2 * num_weights
    shape = read_hf_config(folder).get_text_config()
    input_bytes = 3 * shape.hidden_size + shape.intermediate_size  # queries are as wide as hidden
    num_inputs = shape.num_hidden_layers * cached.data.max_tokens_per_micro_batch * input_bytes
    expected = num_inputs if compile_setting == "always" else 0
    assert estimate.activations - without.activations == expected


def test_the_estimate_counts_the_inputs_of_layers_in_fp8_alone(folder):
    """The queries of one layer are left: only the input of this product is kept in FP8."""
    compiled = "engine.torch_compile=always"
    excluded = "engine.float8_exclude=['layers[.][1-9]', mlp, '[kvo]_proj']"
    (without,) = sharded_memory.estimate_memory(
        config_of(folder, *FP8, compiled, excluded), 1, "cpu"
    )
    cached = config_of(folder, *CACHED, compiled, excluded)
    (estimate,) = sharded_memory.estimate_memory(cached, 1, "cpu")
    shape = read_hf_config(folder).get_text_config()
    num_tokens = cached.data.max_tokens_per_micro_batch
    assert estimate.activations - without.activations == num_tokens * shape.hidden_size
