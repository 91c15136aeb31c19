"""LoRA adapters on the Megatron engine, against PEFT in a plain loop around transformers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from engines.megatron.adapters import Adapter
from engines.megatron.engine import MegatronEngine
from engines.model import lora
from engines.model.flops import count_flops
from engines.model.hf import build_on_meta, read_hf_config
from tests.engines.megatron_checks import (
    BOUND,
    ROUNDED_BOUND,
    check_answers_by_dp_rank,
    check_export,
    check_memory_estimate,
    check_recomputation,
    plain_reference,
)
from tests.engines.megatron_worker import (
    AUTO,
    AUX,
    BF16,
    BUCKETS,
    CP2,
    FULL,
    LORA,
    NO_SP,
    OVERLAP,
    PADDED,
    PP2,
    REPLICATED,
    SHORT,
    TP2,
    VPP2,
    Case,
    CaseTable,
    build,
    evaluate,
    register,
    train,
    work,
)
from tests.support.cases import case_params, needs
from tests.support.plain import column, plain_answers, worst
from tests.support.training import digest, gather, make_batch, make_loss

pytestmark = pytest.mark.slow

SOME = "model.lora.target_modules=[q_proj,v_proj,up_proj,down_proj]"
ATTENTION = "model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
DROPOUT = "model.lora.dropout=0.5"
VALUE_HEAD = "output_layer.weight"  # Megatron's name, which export_adapters() keeps
NUM_STEPS = 4  # B is 0 at first: A has a gradient from the second step on

# -- training --------------------------------------------------------------------------------------

EXACT: CaseTable = {
    (1, "lora one"): Case("qwen3", LORA, NUM_STEPS),
    (1, "lora tied full"): Case("qwen2_tied", f"{LORA} {FULL}", NUM_STEPS),
    (2, "lora tp2"): Case("qwen2_tied", f"{LORA} {TP2}", NUM_STEPS),
    (2, "lora tp2 no sp"): Case("qwen3", f"{LORA} {TP2} {NO_SP}", NUM_STEPS),
    (2, "lora tp2 some"): Case("llama", f"{LORA} {SOME} {TP2} {PADDED}", NUM_STEPS),
    (2, "lora pp2 tied full"): Case("qwen2_tied", f"{LORA} {PP2} {FULL}", NUM_STEPS),
    (2, "lora pp2 vpp2"): Case("mistral", f"{LORA} {PP2} {VPP2}", NUM_STEPS),
    (2, "lora cp2"): Case("qwen3", f"{LORA} {CP2}", NUM_STEPS),
    (2, "lora dp2"): Case("llama", f"{LORA} {SOME} {OVERLAP} {BUCKETS}", NUM_STEPS),
    (2, "lora yarn tp2"): Case("llama_yarn", f"{LORA} {TP2}", NUM_STEPS),
    (2, "lora dp2 replicated"): Case("qwen3", f"{LORA} {REPLICATED}", NUM_STEPS),
    (2, "lora critic tp2"): Case("qwen2_tied", f"{LORA} {TP2}", NUM_STEPS, critic=True),
    (2, "lora moe tp2"): Case("qwen3_moe", f"{LORA} {ATTENTION} {TP2} {AUX}", NUM_STEPS),
    (2, "auto lora"): Case("qwen3", f"{LORA} {AUTO} {SHORT}", NUM_STEPS),
    (4, "lora tp2 pp2 full"): Case("qwen3", f"{LORA} {TP2} {PP2} {FULL}", NUM_STEPS),
}
ROUNDED: CaseTable = {
    (1, "lora bf16"): Case("qwen3", f"{LORA} {BF16}"),
    (2, "lora bf16 tp2"): Case("qwen3", f"{LORA} {BF16} {TP2}"),
    (2, "lora bf16 dtype dp2"): Case("qwen3", f"{LORA} model.lora.dtype=bfloat16 {BF16}"),
    (2, "lora critic bf16 pp2"): Case("qwen2_tied", f"{LORA} {PP2} {BF16}", critic=True),
}
ALL = EXACT | ROUNDED
register(ALL)


@pytest.mark.parametrize("num_ranks, name", case_params(EXACT))
def test_training_of_adapters_equals_peft(megatron_results, megatron_folder, num_ranks, name):
    case = EXACT[num_ranks, name]
    result = megatron_results[num_ranks][name]
    title = f"{num_ranks} {name}"
    plain = plain_reference(megatron_folder, case, result)
    for key in ("loss", "entropy", "grad_norm"):
        assert worst(column(result["steps"], key), column(plain.steps, key)) < BOUND, key
    adapter = load_file(megatron_folder / f"{title} adapter.safetensors")
    merged = load_file(megatron_folder / f"{title}.safetensors")
    trained = dict(adapter)
    if case.critic:
        trained["lm_head.weight"] = trained.pop(VALUE_HEAD)
    assert trained.keys() == plain.weights.keys()
    for hf_name, expected in plain.weights.items():
        assert (trained[hf_name] - expected).abs().max() < BOUND, hf_name
    # Otherwise the comparison is void.
    for hf_name, matrix in adapter.items():
        assert "lora_B" not in hf_name or matrix.abs().max() > 100 * BOUND, hf_name
    digests = result["adapter digests"]
    assert len(set(map(str, digests))) == 1
    assert set(digests[0][1]) == adapter.keys()
    for of_rank in merged["answers"][:, 0]:
        # NaN marks another rank's tokens.
        assert (of_rank - plain.answers).nan_to_num().abs().max() < 1e-4


@pytest.mark.parametrize("num_ranks, name", case_params(EXACT))
def test_flops_count_adapters(megatron_results, megatron_folder, num_ranks, name):
    """A frozen matrix needs no gradient of its own: 4 FLOPs per parameter and token, not 6."""
    case = EXACT[num_ranks, name]
    hf_config = read_hf_config(megatron_folder / case.family)
    hf = build_on_meta(hf_config, torch.float32, case.head)
    layers, output_matrix, attention = (flops / 6 for flops in count_flops(hf, hf_config))
    adapter = load_file(megatron_folder / f"{num_ranks} {name} adapter.safetensors")
    # The value head is counted as the output matrix.
    num_trained = sum(matrix.numel() for key, matrix in adapter.items() if key != VALUE_HEAD)
    frozen_flops = 4 * (8 * layers + 4 * output_matrix)
    trained_flops = 6 * (8 * num_trained + 34 * attention)
    assert megatron_results[num_ranks][name]["flops"] == frozen_flops + trained_flops


@pytest.mark.parametrize("num_ranks, name", case_params(EXACT))
def test_the_base_stays_and_adapters_are_merged(megatron_results, megatron_folder, num_ranks, name):
    """Without its adapters the model is the frozen one, to the bit."""
    case = EXACT[num_ranks, name]
    title = f"{num_ranks} {name}"
    adapter = load_file(megatron_folder / f"{title} adapter.safetensors")
    merged = load_file(megatron_folder / f"{title}.safetensors")
    base = load_file(megatron_folder / f"{title} base.safetensors")
    files = load_file(megatron_folder / case.family / "model.safetensors")
    if case.critic:
        files["lm_head.weight"] = merged["lm_head.weight"]
    assert base.keys() == files.keys() | {"answers"}
    assert merged.keys() == base.keys()
    for hf_name, weight in files.items():
        assert torch.equal(base[hf_name], weight), hf_name
        a = adapter_matrix(adapter, hf_name, "A")
        b = adapter_matrix(adapter, hf_name, "B")
        scale = 2  # alpha / rank
        assert (merged[hf_name] - weight - scale * b @ a).abs().max() < 1e-6, hf_name
    if not case.has_experts and not case.critic:
        expected = plain_answers(megatron_folder / case.family, files)
        check_answers_by_dp_rank(base["answers"], expected, case)


def adapter_matrix(adapter: dict[str, Tensor], hf_name: str, kind: str) -> Tensor:
    """Return a matrix of a weight's adapter; one that is zero if there is none."""
    name = hf_name.replace(".weight", f".lora_{kind}.weight")
    return adapter.get(name, torch.zeros(1, 1))


