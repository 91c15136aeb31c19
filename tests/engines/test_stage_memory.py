"""The Megatron engine's estimates per pipeline stage, counted from the weights in the files."""

import math
from pathlib import Path

import pytest

from config import load
from engines.build import engine_class
from engines.heads import Head
from engines.memory import Estimate
from engines.model.model_files import shapes_in_files
from tests.support.models import make_model

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
OUTPUT_MATRIX = "lm_head.weight"
VOCABULARY = 97
HIDDEN = 32
TOKENS = 8192
TP2 = "engine.tensor_model_parallel_size=2"
PP2 = "engine.pipeline_model_parallel_size=2"
VPP2 = "engine.virtual_pipeline_model_parallel_size=2"
EP2 = "engine.expert_model_parallel_size=2"
FULL = "engine.recompute=full"
MTP = ("model.mtp.enable=true", "model.mtp.enable_train=true")
# Activations of the llama below, in numbers per token of a layer.
ATTENTION = 3 * 32 + 3 * 16
MLP = 3 * 48


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return a directory with small models, most of four layers."""
    folder = tmp_path_factory.mktemp("stages")
    for family in ("llama", "qwen2_tied", "qwen3_moe"):
        make_model(folder / family, family, num_hidden_layers=4)
    make_model(folder / "biases", "llama_yarn", tie_word_embeddings=False)
    make_model(folder / "mimo", "mimo", num_hidden_layers=4, num_nextn_predict_layers=2)
    return folder


def make_config(model: Path, *pairs: str):
    settings = [
        f"model.path={model}",
        "data.train_files=none",
        "model_engine=megatron",
        f"data.max_tokens_per_micro_batch={TOKENS}",
    ]
    return load("sft.yaml", [*settings, *pairs])


def estimates(
    model: Path,
    *pairs: str,
    num_ranks: int = 1,
    device_type: str = "cuda",
    head: Head = Head.LOG_PROBS,
    is_trained: bool = True,
) -> list[Estimate]:
    config = make_config(model, *pairs)
    engine = engine_class("megatron")
    return engine.estimate_memory(config, num_ranks, device_type, head, is_trained)


def sizes_in_files(model: Path) -> dict[str, int]:
    """Return the number of elements of each weight."""
    return {name: math.prod(shape) for name, shape in shapes_in_files(model).items()}


def count(model: Path, *parts: str) -> int:
    """Return the number of elements of the weights whose names contain one of the parts."""
    total = 0
    for name, size in sizes_in_files(model).items():
        if any(part in name for part in parts):
            total += size
    return total


def layers(*numbers: int) -> list[str]:
    return [f"model.layers.{number}." for number in numbers]


# -- what a stage holds ----------------------------------------------------------------------------


def test_the_first_stage_holds_the_embedding_and_the_last_one_the_output_matrix(models):
    model = models / "llama"
    first, last = estimates(model, PP2, num_ranks=2)
    assert first.parameters == count(model, EMBEDDING, *layers(0, 1)) * 2
    assert last.parameters == count(model, NORM, OUTPUT_MATRIX, *layers(2, 3)) * 2
    assert first.gradients == first.parameters * 2, "in fp32"


def test_the_last_stage_has_a_copy_of_a_tied_embedding(models):
    model = models / "qwen2_tied"
    (whole,) = estimates(model)
    assert whole.parameters == sum(sizes_in_files(model).values()) * 2
    _, last = estimates(model, PP2, num_ranks=2)
    assert last.parameters == count(model, NORM, EMBEDDING, *layers(2, 3)) * 2


def test_a_critic_has_a_value_head_of_its_own_though_the_embedding_is_tied(models):
    model = models / "qwen2_tied"
    _, last = estimates(model, PP2, num_ranks=2, head=Head.VALUES)
    assert last.parameters == (count(model, NORM, *layers(2, 3)) + HIDDEN) * 2
    assert last.chunk_logits == 0
    assert last.output_matrix_gradient == 0


def test_stages_of_a_virtual_pipeline_take_turns(models):
    """The frozen layers are number 1 and 3, which are both in the second stage."""
    model = models / "llama"
    frozen = r"model.freeze=['layers\.[13]\.']"
    first, last = estimates(model, PP2, VPP2, frozen, num_ranks=2)
    assert first.gradients == count(model, EMBEDDING, *layers(0, 2)) * 4
    assert last.gradients == count(model, NORM, OUTPUT_MATRIX) * 4
    assert last.parameters == count(model, NORM, OUTPUT_MATRIX, *layers(1, 3)) * 2


def test_the_first_stages_hold_the_layers_that_are_left_over(models):
    model = models / "biases"
    first, last = estimates(model, PP2, num_ranks=2)
    assert first.parameters == count(model, EMBEDDING, *layers(0, 1, 2)) * 2
    assert last.parameters == count(model, NORM, OUTPUT_MATRIX, *layers(3, 4)) * 2


def test_layers_for_multi_token_prediction_need_an_embedding_in_the_last_stage(models):
    model = models / "mimo"
    first, last = estimates(model, PP2, *MTP, num_ranks=2)
    in_last = count(model, NORM, OUTPUT_MATRIX, EMBEDDING, ".mtp_layers.", *layers(2, 3))
    assert last.parameters == in_last * 2
    assert first.parameters == count(model, EMBEDDING, *layers(0, 1)) * 2


# -- what divides it -------------------------------------------------------------------------------


def test_tensor_parallel_ranks_divide_matrices_and_round_the_vocabulary_up(models):
    model = models / "llama"
    (rank,) = estimates(model, TP2, num_ranks=2)
    norms = count(model, "norm.weight", "layernorm.weight")
    matrices_in_layers = count(model, "_proj.weight")
    padded = (VOCABULARY + 1) * HIDDEN
    assert rank.parameters == (norms + matrices_in_layers / 2 + 2 * padded / 2) * 2
    assert rank.output_matrix_gradient == padded / 2 * 4


def test_tensor_parallel_ranks_share_biases_except_those_of_sums(models):
    """The outputs of o_proj and down_proj are sums over ranks, to which a bias is added once."""
    model = models / "biases"
    (rank,) = estimates(model, TP2, num_ranks=2)
    whole = count(model, "norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias")
    rest = sum(sizes_in_files(model).values()) - whole - count(model, EMBEDDING, OUTPUT_MATRIX)
    padded = (VOCABULARY + 1) * HIDDEN
    assert rank.parameters == (whole + rest / 2 + 2 * padded / 2) * 2


def test_tensor_parallel_ranks_divide_one_matrix_of_each_adapter(models):
    """A divides its inputs in o_proj and down_proj; elsewhere B divides its outputs."""
    rank = 4
    (whole,) = estimates(models / "llama", f"model.lora.rank={rank}")
    (divided,) = estimates(models / "llama", f"model.lora.rank={rank}", TP2, num_ranks=2)
    a_of_columns = 5 * HIDDEN
    b_of_columns = 32 + 16 + 16 + 48 + 48
    a_of_rows = 32 + 48
    b_of_rows = 2 * HIDDEN
    in_layer = a_of_columns + b_of_rows + (b_of_columns + a_of_rows) / 2
    assert whole.gradients == 4 * rank * (a_of_columns + b_of_columns + a_of_rows + b_of_rows) * 4
    assert divided.gradients == 4 * rank * in_layer * 4


def test_every_tensor_parallel_rank_has_the_inputs_of_layers_for_multi_token_prediction(models):
    model = models / "mimo"
    (rank,) = estimates(model, TP2, *MTP, num_ranks=2)
    whole = count(model, "norm.weight", "layernorm.weight", ".input_proj.")
    rest = sum(sizes_in_files(model).values()) - whole - count(model, EMBEDDING, OUTPUT_MATRIX)
    padded = (VOCABULARY + 1) * 128
    assert rank.parameters == (whole + rest / 2 + 2 * padded / 2) * 2


def test_experts_are_divided_by_expert_parallel_ranks_alone(models):
    """Each rank has every router. Expert-parallel ranks divide their optimizer's state no more."""
    model = models / "qwen3_moe"
    experts = count(model, ".experts.")
    routers = count(model, "mlp.gate.weight")
    norms = count(model, "norm.weight", "layernorm.weight")
    attention = count(model, ".self_attn.") - count(model, "q_norm", "k_norm")
    padded = 2 * (VOCABULARY + 1) * HIDDEN
    dense = routers + norms + attention / 2 + padded / 2
    (rank,) = estimates(model, TP2, EP2, num_ranks=4)
    assert rank.parameters == (dense + experts / 2) * 2
    # Two data-parallel ranks divide what is dense, and two copies of the experts.
    assert rank.optimizer == (dense / 2 + experts / 2 / 2) * 12
    (two,) = estimates(model, EP2, num_ranks=2)
    dense = sum(sizes_in_files(model).values()) - experts
    assert two.optimizer == (dense / 2 + experts / 2) * 12


