"""vLLM with weights and a KV cache in FP8."""

import json
import math

import pytest
import torch
import torch.distributed as dist

from config import InputError, load
from data.batching.batch import Batch, make_cu_seqlens
from engines.model.hf import read_hf_config
from rl.updates import MAX_FP8_GAP, check_fp8_kv_cache
from rollout.sharing import Share
from rollout.vllm.adapters import LayoutError
from rollout.vllm.arguments import Host, engine_arguments
from rollout.vllm.capacity import kv_bytes_per_token, weight_bytes
from rollout.vllm.copies import Copy
from rollout.vllm.fp8_weights import Fp8Weights, Rows, check_complete, quantize_rows, rows_of
from rollout.vllm.quantization import check_head_size, cpu_can_cache
from rollout.vllm.settings import check_rollout
from tests.support.launch import launch
from tests.support.models import make_model
from tests.support.ranks import on_ranks

FP8_WEIGHTS = "rollout.quantization=fp8"
FP8_CACHE = "rollout.kv_cache_dtype=fp8"
NEEDED = ["engine.compute_dtype=bfloat16", "algorithm.rollout_is=token"]
CAN_CACHE = torch.accelerator.is_available() or cpu_can_cache()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    for family in ("qwen3", "qwen3_moe"):
        # A multiple of 32, for an FP8 cache on CPUs.
        make_model(folder / family, family, head_dim=32)
    make_model(folder / "narrow_heads", "qwen3", head_dim=16)
    make_model(folder / "with_images", "gemma3 with images", head_dim=16)
    return folder


def config_of(path, *settings: str):
    return load("ppo.yaml", [f"model.path={path}", "data.train_files=x", *settings])


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, settings, message",
    [
        (
            "qwen3",
            ["engine.compute_dtype=float32", "algorithm.rollout_is=token"],
            "needs engine.compute_dtype=bfloat16, not float32",
        ),
        (
            "qwen3",
            ["engine.compute_dtype=bfloat16"],
            "samples from a policy that differs from the trainer's: set algorithm.rollout_is=token",
        ),
    ],
)
@pytest.mark.parametrize("setting", [FP8_WEIGHTS, FP8_CACHE])
def test_settings_that_do_not_suffice(models, setting, family, settings, message):
    with pytest.raises(InputError) as error:
        check_rollout(config_of(models / family, setting, *settings), 1)
    assert str(error.value).startswith(f"{setting} {message}")


def test_experts_are_not_quantized(models):
    with pytest.raises(InputError) as error:
        check_rollout(config_of(models / "qwen3_moe", FP8_WEIGHTS, *NEEDED), 1)
    assert str(error.value).startswith(f"{FP8_WEIGHTS} does not work with mixtures of experts yet")
    with_cache = config_of(models / "qwen3_moe", FP8_CACHE, *NEEDED)
    if CAN_CACHE:
        check_rollout(with_cache, 1)
        return
    with pytest.raises(InputError, match="needs a GPU, or a CPU with AVX-512 or AMX"):
        check_rollout(with_cache, 1)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this is about CPUs")
def test_a_cache_that_vllm_cannot_read_on_a_cpu(models):
    with pytest.raises(InputError) as error:
        check_rollout(config_of(models / "narrow_heads", FP8_CACHE, *NEEDED), 1)
    if CAN_CACHE:
        assert "must be a multiple of 32, and this model's is 16" in str(error.value)
    else:
        assert "needs a GPU, or a CPU with AVX-512 or AMX" in str(error.value)
    for_gpus = ["dry_run=true", "assume.num_gpus=8", "assume.gpu_memory_gib=79"]
    check_rollout(config_of(models / "narrow_heads", FP8_CACHE, *NEEDED, *for_gpus), 8)


def test_a_vision_language_model_has_heads_too(models):
    """Its config.json has their size in the part about texts."""
    config = config_of(models / "with_images", FP8_CACHE, *NEEDED)
    with pytest.raises(InputError, match="multiple of 32, and this model's is 16"):
        check_head_size(config, FP8_CACHE)


def test_the_base_is_not_shared_in_other_precision(models):
    settings = ["model.lora.rank=8", "rollout.share_base=always", FP8_WEIGHTS, *NEEDED]
    with pytest.raises(InputError, match="rollout.quantization=fp8 stores them in 8 bits"):
        check_rollout(config_of(models / "qwen3", *settings), 1)


