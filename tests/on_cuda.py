"""Tests that need a GPU. pytest collects this file only by name:

    python -m pytest -s tests/on_cuda.py

Both engines run with the kernels that a CPU does not have: packed attention and grouped products in
bf16, pinned copies, fused steps, compiled layers. Megatron runs on one GPU and, with NCCL, on two.
"""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from engines.fsdp.tower_attention import WINDOWS
from tests.engines.conftest import megatron_folder  # noqa: F401
from tests.engines.fsdp.test_experts import check_grouped
from tests.engines.fsdp.test_families import FORMS
from tests.engines.fsdp.test_training import ALONE, ON_CUDA, result_of
from tests.engines.megatron_checks import distance, plain_reference
from tests.engines.megatron_worker import BF16, LORA
from tests.engines.test_megatron import (
    ALL,
    EQUAL_TO_FSDP,
    EQUAL_TO_PLAIN,
    ROUNDED,
    ROUNDED_EXPERTS,
    reference_of,
)
from tests.engines.test_megatron_adapters import ALL as ADAPTED
from tests.engines.test_megatron_checkpoints import SAVED_AT
from tests.job.test_output import HANGS
from tests.profiling.support import profile
from tests.support.foreign import FOREIGN
from tests.support.launch import launch
from tests.support.models import make_model
from tests.support.plain import (
    column,
    make_adapter,
    plain_answers,
    plain_loss,
    plain_model,
    plain_training as plain_fsdp,
    worst,
)
from tests.support.training import make_batch

BOUND = 1e-5
ROUNDED_BOUND = 0.02
CHOSEN = {
    1: [
        "reference qwen2_tied",
        "reference qwen3",
        "reference llama",
        "one",
        "one padded",
        "bf16",
        "attention",
    ],
    2: [
        "tp2",
        "pp2 vpp2",
        "cp2",
        "dp2",
        "dp2 replicated overlap",
        "bf16 tp2",
        "bf16 dp2",
        "bf16 cp2",
        "moe ep2",
        "moe tp2",
        "moe bf16 ep2",
        "mistral cp2",
        "yarn tp2",
        "windows tp2",
        "mixtral tp2 ep2",
        "lora tp2",
        "lora dp2 replicated",
        "lora bf16 tp2",
        "lora moe tp2",
        "save tp2 to pp2 vpp2",
        "resume tp2 to pp2 vpp2",
        "attention",
        "offload",
        "background",
    ],
}
pytestmark = [pytest.mark.gpu, pytest.mark.slow]
WORLDS = [world for world in CHOSEN if world <= torch.cuda.device_count()]
CASES = ALL | ADAPTED
SELECTED = [(world, name) for world in WORLDS for name in CHOSEN[world]]
BOTH = [world for world in WORLDS if world == 2]


# -- profiling ------------------------------------------------------------------------------------


def test_snapshots_of_memory_also_where_it_ran_out(tmp_path):
    def work(step):
        torch.empty(2**20 if step == 1 else 2**45, device="cuda")

    with pytest.raises(torch.OutOfMemoryError):
        profile(
            tmp_path,
            range(1, 4),
            "trainer.profile_interval=[1,3]",
            "profiler.tool=[memory,torch]",
            work=work,
        )
    for name in (
        "step_1/train_batch/memory_step1_rank0.pickle",
        "step_2/train_batch/out_of_memory_step2_rank0.pickle",
    ):
        snapshot = pickle.loads((tmp_path / "profile" / name).read_bytes())
        actions = {entry["action"] for trace in snapshot["device_traces"] for entry in trace}
        assert "alloc" in actions
        assert ("oom" in actions) == ("out_of" in name)


def test_nvtx_ranges_do_no_harm_without_nsys(tmp_path):
    ran, _ = profile(tmp_path, range(1, 4), "trainer.profile_interval=[2,2]", "profiler.tool=nvtx")
    assert ran == {"data": 3, "train_batch": 3}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("where", HANGS)
def test_a_hang_in_a_collective_of_nccl_names_the_rank_that_did_not_come(tmp_path, where):
    done = launch(2, "tests/job/hang_worker.py", tmp_path, where, returncode=1, timeout=120)
    assert done.stderr.count(HANGS[where]) == 1, done.stderr