@pytest.mark.parametrize("is_distributed, num_shares", [("true", 2), ("false", 1)])
@pytest.mark.parametrize("layout", ["data parallel", "context parallel"])
def test_ranks_with_the_same_weights_divide_the_state_of_a_distributed_optimizer(
    models, layout, is_distributed, num_shares
):
    pairs = [f"engine.use_distributed_optimizer={is_distributed}"]
    if layout == "context parallel":
        pairs.append("engine.context_parallel_size=2")
    (rank,) = estimates(models / "llama", *pairs, num_ranks=2)
    number = sum(sizes_in_files(models / "llama").values())
    assert rank.parameters == number * 2
    assert rank.optimizer == number * 12 / num_shares


def test_a_critic_trains_its_value_head_beside_its_adapters(models):
    (actor,) = estimates(models / "llama", "model.lora.rank=4")
    (critic,) = estimates(models / "llama", "model.lora.rank=4", head=Head.VALUES)
    assert critic.gradients == actor.gradients + HIDDEN * 4


def test_adapters_in_fp32_have_fp32_gradients_whatever_ddp_reduces_in(models):
    pairs = ["model.lora.rank=4", "engine.override_ddp_config.grad_reduce_in_fp32=false"]
    (adapters,) = estimates(models / "llama", *pairs)
    (usual,) = estimates(models / "llama", pairs[0])
    assert adapters.gradients == usual.gradients
    (in_bf16,) = estimates(models / "llama", *pairs, "model.lora.dtype=bfloat16")
    assert in_bf16.gradients == usual.gradients / 2


