"""engine.float8: which layers multiply in FP8, what they compute, and settings that do nothing."""

import pytest
import torch
from torch import Tensor, nn

from config import InputError, load
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model import float8, freeze
from tests.support.models import make_model
from tests.support.torchao import make_importable

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
NUM_TOKENS = 40  # no multiple of 16
IN = 64
OUT = 48


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    make_importable()
    folder = tmp_path_factory.mktemp("float8")
    for family in ("llama", "qwen3_moe", "lfm2"):
        make_model(folder / family, family)
    make_model(folder / "odd", "llama", intermediate_size=40)
    return folder


def config_of(path, *settings: str):
    return load("sft.yaml", [f"model.path={path}", "data.train_files=unused", *settings])


def model_of(path, *settings: str) -> nn.Module:
    """Return a model on the meta device, with the adapters of the settings."""
    return build_model(config_of(path, *settings), Head.LOG_PROBS)[0]


# -- layers ----------------------------------------------------------------------------------------


def kinds(layers: dict[str, nn.Linear]) -> set[str]:
    return {name.rpartition(".")[2] for name in layers}


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "family, settings, expected",
    [
        ("llama", [], ATTENTION | MLP),
        ("llama", ["model.lora.rank=16"], ATTENTION | MLP),
        ("qwen3_moe", [], ATTENTION),  # neither its experts nor its routers
        ("lfm2", [], {"in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"}),
    ],
)
def test_linear_layers_of_the_decoder_are_chosen(models, family, settings, expected):
    hf = model_of(models / family, *settings)
    layers = float8.linear_layers(hf)
    assert kinds(layers) == expected
    assert not any("base_layer" in name or "lora" in name for name in layers)
    assert hf.get_output_embeddings() not in layers.values()


def test_excluded_layers_and_odd_sizes_keep_the_compute_dtype(models, capsys):
    settings = ["engine.float8=rowwise", "engine.float8_exclude=['layers[.]0[.]', v_proj]"]
    config = config_of(models / "odd", *settings)
    hf = model_of(models / "odd")
    chosen = float8.chosen_layers(hf, config.engine.float8_exclude)
    assert kinds(chosen) == {"q_proj", "k_proj", "o_proj"}
    assert not any(".layers.0." in name for name in chosen)
    float8.check(hf, config, reports=True)
    num_layers = hf.config.num_hidden_layers
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        f"engine.float8=rowwise: {3 * (num_layers - 1)} of {7 * num_layers} linear layers of the "
        "decoder multiply in FP8, emulated on this device"
    )
    assert second.startswith(f"engine.float8=rowwise: {3 * num_layers} linear layers cannot")
    assert second.endswith("such as model.layers.0.mlp.gate_proj [40, 32]")


@pytest.mark.parametrize(
    "rank, reports, is_reported", [(0, True, True), (1, True, False), (0, False, False)]
)
@pytest.mark.parametrize("setting", ["engine.float8=rowwise", "model.freeze=['layers[.]0[.]']"])
def test_one_rank_reports_what_a_setting_does(
    models, capsys, monkeypatch, setting, rank, reports, is_reported
):
    monkeypatch.setenv("RANK", str(rank))
    config = config_of(models / "llama", setting)
    hf = model_of(models / "llama")
    float8.check(hf, config, reports=reports)
    freeze.apply(config, hf, Head.LOG_PROBS, reports=reports)
    printed = capsys.readouterr().out
    assert (setting.partition("=")[0] in printed) == is_reported


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            ["engine.float8_exclude=[q_proj]"],
            "engine.float8_exclude=['q_proj'] does nothing with engine.float8=none",
        ),
        (
            ["engine.float8=rowwise", "engine.float8_exclude=[q_prj]"],
            "engine.float8_exclude: 'q_prj' matches no linear layer of the decoder, such as "
            "model.layers.0.self_attn.q_proj",
        ),
        (
            ["engine.float8=rowwise", "engine.float8_exclude=['(']"],
            "engine.float8_exclude: '(' is not a regular expression",
        ),
        (
            ["engine.float8=tensorwise", "engine.float8_exclude=['.']"],
            "engine.float8=tensorwise: no linear layer of the decoder is left to multiply in FP8",
        ),
    ],
)
def test_settings_that_cannot_work_are_errors(models, settings, message):
    config = config_of(models / "llama", *settings)
    with pytest.raises(InputError) as error:
        float8.check(model_of(models / "llama"), config)
    assert str(error.value).startswith(message)