@pytest.mark.parametrize("num_ranks, name", case_params(ROUNDED))
def test_bfloat16_adapters_are_near(megatron_results, megatron_folder, num_ranks, name):
    case = ROUNDED[num_ranks, name]
    result = megatron_results[num_ranks][name]
    steps = plain_reference(megatron_folder, case, result).steps
    loss_error = worst(column(result["steps"], "loss"), column(steps, "loss"))
    assert 10 * BOUND < loss_error < ROUNDED_BOUND
    norm_error = worst(column(result["steps"], "grad_norm"), column(steps, "grad_norm"))
    assert norm_error < 5 * ROUNDED_BOUND
    dtype = torch.bfloat16 if "lora.dtype=bfloat16" in case.settings else torch.float32
    adapter = load_file(megatron_folder / f"{num_ranks} {name} adapter.safetensors")
    assert {matrix.dtype for matrix in adapter.values()} == {dtype}


# -- what holds for every case ---------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks, name", case_params(ALL))
def test_export_is_complete_and_the_same_on_all_ranks(
    megatron_results, megatron_folder, num_ranks, name
):
    result = megatron_results[num_ranks][name]
    check_export(megatron_folder, num_ranks, name, ALL[num_ranks, name], result)


@pytest.mark.parametrize("num_ranks, name", case_params(ALL))
def test_estimate_of_memory_is_what_there_is(megatron_results, megatron_folder, num_ranks, name):
    result = megatron_results[num_ranks][name]
    check_memory_estimate(megatron_folder, num_ranks, ALL[num_ranks, name], result)