# -- FSDP -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory):
    """Return a folder of models, and the results of the FSDP engine's worker on one GPU.

    It trains a mixture of experts in fp32 and bf16, compiled and not, adapters, and families with
    soft caps, sinks and recurrent layers.
    """
    folder = tmp_path_factory.mktemp("fsdp")
    make_model(folder / "qwen3_moe", "qwen3_moe")
    make_model(folder / "llama", "llama")
    make_adapter(folder / "llama")
    for name, changes in FOREIGN.items():
        make_model(folder / name, "qwen2_tied", **changes)
    launch(
        1,
        "tests/engines/fsdp/worker.py",
        folder,
        "experts",
        "experts bf16",
        *ON_CUDA,
        "grouped",
        *(f"{family} {form}" for family in FOREIGN for form in FORMS),
    )
    return folder, json.loads((folder / "1.json").read_text())


@pytest.mark.parametrize(
    "name, bound", [("experts", BOUND), ("experts bf16", ROUNDED_BOUND), ("lora compiled", BOUND)]
)
def test_training_of_experts_on_fsdp_and_of_adapters_equals_a_plain_loop_on_a_cpu(
    fsdp, name, bound
):
    """Exact in fp32; in bf16 up to rounding; compiled, which is the default on CUDA."""
    folder, results = fsdp
    case = (ALONE | ON_CUDA)[name]
    steps = result_of(lambda _: results, 1, name)["steps"]
    plain = plain_fsdp(folder / case.family, lora=case.lora)
    errors = {}
    for key, want in (("loss", plain.losses), ("grad_norm", plain.norms)):
        errors[key] = worst(column(steps, key), want[: len(steps)])
    print(f"\n{name}", errors)
    assert len(steps) == case.steps
    assert errors["loss"] < bound
    assert errors["grad_norm"] < 5 * bound


def test_grouped_products_of_experts_equal_a_loop(fsdp):
    print("\ngrouped", fsdp[1]["grouped"], "aux", fsdp[1]["experts aux compiled"]["steps"])
    check_grouped(fsdp[1]["grouped"])
    assert fsdp[1]["experts aux compiled"]["steps"][0]["router_aux_loss"] > 1.01


@pytest.mark.parametrize("family", FOREIGN)
@pytest.mark.parametrize("form", FORMS)
def test_other_families_answer_and_train_as_on_a_cpu(fsdp, family, form):
    folder, results = fsdp
    step = result_of(lambda _: results, 1, f"{family} {form}")
    asked = load_file(folder / f"{family} {form}.safetensors")["asked"][0, 0]
    want = plain_answers(folder / family)[0]
    loss, _ = plain_loss(plain_model(folder / family), make_batch(0))
    print(f"\n{family} {form} {(asked - want).abs().max():.1e}")
    assert (asked - want).abs().max() < 1e-4
    assert worst([step["loss"]], [loss.item()]) < BOUND


@pytest.mark.parametrize("attention", ["sdpa", WINDOWS])
def test_a_vision_tower_in_bf16_answers_as_in_fp32_and_so_do_its_gradients(attention):
    """Heads have 80 dimensions, windows several sizes.

    sdpa, one window after another, shows how much rounding in bf16 changes.
    """
    shape = dict(
        depth=3,
        hidden_size=160,
        intermediate_size=320,
        num_heads=2,
        fullatt_block_indexes=[1],
        out_hidden_size=64,
    )
    torch.manual_seed(0)
    tower = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**shape))
    grid = torch.tensor([[1, 16, 26], [1, 8, 8]])
    pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14)

    def answers(tower, pixels):
        tower.zero_grad()
        out = tower(pixels, grid.to(pixels.device)).pooler_output.float()
        out.square().mean().backward()
        return out.detach().cpu(), {
            name: p.grad.to("cpu", torch.float32, copy=True) for name, p in tower.named_parameters()
        }

    want, gradients = answers(tower, pixels)
    tower.config._attn_implementation = attention
    got, rounded = answers(tower.to("cuda", torch.bfloat16), pixels.to("cuda", torch.bfloat16))
    error = ((got - want).norm() / want.norm()).item()
    largest = max(distance(rounded[name], x) for name, x in gradients.items())
    print(f"\ntower {attention} {error:.1e} gradients {largest:.1e}")
    assert error < ROUNDED_BOUND
    assert largest < 10 * ROUNDED_BOUND


# -- Megatron -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launches(megatron_folder):
    def run_worker(world):
        launch(world, "tests/engines/megatron_worker.py", megatron_folder, *CHOSEN[world])
        return json.loads((megatron_folder / f"{world}.json").read_text())

    with ThreadPoolExecutor() as pool:
        return dict(zip(WORLDS, pool.map(run_worker, WORLDS)))