# -- activations and the head ----------------------------------------------------------------------


def test_the_head_is_in_the_last_stage_alone(models):
    model = models / "llama"
    teacher = [f"distill.teacher={model}", "distill.top_k=0"]
    first, last = estimates(model, PP2, *teacher, num_ranks=2)
    assert first.chunk_logits == first.output_matrix_gradient == 0
    assert first.teacher_matrix is None
    assert first.teacher_outputs is None
    assert last.chunk_logits == 2048 * VOCABULARY * (2 + 2)
    assert last.output_matrix_gradient == VOCABULARY * HIDDEN * 4
    assert last.teacher_matrix == VOCABULARY * HIDDEN * 2
    assert last.teacher_outputs > 0


@pytest.mark.parametrize("device_type, bytes_per_logit", [("cuda", 2 + 2), ("cpu", 2 + 2 + 8)])
@pytest.mark.parametrize("num_tokens, in_chunk", [(TOKENS, 2048), (100, 100)])
def test_a_chunk_has_logits_and_gradients_in_bf16(
    models, device_type, bytes_per_logit, num_tokens, in_chunk
):
    """And two copies in fp32 where they are not compiled."""
    tokens = f"data.max_tokens_per_micro_batch={num_tokens}"
    (stage,) = estimates(models / "llama", tokens, device_type=device_type)
    assert stage.chunk_logits == in_chunk * VOCABULARY * bytes_per_logit
    (divided,) = estimates(models / "llama", tokens, TP2, num_ranks=2, device_type=device_type)
    assert divided.chunk_logits == in_chunk * 49 * bytes_per_logit


def test_a_frozen_output_matrix_has_no_gradient(models):
    (stage,) = estimates(models / "llama", "model.freeze=[lm_head]")
    assert stage.output_matrix_gradient == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_model_that_is_not_trained_keeps_one_layer(models, recompute):
    setting = f"engine.recompute={recompute}"
    first, last = estimates(models / "llama", PP2, setting, num_ranks=2, is_trained=False)
    in_layer = TOKENS * 2 * (4 * HIDDEN + ATTENTION + MLP)
    assert first.activations == in_layer
    assert last.activations == in_layer + TOKENS * 2 * HIDDEN, "and the input of the head"


@pytest.mark.parametrize("sequence_parallel, num_shares", [("true", 2), ("false", 1)])
def test_recomputing_layers_keep_inputs_that_sequence_parallel_ranks_divide(
    models, sequence_parallel, num_shares
):
    pairs = [TP2, FULL, f"engine.sequence_parallel={sequence_parallel}"]
    (stage,) = estimates(models / "llama", *pairs, num_ranks=2)
    hidden = TOKENS * 2 * HIDDEN
    in_layer = 4 * hidden / num_shares + TOKENS * 2 * (ATTENTION + MLP) / 2
    assert stage.activations == 4 * hidden / num_shares + in_layer + hidden


