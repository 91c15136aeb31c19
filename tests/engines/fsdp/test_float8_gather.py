"""engine.float8_all_gather: weights that ranks gather in FP8."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from config import InputError, load
from engines.fsdp import sharded_memory, sharding
from engines.fsdp.checks import check_float8_gather
from engines.fsdp.transforms import build_model
from engines.heads import Head
from engines.model import float8
from engines.model.hf import read_hf_config
from tests.engines.fsdp.cases import BF16, MASTER, RECOMPUTE, answers_of, build, train, worker_case
from tests.support.cases import needs
from tests.support.models import make_model
from tests.support.torchao import make_importable
from tests.support.training import digest

IN_FP8 = "float8_all_gather=true"
# name -> (settings of the engine, with adapters)
LAYOUTS = {
    "ZeRO-3": (MASTER, False),
    "ZeRO-3, recomputed": (f"{MASTER} {RECOMPUTE}", False),
    "ZeRO-2": (f"{BF16} reshard_after_forward=false", False),
    "adapters": (MASTER, True),
}
NUM_STEPS = 3


# With one rank per copy of the weights, nothing is gathered.
LAYOUTS_OF_FOUR = {"HSDP": (f"{MASTER} fsdp_size=2", False)}


@worker_case(2, 4)
def float8_gather(folder: Path, device: torch.device) -> dict:
    make_importable()
    layouts = LAYOUTS if dist.get_world_size() == 2 else LAYOUTS_OF_FOUR
    results = {}
    for name, (settings, has_adapters) in layouts.items():
        results[name] = {}
        for way in ("", IN_FP8):
            settings_of_way = f"{settings} float8=tensorwise {way}".strip()
            engine = build(folder / "qwen3", device, settings_of_way, lora=has_adapters)
            metrics = train(engine, range(NUM_STEPS - 1))
            answers = digest({"answers": answers_of(engine)})
            engine.load_state(engine.state())
            engine.offload()
            metrics += train(engine, range(NUM_STEPS - 1, NUM_STEPS))
            results[name][way] = {
                "metrics": metrics,
                "answers": answers,
                "weights": digest(dict(engine.export_weights())),
                "gathered": gathered_types(engine),
            }
    return results


def gathered_types(engine) -> list[str]:
    """Return the types of gathered weights, after checking those in FP8."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

    layers = [module for module in engine.hf.modules() if float8.is_float8(module)]
    whole = [sharding.full_tensor(layer.weight.detach()) for layer in layers]
    sharding.gather(engine.model)
    types = set()
    for layer, weight in zip(layers, whole):
        gathered = layer.weight.data
        types.add(type(gathered).__name__)
        if type(gathered) is not Tensor:
            rounded = hp_tensor_to_float8_dynamic(
                weight.bfloat16(), torch.float8_e4m3fn, layer.linear_mm_config
            )
            assert torch.equal(gathered._scale, rounded._scale)
            assert torch.equal(gathered._data.float(), rounded._data.float())
    sharding.reshard(engine.model)
    return sorted(types)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, name",
    [
        *(pytest.param(2, name, marks=needs((2, "float8_gather"))) for name in LAYOUTS),
        *(pytest.param(4, name, marks=needs((4, "float8_gather"))) for name in LAYOUTS_OF_FOUR),
    ],
)
def test_gathering_in_fp8_changes_nothing(results, world, name):
    result = results(world)["float8_gather"][name]
    plain = result[""]
    in_fp8 = result[IN_FP8]
    assert "Float8TrainingTensor" not in plain["gathered"]
    assert in_fp8["gathered"] == ["Float8TrainingTensor"]
    assert in_fp8["metrics"] == plain["metrics"]
    assert in_fp8["answers"] == plain["answers"]
    assert in_fp8["weights"] == plain["weights"]


# -- one rank --------------------------------------------------------------------------------------


