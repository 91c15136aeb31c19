"""Training with the Megatron engine on 1, 2 and 4 ranks, in every layout.

In fp32 the results must equal those of the FSDP2 engine on one rank or, for families and features
that are compared otherwise, those of a plain loop around transformers. All cases for one number of
ranks share one launch of megatron_worker.py.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

from engines.fsdp.engine import FSDPEngine
from tests.engines.megatron_checks import (
    BOUND,
    EXPERTS_BOUND,
    ROUNDED_BOUND,
    check_answers_by_dp_rank,
    check_export,
    check_memory_estimate,
    check_recomputation,
    distance,
    make_config,
    plain_reference,
)
from tests.engines.megatron_worker import (
    AUTO,
    AUX,
    BF16,
    BUCKETS,
    COSTLY_SHARING,
    CP2,
    EP2,
    EP4,
    EPS,
    FEW_STEPS,
    FULL,
    MORE_STEPS,
    NO_SP,
    OVERLAP,
    PADDED,
    PP2,
    REPLICATED,
    SELECTIVE,
    SHORT,
    SHORTER,
    SHORTEST,
    TP2,
    TP4,
    VPP2,
    Case,
    CaseTable,
    keys,
    register,
)
from tests.support.cases import CaseKey, case_params, needs
from tests.support.plain import column, plain_answers, worst

pytestmark = pytest.mark.slow

# -- the same results as FSDP2 ---------------------------------------------------------------------

FAMILIES = ("qwen2_tied", "qwen3", "llama")
NEVER_COMPILE = "torch_compile=never"
REFERENCES: CaseTable = {}
for family in FAMILIES:
    REFERENCES[1, f"reference {family}"] = Case(
        family, NEVER_COMPILE, MORE_STEPS, engine=FSDPEngine
    )
    REFERENCES[1, f"reference {family} critic"] = Case(
        family, NEVER_COMPILE, critic=True, engine=FSDPEngine
    )

POLICIES: CaseTable = {
    (1, "one"): Case("qwen3"),
    (1, "one padded"): Case("llama", PADDED),
    (1, "one replicated"): Case("qwen2_tied", REPLICATED),
    (2, "tp2"): Case("qwen2_tied", TP2, MORE_STEPS),
    (2, "tp2 no sp"): Case("qwen3", f"{TP2} {NO_SP}"),
    (2, "tp2 padded"): Case("llama", f"{TP2} {PADDED}"),
    (2, "tp2 selective"): Case("llama", f"{TP2} {SELECTIVE}"),
    (2, "tp2 full"): Case("qwen3", f"{TP2} {FULL}"),
    (2, "pp2"): Case("llama", PP2),
    (2, "pp2 tied"): Case("qwen2_tied", PP2, MORE_STEPS),
    (2, "pp2 full"): Case("qwen3", f"{PP2} {FULL}"),
    (2, "pp2 padded"): Case("qwen2_tied", f"{PP2} {PADDED}"),
    (2, "pp2 vpp2"): Case("qwen3", f"{PP2} {VPP2}", MORE_STEPS),
    (2, "cp2"): Case("llama", CP2, MORE_STEPS),
    (2, "cp2 padded"): Case("qwen3", f"{CP2} {PADDED}"),
    (2, "dp2"): Case("qwen3", "", MORE_STEPS),
    (2, "dp2 replicated"): Case("qwen3", REPLICATED),
    (2, "dp2 uneven"): Case("llama", uneven=True),
    (2, "dp2 overlap"): Case("qwen2_tied", f"{OVERLAP} {BUCKETS}"),
    (2, "dp2 replicated overlap"): Case("llama", f"{REPLICATED} {OVERLAP} {BUCKETS}"),
    (2, "auto"): Case("qwen3", f"{AUTO} {SHORT}", MORE_STEPS),
    (2, "auto padded full"): Case("llama", f"{AUTO} {SHORT} {PADDED} {FULL}"),
    (4, "tp2 pp2"): Case("qwen3", f"{TP2} {PP2}", MORE_STEPS),
    (4, "tp4"): Case("llama", TP4),
    (4, "tp2 cp2"): Case("qwen2_tied", f"{TP2} {CP2}", MORE_STEPS),
    (4, "pp2 cp2"): Case("llama", f"{PP2} {CP2}"),
    (4, "pp2 vpp2 dp2"): Case("qwen2_tied", f"{PP2} {VPP2}", uneven=True),
    (4, "auto"): Case("llama", f"{AUTO} {COSTLY_SHARING} {SHORTER} {OVERLAP} {BUCKETS}"),
    (4, "auto again"): Case("llama", f"{AUTO} {COSTLY_SHARING} {SHORTER} {OVERLAP} {BUCKETS}"),
    (4, "auto padded"): Case(
        "qwen2_tied", f"{AUTO} {COSTLY_SHARING} {SHORTEST} {PADDED} {REPLICATED}"
    ),
    (4, "auto tp2 full"): Case("qwen3", f"{AUTO} {SHORT} {TP2} {FULL}"),
    (4, "auto pp2"): Case("qwen2_tied", f"{AUTO} {SHORT} {PP2}"),
    (4, "auto pp2 vpp2"): Case("qwen3", f"{AUTO} {SHORT} {PP2} {VPP2}"),
}
CRITICS: CaseTable = {
    (2, "critic tp2"): Case("qwen2_tied", TP2, critic=True),
    (2, "critic pp2"): Case("qwen2_tied", PP2, critic=True),
    (2, "critic cp2"): Case("qwen3", CP2, critic=True),
    (2, "auto critic"): Case("qwen2_tied", f"{AUTO} {SHORT} {REPLICATED}", critic=True),
    (4, "critic tp2 pp2"): Case("llama", f"{TP2} {PP2}", critic=True),
}
EQUAL_TO_FSDP = POLICIES | CRITICS


def reference_of(case: Case) -> CaseKey:
    """Return the FSDP2 run that a case is compared with."""
    return 1, f"reference {case.family}" + " critic" * case.critic


def reference_of_key(num_ranks: int, name: str) -> list[CaseKey]:
    return [reference_of(EQUAL_TO_FSDP[num_ranks, name])]


@pytest.mark.parametrize("num_ranks, name", case_params(EQUAL_TO_FSDP, reference_of_key))
def test_training_equals_fsdp(megatron_results, megatron_folder, num_ranks, name):
    case = EQUAL_TO_FSDP[num_ranks, name]
    result = megatron_results[num_ranks][name]
    _, reference_name = reference_of(case)
    reference = megatron_results[1][reference_name]
    steps = reference["steps"][: case.steps]
    for key in ("loss", "entropy", "grad_norm", "lr"):
        assert worst(column(result["steps"], key), column(steps, key)) < BOUND, key
    assert set(column(result["steps"], "skipped")) == {0.0}
    assert result["flops"] == reference["flops"]

    if len(steps) == len(reference["steps"]):
        weights = load_file(megatron_folder / f"{num_ranks} {name}.safetensors")
        expected = load_file(megatron_folder / f"1 {reference_name}.safetensors")
        assert weights.keys() == expected.keys()
        for key in weights.keys() - {"answers"}:
            assert distance(weights[key], expected[key]) < BOUND, key


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=needs((1, f"reference {family}"))) for family in FAMILIES],
)
def test_the_reference_could_tell(megatron_results, megatron_folder, family):
    """The loss falls, steps are clipped, and weights move much further than the bound."""
    steps = megatron_results[1][f"reference {family}"]["steps"]
    first_with_same_batch = steps[(MORE_STEPS - 1) % 4]
    assert steps[-1]["loss"] < 0.95 * first_with_same_batch["loss"]
    assert min(column(steps, "grad_norm")) > 0.5
    after = load_file(megatron_folder / f"1 reference {family}.safetensors")
    before = load_file(megatron_folder / family / "model.safetensors")
    moved = [distance(after[name], weight) for name, weight in before.items()]
    assert min(moved) > 100 * BOUND


@pytest.mark.parametrize("num_ranks, name", case_params(POLICIES))
def test_every_rank_gets_log_probs(megatron_results, megatron_folder, num_ranks, name):
    """For its own share, equal to what transformers computes with the exported weights."""
    case = POLICIES[num_ranks, name]
    weights = load_file(megatron_folder / f"{num_ranks} {name}.safetensors")
    answers = weights.pop("answers")
    expected = plain_answers(megatron_folder / case.family, weights)
    check_answers_by_dp_rank(answers, expected, case)


@pytest.mark.parametrize("num_ranks, name", case_params(CRITICS, reference_of_key))
def test_every_rank_gets_values(megatron_results, megatron_folder, num_ranks, name):
    case = CRITICS[num_ranks, name]
    _, reference_name = reference_of(case)
    reference = load_file(megatron_folder / f"1 {reference_name}.safetensors")
    expected = reference["answers"][0, 0]
    answers = load_file(megatron_folder / f"{num_ranks} {name}.safetensors")["answers"][:, 0]
    assert not answers.isnan().all(0).any()
    # NaN marks another rank's tokens. Only with dynamic context parallelism do ranks differ.
    assert answers.isnan().any() == (AUTO in case.settings)
    assert (answers - expected).nan_to_num().abs().max() < 1e-4
    assert (expected != 0).sum() > 100


@needs((4, "auto"), (4, "auto again"))
def test_the_same_bits_again(megatron_results):
    assert megatron_results[4]["auto"] == megatron_results[4]["auto again"]


# -- bf16 ------------------------------------------------------------------------------------------

ROUNDED: CaseTable = {
    (1, "bf16"): Case("qwen3", BF16),
    (2, "bf16 tp2"): Case("qwen3", f"{BF16} {TP2}"),
    (2, "bf16 dp2"): Case("qwen3", BF16),
    (2, "bf16 dp2 replicated"): Case("qwen3", f"{BF16} {REPLICATED}"),
    (2, "bf16 cp2"): Case("qwen3", f"{BF16} {CP2}"),
}


@needs((1, "reference qwen3"))
@pytest.mark.parametrize("num_ranks, name", case_params(ROUNDED))
def test_bfloat16_is_near(megatron_results, num_ranks, name):
    """With bf16 weights and fp32 masters: off by rounding, and by no more after some steps."""
    steps = megatron_results[num_ranks][name]["steps"]
    expected = megatron_results[1]["reference qwen3"]["steps"][:FEW_STEPS]
    assert len(steps) == FEW_STEPS
    assert worst(column(steps, "loss"), column(expected, "loss")) < ROUNDED_BOUND
    norm_error = worst(column(steps, "grad_norm"), column(expected, "grad_norm"))
    assert 10 * BOUND < norm_error < 5 * ROUNDED_BOUND


# -- the same results as a plain loop --------------------------------------------------------------

# Embedding and output matrix, which may be one; the first of four layers; and, in all layers,
# matrices whose biases are trained.
FREEZE = f"model.freeze=['embed_tokens|lm_head','layers[.]0[.]','[qkv]_proj.weight'] {EPS}"
# All but the experts of layers 2 and 3.
FREEZE_ALL_BUT_EXPERTS = f"model.freeze=['embed|head|norm|attn|mlp.gate','layers[.][01][.]'] {EPS}"

FROZEN: CaseTable = {
    (2, "frozen tp2 full"): Case("qwen2_tied", f"{FREEZE} {TP2} {FULL} {REPLICATED}"),
    (2, "frozen pp2 tied"): Case("qwen2_tied", f"{FREEZE} {PP2} {FULL}"),
    (2, "frozen dp2"): Case("qwen2_tied", f"{FREEZE} {OVERLAP} {BUCKETS}"),
    (2, "frozen critic pp2"): Case("llama", f"model.freeze=[.] {EPS} {PP2}", critic=True),
    (2, "frozen moe ep2"): Case("qwen3_moe", f"{FREEZE_ALL_BUT_EXPERTS} {EP2} {AUX}"),
}
EQUAL_TO_PLAIN: CaseTable = FROZEN | {
    (1, "moe"): Case("qwen3_moe", AUX),
    (1, "moe padded"): Case("qwen3_moe_raw", f"{AUX} {PADDED}"),
    (1, "mistral"): Case("mistral"),
    (1, "mixtral padded"): Case("mixtral", PADDED),
    (2, "moe dp2"): Case("qwen3_moe"),
    (2, "moe tp2"): Case("qwen3_moe", f"{TP2} {AUX}"),
    (2, "moe ep2"): Case("qwen3_moe", f"{EP2} {AUX}", MORE_STEPS),
    (2, "moe ep2 uneven"): Case("qwen3_moe_raw", f"{EP2} {AUX} {REPLICATED}", uneven=True),
    (2, "moe tp2 ep2 padded"): Case("qwen3_moe", f"{TP2} {EP2} {AUX} {PADDED}"),
    (2, "moe cp2 ep2"): Case("qwen3_moe_raw", f"{CP2} {EP2}"),
    (2, "moe pp2 full"): Case("qwen3_moe", f"{PP2} {FULL} {AUX}"),
    (2, "critic moe ep2"): Case("qwen3_moe", EP2, MORE_STEPS, critic=True),
    (2, "zero rows tp2"): Case("zero_rows", f"{TP2} {EPS}"),
    (2, "mistral cp2"): Case("mistral", CP2),
    (2, "mistral padded"): Case("mistral", f"{PP2} {PADDED}"),
    (2, "mistral pp2 vpp2"): Case("mistral", f"{PP2} {VPP2}"),
    (2, "yarn tp2"): Case("llama_yarn", f"{TP2} {EPS}"),
    (2, "yarn tp2 no sp padded"): Case("llama_yarn", f"{TP2} {NO_SP} {PADDED} {EPS}"),
    (2, "yarn pp2 full"): Case("llama_yarn", f"{PP2} {FULL} {EPS}"),
    (2, "windows tp2"): Case("qwen3_windows", f"{TP2} {EPS}"),
    (2, "windows cp2 padded"): Case("qwen3_windows", f"{CP2} {PADDED} {EPS}"),
    (2, "mixtral tp2 ep2"): Case("mixtral", f"{TP2} {EP2} {AUX}"),
    (2, "mixtral pp2"): Case("mixtral", f"{PP2} {AUX}"),
    (2, "auto moe ep2"): Case("qwen3_moe", f"{AUTO} {SHORT} {EP2}"),
    (2, "auto windows padded"): Case("qwen3_windows", f"{AUTO} {SHORT} {PADDED} {EPS}"),
    (4, "moe ep2 dp4"): Case("qwen3_moe", f"{EP2} {AUX}"),
    (4, "moe tp2 ep4"): Case("qwen3_moe", f"{TP2} {AUX} {REPLICATED} {EP4}"),
    (4, "moe tp2 pp2 ep2"): Case("qwen3_moe_raw", f"{TP2} {PP2} {EP2} {AUX}"),
    (4, "auto moe tp2 ep4"): Case("qwen3_moe", f"{AUTO} {SHORT} {TP2} {EP4}"),
}


@pytest.mark.parametrize("num_ranks, name", case_params(EQUAL_TO_PLAIN))
def test_training_equals_a_plain_loop(megatron_results, megatron_folder, num_ranks, name):
    case = EQUAL_TO_PLAIN[num_ranks, name]
    result = megatron_results[num_ranks][name]
    plain = plain_reference(megatron_folder, case, result)
    metrics = ["loss", "entropy", "grad_norm"]
    if case.has_aux_loss:
        metrics.append("router_aux_loss")
    for key in metrics:
        assert worst(column(result["steps"], key), column(plain.steps, key)) < BOUND, key
    assert ("router_aux_loss" in result["steps"][0]) is case.has_aux_loss

    weights = load_file(megatron_folder / f"{num_ranks} {name}.safetensors")
    answers = weights.pop("answers")[:, 0]
    assert weights.keys() == plain.weights.keys()
    bound = EXPERTS_BOUND if case.has_experts else BOUND
    for hf_name, expected in plain.weights.items():
        assert distance(weights[hf_name], expected) < bound, hf_name
    num_answers = 0
    for of_rank in answers:
        is_answered = ~of_rank.isnan()
        num_answers += int(is_answered.sum())
        if is_answered.any():
            assert (of_rank - plain.answers)[is_answered].abs().max() < bound
    assert num_answers >= len(plain.answers)
    assert plain.answers.std() > 0.03


@pytest.mark.parametrize("num_ranks, name", case_params(FROZEN))
def test_frozen_parameters_stay_to_the_bit(megatron_results, megatron_folder, num_ranks, name):
    """With weight decay, and without optimizer state. All others move."""
    case = FROZEN[num_ranks, name]
    after = load_file(megatron_folder / f"{num_ranks} {name}.safetensors")
    before = load_file(megatron_folder / case.family / "model.safetensors")
    patterns = make_config(megatron_folder, *keys(case.settings)).model.freeze
    frozen = set()
    for pattern in patterns:
        frozen |= {n for n in before if re.search(pattern, n)}
    if case.critic:
        before["lm_head.weight"] = torch.zeros(1, 32)
        frozen.remove("lm_head.weight")
    unchanged = {n for n, weight in before.items() if torch.equal(weight, after[n])}
    assert unchanged == frozen
    assert len(frozen) > 10
    if TP2 not in case.settings:  # Both tensor-parallel ranks hold the norms.
        num_trained = sum(weight.numel() for n, weight in before.items() if n not in frozen)
        sizes = megatron_results[num_ranks][name]["bytes"]
        assert sum(optimizer for *_, optimizer in sizes) == 8 * num_trained


# -- mixtures of experts ---------------------------------------------------------------------------


@needs((2, "moe dp2"), (2, "moe ep2"))
def test_auxiliary_loss_makes_a_difference(megatron_results):
    """To the gradient, and to which expert a token goes to: otherwise the comparison is void."""
    without = megatron_results[2]["moe dp2"]["steps"]
    with_aux = megatron_results[2]["moe ep2"]["steps"]
    assert without[0]["loss"] == pytest.approx(with_aux[0]["loss"], rel=BOUND)
    assert abs(without[0]["grad_norm"] / with_aux[0]["grad_norm"] - 1) > 0.1
    assert min(column(with_aux, "router_aux_loss")) > 1.01
    of_same_batch = [with_aux[step]["router_aux_loss"] for step in (0, 4)]
    assert of_same_batch[1] < of_same_batch[0]


ROUNDED_EXPERTS: CaseTable = {(2, "moe bf16 ep2"): Case("qwen3_moe", f"{EP2} {AUX} {BF16}")}


@needs((2, "moe bf16 ep2"), (2, "moe ep2"))
def test_bfloat16_experts_are_near(megatron_results):
    steps = megatron_results[2]["moe bf16 ep2"]["steps"]
    expected = megatron_results[2]["moe ep2"]["steps"][:FEW_STEPS]
    bounds = {
        "loss": ROUNDED_BOUND,
        "router_aux_loss": ROUNDED_BOUND,
        "grad_norm": 5 * ROUNDED_BOUND,
    }
    for key, bound in bounds.items():
        assert 10 * BOUND < worst(column(steps, key), column(expected, key)) < bound, key


# -- what holds for every case ---------------------------------------------------------------------

ALL: CaseTable = EQUAL_TO_FSDP | ROUNDED | EQUAL_TO_PLAIN | ROUNDED_EXPERTS
DYNAMIC = [key for key, case in ALL.items() if AUTO in case.settings]
register(REFERENCES | ALL)


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


@pytest.mark.parametrize("num_ranks, name", case_params(DYNAMIC))
def test_groups_of_ranks_are_of_the_size_that_sequences_need(megatron_results, num_ranks, name):
    """One rank where that is enough; for the longest, all ranks that model parallelism leaves."""
    settings = ALL[num_ranks, name].settings
    has_model_parallel = TP2 in settings or PP2 in settings
    largest = num_ranks // 2 if has_model_parallel else num_ranks
    sizes = [size for size in (1, 2, 4) if size <= largest]
    assert megatron_results[num_ranks][name]["group sizes"] == sizes