@pytest.mark.parametrize("num_ranks, name", case_params(ALL))
def test_attention_runs_again_in_backward_where_it_is_recomputed(megatron_results, num_ranks, name):
    check_recomputation(ALL[num_ranks, name], megatron_results[num_ranks][name])


@needs((2, "auto lora"))
def test_groups_of_ranks_are_of_the_size_that_sequences_need(megatron_results):
    assert megatron_results[2]["auto lora"]["group sizes"] == [1, 2]


# -- gradients that do not arrive ------------------------------------------------------------------

LAYOUTS_WITH_A_FIRST_STAGE = ("", PP2, f"{PP2} {VPP2}")


@work(2)
def lost_gradients(folder: Path, this_device: torch.device) -> dict[str, list[str]]:
    """Recompute a first stage whose embedding needs no gradient; return errors by layout."""
    errors = {}
    for layout in LAYOUTS_WITH_A_FIRST_STAGE:
        engine = build_with_adapters(folder, this_device, f"{layout} {FULL}")
        for model in engine.models:
            if model.pre_process:
                model.embedding._forward_hooks.clear()
        try:
            train(engine, [0], Case("qwen2_tied"))
        except RuntimeError as error:
            errors[layout] = gather(str(error))
    return errors


def build_with_adapters(folder: Path, this_device: torch.device, settings: str) -> MegatronEngine:
    return build(MegatronEngine, folder / "qwen2_tied", this_device, f"{LORA} {settings}")


@needs((2, "lost_gradients"))
def test_adapters_that_get_no_gradient_are_reported(megatron_results):
    errors = megatron_results[2]["lost_gradients"]
    assert errors.keys() == set(LAYOUTS_WITH_A_FIRST_STAGE)
    for of_ranks in errors.values():
        for error in of_ranks:
            assert "the gradient of every adapter is exactly 0" in error


# -- an adapter's files ----------------------------------------------------------------------------


@work(2)
def continued_adapter(folder: Path, this_device: torch.device) -> list[list[str]]:
    """Build an engine from the files of another one's adapter; return both digests per rank."""
    first = build_with_adapters(folder, this_device, TP2)
    train(first, range(2), Case("qwen2_tied"))
    exported = dict(first.export_adapter())
    files = folder / "adapter"
    if dist.get_rank() == 0:
        files.mkdir()
        lora.write(exported.items(), first.config.model.lora, "a base", files)
    dist.barrier()
    second = build_with_adapters(folder, this_device, f"{PP2} model.lora.adapter_path={files}")
    return gather([digest(dict(second.export_adapter())), digest(exported)])