def test_vllm_is_told(models):
    host = Host(world_size=1, device_type="cpu", device_bytes=0, vllm_version="0.32.0")
    plain = engine_arguments(config_of(models / "qwen3", *NEEDED), host, False)
    assert "quantization" not in plain
    assert "kv_cache_dtype" not in plain
    config = config_of(models / "qwen3", FP8_WEIGHTS, FP8_CACHE, *NEEDED)
    arguments = engine_arguments(config, host, False)
    assert arguments["quantization"] == "fp8_per_channel"
    assert arguments["kv_cache_dtype"] == "fp8"


def test_the_estimate_counts_bytes(models):
    shape = read_hf_config(models / "qwen3")
    plain = config_of(models / "qwen3", *NEEDED)
    in_fp8 = config_of(models / "qwen3", FP8_WEIGHTS, FP8_CACHE, *NEEDED)
    assert kv_bytes_per_token(in_fp8, shape) == kv_bytes_per_token(plain, shape) / 2
    # Everything but embedding, output matrix and norms.
    num_outside = 2 * shape.vocab_size * shape.hidden_size
    num_in_layers = weight_bytes(plain) / 2 - num_outside
    saved = weight_bytes(plain) - weight_bytes(in_fp8)
    assert saved == pytest.approx(num_in_layers, rel=0.01)


# -- quantizing ------------------------------------------------------------------------------------


def test_each_row_has_a_scale_of_its_own():
    torch.manual_seed(0)
    rows = (torch.randn(6, 64) * torch.logspace(-3, 3, 6)[:, None]).bfloat16()
    rows[2] = 0
    codes, scales = quantize_rows(rows)
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (6, 1)
    largest = rows.double().abs().amax(1)
    assert (codes.double().abs().amax(1) == 448).tolist() == (largest > 0).tolist()
    errors = (codes.double() * scales.double() - rows.double()).abs()
    # E4M3 rounds to 4 significant bits.
    assert (errors <= rows.double().abs() * 2**-4 + largest[:, None] * 2**-16).all()


def fp8_layer(num_rows: int, width: int) -> torch.nn.Module:
    """Return a layer whose matrix of zeros is in memory as in vLLM."""
    layer = torch.nn.Module()
    codes = torch.zeros(num_rows, width, dtype=torch.float8_e4m3fn)
    layer.register_buffer("weight", codes.t())
    layer.register_buffer("weight_scale", torch.zeros(num_rows, 1))
    return layer


def matrix_of(layer: torch.nn.Module) -> torch.Tensor:
    return layer.weight.t().float() * layer.weight_scale


def test_a_part_of_a_weight_is_written_into_its_rows_alone():
    """The last four of six rows go to rows 1 to 4 of the layer."""
    torch.manual_seed(0)
    weight = torch.randn(6, 32).bfloat16()
    layer = fp8_layer(7, 32)
    part = torch.empty(6, 32, device="meta", dtype=torch.bfloat16)[2:]
    destination = torch.empty(7, 32, dtype=torch.bfloat16)[1:5]
    rows = rows_of(layer, Copy(destination, part))
    assert rows.start == 1
    rows.write(weight)
    matrix = matrix_of(layer)
    assert torch.allclose(matrix[1:5], weight[2:].float(), rtol=2**-3, atol=1e-2)
    assert matrix[[0, 5, 6]].eq(0).all()
    assert layer.weight_scale[[0, 5, 6]].eq(0).all()


def test_weights_that_no_fp8_layer_has_are_passed_on():
    """The others are written, also if they are transposed in memory."""
    torch.manual_seed(0)
    layer = fp8_layer(4, 32)
    fp8_weights = Fp8Weights.__new__(Fp8Weights)
    fp8_weights.rows = {"o": [Rows(layer, 0, torch.empty(4, 32, device="meta"))]}
    weight = torch.randn(32, 4).bfloat16().t()
    norm = torch.ones(32)
    assert [*fp8_weights.write([("o", weight), ("norm", norm)])] == [("norm", norm)]
    assert torch.allclose(matrix_of(layer), weight.float(), rtol=2**-3, atol=1e-2)