def selected(table):
    return [key for key in SELECTED if key in table]


def bound_of(case):
    return ROUNDED_BOUND if BF16 in case.settings else BOUND


@pytest.mark.parametrize("world", WORLDS)
def test_packed_attention_in_bf16_equals_each_sequence_alone(launches, world):
    errors = launches[world]["attention"]
    print("\npacked attention, context parallel", world, [f"{error:.1e}" for error in errors])
    assert max(errors) < 1e-2


@pytest.mark.parametrize("world, name", selected(EQUAL_TO_FSDP | ROUNDED))
def test_training_equals_fsdp(launches, megatron_folder, world, name):
    """In fp32, and in bf16 but for rounding."""
    case = CASES[world, name]
    steps = launches[world][name]["steps"]
    _, reference_name = reference_of(case)
    reference = launches[1][reference_name]["steps"]
    expected = reference[: case.steps]
    errors = {
        key: worst(column(steps, key), column(expected, key))
        for key in ("loss", "entropy", "grad_norm")
    }
    if len(expected) == len(reference):
        weights = load_file(megatron_folder / f"{world} {name}.safetensors")
        by_fsdp = load_file(megatron_folder / f"1 {reference_name}.safetensors")
        hf_names = weights.keys() - {"answers"}
        errors["weights"] = max(distance(weights[n], by_fsdp[n]) for n in hf_names)
    print(f"\n{world} {name}", {key: f"{error:.1e}" for key, error in errors.items()})
    bound = bound_of(case)
    assert errors["loss"] < bound
    assert errors["entropy"] < bound
    assert errors["grad_norm"] < 5 * bound
    assert errors.get("weights", 0) < BOUND


@pytest.mark.parametrize("world, name", selected(EQUAL_TO_PLAIN | ROUNDED_EXPERTS))
def test_training_equals_a_plain_loop(launches, megatron_folder, world, name):
    """On a CPU in fp32, over the same micro-batches; in bf16 but for rounding."""
    case = CASES[world, name]
    result = launches[world][name]
    plain = plain_reference(megatron_folder, case, result)
    keys = ["loss", "grad_norm"]
    if case.has_aux_loss:
        keys.append("router_aux_loss")
    errors = {key: worst(column(result["steps"], key), column(plain.steps, key)) for key in keys}
    print(f"\n{world} {name}", {key: f"{error:.1e}" for key, error in errors.items()})
    bound = bound_of(case)
    assert errors["loss"] < bound
    assert errors.get("router_aux_loss", 0) < bound
    assert errors["grad_norm"] < 5 * bound


@pytest.mark.parametrize("world, name", selected(ADAPTED))
def test_training_of_adapters_equals_peft(launches, megatron_folder, world, name):
    """On a CPU in fp32; in bf16 but for rounding."""
    case = CASES[world, name]
    result = launches[world][name]
    expected = plain_reference(megatron_folder, case, result).steps[: case.steps]
    errors = {
        key: worst(column(result["steps"], key), column(expected, key))
        for key in ("loss", "grad_norm")
    }
    print(f"\n{world} {name}", {key: f"{error:.1e}" for key, error in errors.items()})
    bound = bound_of(case)
    assert errors["loss"] < bound
    assert errors["grad_norm"] < 5 * bound


@pytest.mark.parametrize("world", BOTH)
def test_what_was_offloaded_comes_back(launches, world):
    """So do DDP's buffers of parameters and gradients, and the optimizer's views of them."""
    for settings, result in launches[world]["offload"].items():
        same = "lora dp2 replicated" if LORA in settings else "dp2"
        num_steps = len(result["steps"])
        assert num_steps > 0
        expected = launches[world][same]["steps"][:num_steps]
        bound = ROUNDED_BOUND if BF16 in settings else 10 * BOUND
        for key in ("loss", "grad_norm"):
            error = worst(column(result["steps"], key), column(expected, key))
            assert error < 5 * bound, (settings, key)
        assert result["gradients left"] == 0


@pytest.mark.parametrize("world", BOTH)
def test_checkpoints_on_another_layout_and_in_the_background(launches, world):
    saved = launches[world]["save tp2 to pp2 vpp2"]["steps"]
    resumed = launches[world]["resume tp2 to pp2 vpp2"]["steps"]
    assert len(resumed) == SAVED_AT
    assert worst(column(resumed, "loss"), column(saved, "loss")) < 10 * BOUND
    result = launches[world]["background"]
    for kind in ("foreground", "background"):
        assert result[kind]["restored"] == [True, True]