@needs((2, "continued_adapter"))
def test_an_adapter_goes_on_from_files(megatron_results):
    of_first_rank, of_second_rank = megatron_results[2]["continued_adapter"]
    continued, exported = of_first_rank
    assert continued == exported
    assert of_second_rank == of_first_rank


# -- dropout ---------------------------------------------------------------------------------------

DROPOUT_LAYOUTS = (TP2, f"{TP2} {NO_SP}", f"{TP2} {NO_SP} {FULL}", f"{TP2} {FULL}")


@work(2)
def dropout(folder: Path, this_device: torch.device) -> dict[str, dict]:
    """Train two steps with dropout on several layouts, and on the first one again."""
    results = {
        layout: train_with_dropout(folder, this_device, layout) for layout in DROPOUT_LAYOUTS
    }
    results["again"] = train_with_dropout(folder, this_device, TP2)
    return results


def train_with_dropout(folder: Path, this_device: torch.device, layout: str) -> dict:
    """Return steps, answers, and digests of what tensor-parallel ranks each hold whole."""
    engine = build_with_adapters(folder, this_device, f"{layout} {DROPOUT}")
    steps = train(engine, range(2), Case("qwen2_tied"))
    whole = {}
    for name, parameter in engine.models[0].named_parameters():
        if parameter.requires_grad and not parameter.tensor_model_parallel:
            whole[name] = parameter
    answers = evaluate(engine, Case("qwen2_tied"))[0].nan_to_num().tolist()
    return {"steps": steps, "whole": gather(digest(whole)), "answers": answers}


@needs((2, "dropout"), (2, "lora tp2"))
def test_dropout_of_adapters(megatron_results):
    """Dropout changes training, but is the same in recomputation and when a run is repeated.

    What tensor-parallel ranks each hold whole stays equal on them.
    """
    results = megatron_results[2]["dropout"]
    with_dropout = results[TP2]["steps"]
    without = megatron_results[2]["lora tp2"]["steps"][:2]
    assert with_dropout[0]["loss"] == without[0]["loss"], "B is 0"
    for step, step_without in zip(with_dropout, without):
        assert abs(step["grad_norm"] / step_without["grad_norm"] - 1) > 0.01
    assert results["again"] == results[TP2]
    for layout in (TP2, f"{TP2} {NO_SP}"):
        recomputed = column(results[f"{layout} {FULL}"]["steps"], "grad_norm")
        kept = column(results[layout]["steps"], "grad_norm")
        assert recomputed == pytest.approx(kept, rel=BOUND)
        assert len(set(results[layout]["whole"])) == 1


@work(2)
def dropout_masks(folder: Path, this_device: torch.device) -> dict[str, list[list[str]]]:
    """Return digests of the dropout masks of one step, by layout: a list for each rank.

    Data-parallel ranks train on the same batch, so that their masks have the same shapes.
    """
    batch = make_batch(0)
    results = {}
    for layout in ("", CP2, PP2):
        engine = build_with_adapters(folder, this_device, f"{layout} {DROPOUT}")
        masks = []
        dropped = Adapter.dropped

        def dropped_and_noted(adapter: Adapter, x: Tensor) -> Tensor:
            result = dropped(adapter, x)
            masks.append(digest({"mask": (result == 0).float()}))
            return result

        Adapter.dropped = dropped_and_noted
        engine.train_batch(batch, make_loss(len(batch.input_ids)), 0)
        Adapter.dropped = dropped
        results[layout] = gather(masks)
    return results


@needs((2, "dropout_masks"))
@pytest.mark.parametrize("layout", ["", CP2, PP2])
def test_ranks_drop_different_units(megatron_results, layout):
    """Data-parallel, context-parallel and pipeline-parallel ranks draw masks of their own."""
    first, second = megatron_results[2]["dropout_masks"][layout]
    assert len(first) == len(second)
    assert len(first) > 10
    assert len(set(first)) == len(first), "every call draws a mask of its own"
    assert not set(first) & set(second)