@pytest.mark.parametrize(
    "destination",
    [torch.empty(7, 32)[:, :16], torch.empty(7, 64)[:, :32], torch.empty(7 * 32)],
    ids=["half of each row", "rows with gaps", "no matrix"],
)
def test_copies_that_do_not_fill_whole_rows_are_a_layout_error(destination):
    with pytest.raises(LayoutError, match="only parts of the rows"):
        rows_of(fp8_layer(7, 32), Copy(destination, torch.empty(7, 32, device="meta")))


def test_every_row_of_every_layer_belongs_to_a_weight():
    """A fused layer gets its rows from two weights."""
    fused = fp8_layer(5, 32)
    single = fp8_layer(4, 32)
    rows_of_weights = {
        "k": [Rows(fused, 0, torch.empty(3, 32))],
        "v": [Rows(fused, 3, torch.empty(2, 32))],
        "o": [Rows(single, 0, torch.empty(4, 32))],
    }
    check_complete([fused, single], rows_of_weights)
    for name in rows_of_weights:
        others = {other: rows for other, rows in rows_of_weights.items() if other != name}
        with pytest.raises(LayoutError, match="rows in FP8 that no weight"):
            check_complete([fused, single], others)


# -- the check of the KV cache ---------------------------------------------------------------------


def share_with(log_probs: torch.Tensor) -> Share:
    """Return a share of one response of four tokens, after a prompt of two."""
    mask = torch.tensor([0.0, 0, 1, 1, 1, 1])
    fields = {"loss_mask": mask, "rollout_log_probs": log_probs}
    batch = Batch(torch.arange(6), make_cu_seqlens(torch.tensor([6])), fields)
    zeros = torch.zeros(1, dtype=torch.int64)
    return Share(batch, zeros, zeros, [], torch.ones(1, dtype=torch.bool))


def gap_on_rank(gaps: list[float]) -> str:
    """Let vLLM's log-probabilities differ by each rank's gap; return the error, or nothing."""
    trainer = torch.full((6,), -1.0)
    gap = gaps[dist.get_rank()]
    differences = torch.tensor([9.0, 9, gap, -gap, gap, -gap])  # those of the prompt do not count
    try:
        check_fp8_kv_cache(share_with(trainer + differences), trainer, dist.group.WORLD)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("gap", [0.5, 1.5, math.nan])
def test_an_fp8_cache_that_a_model_cannot_bear_is_an_error(tmp_path, gap):
    """The gap is the mean over ranks, in multiples of the bound; the first rank has none."""
    errors = on_ranks(2, tmp_path, gap_on_rank, [0.0, 2 * gap * MAX_FP8_GAP])
    assert errors[0] == errors[1]
    if gap < 1:
        assert errors[0] == ""
    else:
        assert errors[0].startswith("rollout.kv_cache_dtype=fp8: vLLM's log-probabilities of its")
        assert errors[0].endswith("set rollout.kv_cache_dtype=auto")


# -- vLLM ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(models, tmp_path_factory):
    out = tmp_path_factory.mktemp("fp8_results") / "out.json"
    cache_dtype = "fp8" if CAN_CACHE else "auto"
    launch(1, "tests/rollout/fp8_worker.py", models / "qwen3", cache_dtype, out)
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("update", ["first", "second"])
def test_vllm_holds_the_trainers_weights_in_fp8(results, update):
    errors = results[f"{update} errors"]
    assert len(errors) == 4
    assert all(0.005 < error < 0.04 for error in errors.values()), errors
    assert results[f"{update} in place"]


@pytest.mark.slow
def test_the_kv_cache_is_in_fp8(results):
    assert results["cache dtypes"] == ["fp8" if CAN_CACHE else "auto"]


@pytest.mark.slow
def test_log_probs_are_near_the_trainers(results):
    near = results["first gap"]
    assert near["tokens"] > 50
    assert 1e-3 < near["mean"] < 0.3 * near["spread"]
    # The second update sent other weights than the trainer has.
    assert results["second gap"]["mean"] > 3 * near["mean"]


@pytest.mark.slow
def test_rows_are_written_as_vllm_would(results):
    written = results["rows written"]
    assert written["tensors"] == 2 * written["layers"] > 0
    assert written["equal"] == written["tensors"]
    assert all("norm" in name or "embed" in name or "lm_head" in name for name in written["others"])