@pytest.mark.parametrize(
    "schedule, waiting",
    # Of four layers. Without virtual stages, the first stage keeps two layers of two micro-batches.
    # With them it has begun five passes over one layer before the first backward pass.
    [([PP2], (2 * 2, 2)), ([PP2, VPP2], (5, 3))],
    ids=["stages", "virtual stages"],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_keeps_what_waits_for_its_backward_pass(models, schedule, waiting, recompute):
    """Recomputation keeps the inputs of the same layers, and computes one layer at a time."""
    stages = estimates(models / "llama", *schedule, f"engine.recompute={recompute}", num_ranks=2)
    hidden = TOKENS * 2 * HIDDEN
    in_layer = 4 * hidden + TOKENS * 2 * (ATTENTION + MLP)
    of_head = (0, hidden)
    for stage, num_layers, head_input in zip(stages, waiting, of_head, strict=True):
        kept = num_layers * in_layer
        if recompute == "full":
            kept = num_layers * hidden + in_layer
        assert stage.activations == kept + head_input


def test_ranks_that_share_sequences_divide_the_tokens(models):
    (alone,) = estimates(models / "llama", "data.max_tokens_per_micro_batch=2000")
    pairs = ["data.max_tokens_per_micro_batch=4000", "engine.context_parallel_size=2"]
    (sharing,) = estimates(models / "llama", *pairs, num_ranks=2)
    assert sharing.chunk_logits == alone.chunk_logits == 2000 * VOCABULARY * 4
    # In each layer, a rank has the keys and values of all tokens, and half of its own once more.
    of_keys = 2000 * 2 * 4 * 2 * 1.5 * 16
    assert sharing.activations == alone.activations + of_keys


def test_layers_for_multi_token_prediction_keep_activations_in_the_last_stage(models):
    model = models / "mimo"
    without = estimates(model, PP2, num_ranks=2)
    with_mtp = estimates(model, PP2, *MTP, num_ranks=2)
    assert with_mtp[0].activations == without[0].activations
    in_layer = without[0].activations / 4  # two layers of two micro-batches
    assert with_mtp[1].activations == without[1].activations + 2 * in_layer


def test_activations_of_experts_have_the_width_of_an_expert(models):
    """Gate, up, their product and the gate's activation, for each of three experts of 24."""
    (stage,) = estimates(models / "qwen3_moe")
    in_attention = 3 * 4 * 32 + 3 * 2 * 32
    in_layer = 4 * HIDDEN + in_attention + 3 * (2 * HIDDEN + 4 * 24)
    assert stage.activations == TOKENS * 2 * (4 * in_layer + HIDDEN)


def test_groups_that_share_long_sequences_have_data_parallel_ranks_alone(models):
    """Sequences need four ranks, but each stage has two."""
    pairs = ["engine.context_parallel_size=auto", f"data.max_length={4 * TOKENS}"]
    (four,) = estimates(models / "llama", *pairs, num_ranks=4)
    first, _ = estimates(models / "llama", *pairs, PP2, num_ranks=4)

    def kept(num_keys: float) -> float:
        """Return the bytes of four layers with the keys and values of so many tokens per token."""
        numbers = 4 * HIDDEN + 3 * 32 + (1 + 2 * num_keys) * 16 + MLP
        return TOKENS * 2 * 4 * numbers

    assert four.activations == kept(4.5) + TOKENS * 2 * HIDDEN
    assert first.activations == kept(2.5), "two layers of two micro-batches"


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, weight, with_moments", [("bfloat16", 2, 14), ("float32", 4, 12)])
def test_a_checkpoint_holds_frozen_weights_without_moments(models, dtype, weight, with_moments):
    model = models / "llama"
    config = make_config(model, "model.freeze=[mlp]", f"engine.compute_dtype={dtype}")
    frozen = count(model, ".mlp.")
    trained = sum(sizes_in_files(model).values()) - frozen
    num_bytes = engine_class("megatron").checkpoint_bytes(config)
    assert num_bytes == frozen * weight + trained * with_moments


@pytest.mark.parametrize("dtype, bytes_per_number", [("float32", 4 + 8), ("bfloat16", 2 + 8 + 4)])
def test_a_checkpoint_of_adapters_leaves_out_the_model(models, dtype, bytes_per_number):
    pairs = ["model.lora.rank=4", f"model.lora.dtype={dtype}"]
    config = make_config(models / "llama", *pairs)
    widths = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)
    expected = 4 * 4 * widths * bytes_per_number
    assert engine_class("megatron").checkpoint_bytes(config) == expected