# -- products --------------------------------------------------------------------------------------


def rounded(values: Tensor, dim: int | None, dtype: torch.dtype, powers_of_two: bool) -> Tensor:
    """Round to FP8 with a scale for the whole tensor, or for each slice along a dimension.

    Computed in fp64. Rounding to FP8 itself goes through fp32, which represents every factor.
    """
    values = values.double()
    largest = values.abs().amax(dim, keepdim=True) if dim is not None else values.abs().amax()
    scale = torch.finfo(dtype).max / largest
    if powers_of_two:
        scale = torch.exp2(scale.log2().floor())
    limit = torch.finfo(dtype).max
    codes = (values * scale).clamp(-limit, limit).float().to(dtype).double()
    return codes / scale


class Expected:
    """The products of a linear layer and their gradients, written out."""

    def __init__(self, recipe: str, x: Tensor, weight: Tensor, gradient: Tensor):
        by_row = recipe == "rowwise"
        gradient_dtype = E4M3 if by_row else E5M2

        def along(values: Tensor, dim: int, dtype: torch.dtype = E4M3) -> Tensor:
            """Round for a product that sums over this dimension."""
            return rounded(values, dim if by_row else None, dtype, by_row)

        self.output = along(x, 1) @ along(weight, 1).T
        of_gradient = along(gradient, 1, gradient_dtype)
        self.x_gradient = of_gradient @ along(weight, 0)
        self.weight_gradient = along(gradient, 0, gradient_dtype).T @ along(x, 0)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.fixture(params=["tensorwise", "rowwise"])
def recipe(request):
    return request.param


def layer_in_fp8(models, recipe: str) -> tuple[nn.Module, nn.Linear]:
    """Return a model in which one layer is in host memory and multiplies in FP8, and this layer."""
    hf = model_of(models / "llama")
    attention = hf.get_decoder().layers[0].self_attn
    attention.q_proj = nn.Linear(IN, OUT, bias=False)
    config = config_of(models / "llama", f"engine.float8={recipe}")
    float8.convert_layers(hf, config, "cpu")
    assert float8.is_float8(attention.q_proj)
    return hf, attention.q_proj


def test_products_are_those_of_rounded_factors(models, recipe):
    _, layer = layer_in_fp8(models, recipe)
    torch.manual_seed(0)
    x = torch.randn(NUM_TOKENS, IN) * torch.logspace(-2, 2, NUM_TOKENS)[:, None]
    x.requires_grad_()
    gradient = torch.randn(NUM_TOKENS, OUT)
    expected = Expected(recipe, x.detach(), layer.weight.detach(), gradient)
    output = layer(x)
    output.backward(gradient)
    assert relative_error(output, expected.output) < 1e-5
    assert relative_error(x.grad, expected.x_gradient) < 1e-5
    assert relative_error(layer.weight.grad, expected.weight_gradient) < 1e-5
    exact = x.detach().double() @ layer.weight.detach().double().T
    assert 0.005 < relative_error(output, exact) < 0.1


def test_only_rowwise_keeps_tokens_apart(models, recipe):
    """A larger second token changes how the first one is rounded, with one scale for both."""
    _, layer = layer_in_fp8(models, recipe)
    torch.manual_seed(0)
    x = torch.randn(2, IN)
    alone = layer(x)[0]
    beside_larger = layer(x * torch.tensor([[1.0], [1000.0]]))[0]
    assert torch.equal(alone, beside_larger) == (recipe == "rowwise")


def test_fp8_can_be_disabled_for_a_check(models, recipe):
    hf, layer = layer_in_fp8(models, recipe)
    x = torch.randn(NUM_TOKENS, IN)
    in_fp8 = layer(x)
    exact = nn.functional.linear(x, layer.weight)
    with float8.disabled([hf]):
        assert torch.equal(layer(x), exact)
    assert torch.equal(layer(x), in_fp8)
    assert not torch.equal(in_fp8, exact)