def sharded_layer(in_fp8: bool) -> nn.Sequential:
    """Return a layer in FP8 that FSDP2 gathers for a single rank."""
    make_importable()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from engines.fsdp.float8_gather import use_gather

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True, pad_inner_dim=True))
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (1,), mesh_dim_names=(sharding.SHARD,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    if in_fp8:
        use_gather(model, 1, torch.bfloat16, is_compiled=False)
    return model


def gradients(model: nn.Sequential) -> list[Tensor]:
    """Return the output, and the gradients of the input, the weight and the bias."""
    torch.manual_seed(1)
    x = torch.randn(40, 64, dtype=torch.bfloat16).requires_grad_()
    output = model(x)
    output.backward(torch.randn_like(output))
    parameters = [sharding.full_tensor(p.grad) for p in model.parameters()]
    model.zero_grad()
    return [output.detach(), x.grad, *parameters]


@pytest.mark.usefixtures("process_group")
def test_a_layer_computes_the_same_with_its_weight_gathered_in_fp8():
    plain = sharded_layer(in_fp8=False)
    model = sharded_layer(in_fp8=True)
    from engines.fsdp.float8_gather import scaled_once

    expected = gradients(plain)
    for scaling in (nullcontext(), scaled_once(model), scaled_once(model)):
        with scaling:
            actual = gradients(model)
        assert len(actual) == len(expected) == 4
        for value, expected_value in zip(actual, expected):
            assert torch.equal(value, expected_value)
    for trained in (plain, model):
        with torch.no_grad():
            trained[0].weight.mul_(-3)
    with scaled_once(model):
        assert torch.equal(gradients(model)[0], gradients(plain)[0])


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
def test_compiled_rounding_is_that_of_the_compute_dtype():
    """Of an fp32 weight, whose numbers compiled code would not round to bfloat16 by itself."""
    make_importable()
    from engines.fsdp import float8_gather

    layer = sharded_layer(in_fp8=False)[0]
    torch.manual_seed(0)
    layer.__class__ = float8_gather.GatheredFloat8Linear
    layer.part = torch.randn(256, 256)
    layer.compute_dtype = torch.bfloat16
    layer.scale = 448 / layer.part.bfloat16().abs().max().float()
    contents = []
    for layer.is_compiled in (False, True):
        (content,), _ = layer.fsdp_pre_all_gather(None)
        contents.append(content)
    assert torch.equal(*contents)
    expected = (layer.part.bfloat16().float() * layer.scale).to(torch.float8_e4m3fn)
    assert torch.equal(contents[0], expected.view(torch.uint8))


@pytest.mark.usefixtures("process_group")
def test_scales_are_kept_for_one_batch():
    model = sharded_layer(in_fp8=True)
    from engines.fsdp.float8_gather import scaled_once

    largest = sharding.full_tensor(model[0].weight.detach()).bfloat16().abs().max()
    with pytest.raises(KeyError), scaled_once(model):
        assert model[0].scale.item() == pytest.approx(448 / largest.item(), rel=1e-6)
        raise KeyError
    assert model[0].scale is None


@pytest.mark.usefixtures("process_group")
def test_the_rounded_weight_serves_a_check_without_fp8():
    """It multiplies in the compute dtype by the numbers that FP8 leaves."""
    model = sharded_layer(in_fp8=True)
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    weight = sharding.full_tensor(model[0].weight.detach()).bfloat16()
    scale = 448 / weight.abs().max().double()
    rounded = (weight.float() * scale.float()).to(torch.float8_e4m3fn).float() / scale.float()
    bias = sharding.full_tensor(model[0].bias.detach()).bfloat16()
    with float8.disabled([model]):
        output = model(x)
    torch.testing.assert_close(output, F.linear(x, rounded.bfloat16(), bias))
    assert float8.is_float8(model[0])


# -- checks and estimates --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    make_importable()
    return make_model(tmp_path_factory.mktemp("float8_gather"), "llama")


def config_of(model: Path, *settings: str):
    return load("sft.yaml", [f"model.path={model}", "data.train_files=unused", *settings])


GATHER = ["engine.float8=tensorwise", "engine.float8_all_gather=true"]
UNSHARDED = ["engine.param_dtype=bfloat16", "engine.compute_dtype=bfloat16"]


@pytest.mark.parametrize(
    "settings, world_size",
    [([], 2), ([], 16), (UNSHARDED, 2), (["model.lora.rank=4", "engine.fsdp_size=2"], 4)],
)
def test_sharded_weights_can_be_gathered_in_fp8(model, capsys, settings, world_size):
    config = config_of(model, *GATHER, *settings)
    hf, _ = build_model(config, Head.LOG_PROBS)
    check_float8_gather(hf, config, world_size, reports=True)
    assert not capsys.readouterr().out


def test_a_line_tells_how_many_weights_are_gathered_as_before(model, capsys):
    """Of 48 ranks, each can have a row of the gate and of up, but not of the other matrices."""
    config = config_of(model, *GATHER)
    hf, _ = build_model(config, Head.LOG_PROBS)
    check_float8_gather(hf, config, 48, reports=True)
    (line,) = capsys.readouterr().out.splitlines()
    beginning = "engine.float8_all_gather=true: 15 of 21 weights in FP8 are gathered in bfloat16: "
    assert line.startswith(beginning)


def test_weights_of_recurrent_layers_are_gathered_as_before(tmp_path, capsys):
    """Some models read them without calling the linear layer, which FP8 cannot serve."""
    make_importable()
    config = config_of(make_model(tmp_path, "lfm2"), *GATHER)
    hf, _ = build_model(config, Head.LOG_PROBS)
    names = float8.chosen_layers(hf, [])
    num_recurrent = sum(".conv." in name for name in names)
    assert 0 < num_recurrent < len(names)
    check_float8_gather(hf, config, 2, reports=True)
    (line,) = capsys.readouterr().out.splitlines()
    count = f"{num_recurrent} of {len(names)} weights in FP8"
    assert line.startswith(f"engine.float8_all_gather=true: {count} are gathered in bfloat16: ")


@pytest.mark.parametrize(
    "settings, world_size, message",
    [
        (["engine.float8=rowwise"], 2, "needs engine.float8=tensorwise, not rowwise: "),
        (["engine.float8=none"], 2, "needs engine.float8=tensorwise, not none: "),
        (["engine.cpu_offload=true"], 2, "does not go with engine.cpu_offload=true: "),
        (["engine.float8_cache_weights=true"], 2, "nothing to round for engine.float8_cache"),
        ([], 1, "every rank holds whole weights: leave it out"),
        (["engine.fsdp_size=1"], 2, "every rank holds whole weights"),
        (["model.lora.rank=4", "engine.fsdp_size=1"], 2, "every rank holds whole weights"),
        ([], 11, "no weight can be gathered in FP8: their rows do not divide evenly over 11 ranks"),
    ],
)
def test_settings_that_gather_nothing_in_fp8_are_an_error(model, settings, world_size, message):
    config = config_of(model, *GATHER, *settings)
    hf, _ = build_model(config, Head.LOG_PROBS)
    with pytest.raises(InputError, match=message):
        check_float8_gather(hf, config, world_size)


@pytest.mark.parametrize("is_resharded", [True, False])
def test_the_estimate_counts_a_byte_less_per_gathered_weight(model, is_resharded):
    """ZeRO-3 has two layers gathered at a time, ZeRO-2 all three. If compiled, nothing is saved."""
    num_gathered = 2 if is_resharded else 3
    layer_settings = f"engine.reshard_after_forward={str(is_resharded).lower()}"
    plain = config_of(model, "engine.float8=tensorwise", layer_settings)
    in_fp8 = config_of(model, *GATHER, layer_settings)
    (without,) = sharded_memory.estimate_memory(plain, 2, "cpu")
    (estimate,) = sharded_memory.estimate_memory(in_fp8, 2, "cpu")
    (compiled,) = sharded_memory.estimate_memory(in_fp8, 2, "cuda")
    assert compiled.gathered_weights == without.gathered_weights
    hf, _ = build_model(in_fp8, Head.LOG_PROBS)
    layers = hf.get_decoder().layers
    assert len(layers) == 3
    in_layer = sum(p.numel() for name, p in layers[0].named_parameters() if "proj" in name)
    assert without.gathered_weights - estimate.gathered_weights == num_gathered * in_layer


def test_the_estimate_leaves_out_weights_that_do_not_divide_evenly(model):
    """Of 48 ranks, each can have a row of the gate and of up, but not of the other matrices."""
    plain = config_of(model, "engine.float8=tensorwise")
    (without,) = sharded_memory.estimate_memory(plain, 48, "cpu")
    (estimate,) = sharded_memory.estimate_memory(config_of(model, *GATHER), 48, "cpu")
    shape = read_hf_config(model).get_text_config()
    assert shape.intermediate_size == 48
    in_layer = 2 * shape.hidden_size * shape.intermediate_size
    assert without.gathered_weights - estimate.gathered_weights == 2 * in_layer


def test_the_estimate_saves_a_byte_of_the_only_layer_once(tmp_path):
    """ZeRO-3 gathers two layers at a time, which this model does not have."""
    model = make_model(tmp_path / "model", "llama", num_hidden_layers=1)
    (without,) = sharded_memory.estimate_memory(
        config_of(model, "engine.float8=tensorwise"), 2, "cpu"
    )
    (estimate,) = sharded_memory.estimate_memory(config_of(model, *GATHER), 2, "cpu")
    shape = read_hf_config(model).get_text_config()
    assert (shape.hidden_size, shape.intermediate_size) == (32, 48)
    in_layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert without.gathered_weights - estimate.gathered_weights == in_layer
