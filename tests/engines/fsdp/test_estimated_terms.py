"""The terms of the FSDP engine's estimate of memory, counted by hand for a small model."""

from pathlib import Path

import pytest

from config import load
from engines.fsdp.engine import FSDPEngine
from engines.heads import Head
from engines.memory import Estimate
from engines.model.model_files import shapes_in_files
from tests.support.models import make_image_model, make_model

# Of the llama below.
VOCABULARY = 97
HIDDEN = 32
INTERMEDIATE = 48
NUM_LAYERS = 3
MATRIX = VOCABULARY * HIDDEN  # the embedding, and the output matrix
ROOT = 2 * MATRIX + HIDDEN
ATTENTION = 2 * HIDDEN * 32 + 2 * HIDDEN * 16
MLP = 3 * HIDDEN * INTERMEDIATE
NORMS = 2 * HIDDEN
LAYER = ATTENTION + MLP + NORMS
# Inputs and outputs of the seven linear layers of a decoder layer.
WIDTHS = 2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48)

TOKENS = 4096
BF16_WEIGHTS = "engine.param_dtype=bfloat16"
COMPILED = "engine.torch_compile=always"
FEW_TOKENS = ("data.max_tokens_per_micro_batch=2", "engine.activation_checkpointing=true")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("terms") / "llama", "llama")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("terms") / "mixture", "qwen3_moe")


def make_config(model: Path, *pairs: str):
    settings = [
        f"model.path={model}",
        "data.train_files=none",
        "data.max_length=1024",
        f"data.max_tokens_per_micro_batch={TOKENS}",
        "engine.torch_compile=never",
    ]
    return load("sft.yaml", [*settings, *pairs])


def estimate(
    model: Path,
    *pairs: str,
    num_ranks: int = 1,
    head: Head = Head.LOG_PROBS,
    is_trained: bool = True,
) -> Estimate:
    config = make_config(model, *pairs)
    (result,) = FSDPEngine.estimate_memory(config, num_ranks, "cpu", head, is_trained)
    return result


# -- tokens ----------------------------------------------------------------------------------------


def test_ranks_that_share_sequences_each_hold_a_part_of_the_tokens(model):
    """They exchange heads, of which the keys have two, so nothing is held twice."""
    one_chunk = f"engine.log_prob_chunk_size={TOKENS}"
    alone = estimate(model, one_chunk, num_ranks=2)
    shared = estimate(model, one_chunk, "engine.context_parallel_size=2", num_ranks=2)
    assert not alone.is_after_backward
    assert shared.activations == alone.activations / 2
    assert shared.chunk_logits == alone.chunk_logits / 2


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("num_tokens, in_chunk", [(TOKENS, 2048), (100, 100)])
def test_a_chunk_has_logits_and_gradients_and_is_no_longer_than_a_micro_batch(
    model, compiled, num_tokens, in_chunk
):
    """Both in bf16; if they are not compiled, there are two copies in fp32 as well."""
    setting = COMPILED if compiled else "engine.torch_compile=never"
    pairs = [setting, f"data.max_tokens_per_micro_batch={num_tokens}"]
    bytes_per_logit = 2 + 2 + (0 if compiled else 4 + 4)
    chunk_logits = estimate(model, *pairs).chunk_logits
    assert chunk_logits == in_chunk * VOCABULARY * bytes_per_logit


def test_layers_that_are_not_compiled_keep_norms_in_fp32_and_the_gates_activation(model):
    compiled = estimate(model, COMPILED).activations
    plain = estimate(model).activations
    in_layer = 2 * HIDDEN * (4 + 4) + INTERMEDIATE * 2
    assert plain - compiled == TOKENS * NUM_LAYERS * in_layer


def test_a_layer_keeps_inputs_heads_and_the_parts_of_its_mlp(model):
    """In bf16: residuals and norms; queries, output and keys, values; gate, up and product."""
    numbers = 4 * HIDDEN + 3 * 32 + 3 * 16 + 3 * INTERMEDIATE
    assert estimate(model, COMPILED).activations == TOKENS * NUM_LAYERS * numbers * 2


def test_a_layer_of_experts_keeps_copies_for_each_expert_of_a_token(mixture):
    """Three experts of 24 each have gate, up, product, the token's copy and their output."""
    in_attention = 3 * 4 * 32 + 3 * 2 * 32
    numbers = 4 * HIDDEN + in_attention + 3 * (3 * 24 + 2 * HIDDEN)
    assert estimate(mixture, COMPILED).activations == TOKENS * 3 * numbers * 2


def test_fp8_spares_no_inputs_of_experts(mixture):
    """Its linear layers are those of attention alone; experts keep the compute dtype."""
    in_bf16 = estimate(mixture, COMPILED)
    in_fp8 = estimate(mixture, COMPILED, "engine.float8=tensorwise")
    assert in_fp8.activations == in_bf16.activations


def test_images_keep_no_activations_at_the_end_of_the_backward_pass(tmp_path):
    model = make_image_model(tmp_path / "model", "qwen2_5_vl")
    end = estimate(model, "model.images=true", *FEW_TOKENS, num_ranks=2)
    assert end.is_after_backward
    assert end.image_activations == 0


# -- the output matrix -----------------------------------------------------------------------------


def test_a_critic_has_no_logits(model):
    critic = estimate(model, head=Head.VALUES)
    assert critic.chunk_logits == 0
    assert critic.output_matrix_gradient == 0
    assert critic.parameters == (3 * LAYER + ROOT - MATRIX + HIDDEN) * 4


def test_a_frozen_output_matrix_has_no_gradient(model):
    trained = estimate(model, num_ranks=2)
    frozen = estimate(model, "model.freeze=[lm_head]", num_ranks=2)
    assert trained.output_matrix_gradient == MATRIX * 4
    assert frozen.output_matrix_gradient == 0
    assert trained.unreduced_gradients == MATRIX * 2 + LAYER * (2 + 4)
    assert frozen.unreduced_gradients == LAYER * (2 + 4)


# -- weights and gradients -------------------------------------------------------------------------


def test_frozen_weights_are_gathered_but_have_no_gradients(model):
    frozen = estimate(model, "model.freeze=[mlp]", num_ranks=2)
    assert frozen.gathered_weights == (ROOT + 2 * LAYER) * 2
    assert frozen.unreduced_gradients == MATRIX * 2 + (LAYER - MLP) * (2 + 4)
    assert frozen.gradients == (ROOT + NUM_LAYERS * (LAYER - MLP)) * 4 / 2


def test_at_the_end_frozen_weights_outside_layers_have_no_gradients(tmp_path):
    model = make_model(tmp_path / "model", "llama", vocab_size=4096)
    matrix = 4096 * HIDDEN
    frozen = estimate(model, *FEW_TOKENS, "model.freeze=[lm_head]", num_ranks=2)
    assert frozen.is_after_backward
    assert frozen.unreduced_gradients == (matrix + HIDDEN) * (2 + 4)
    assert frozen.gathered_weights == (2 * matrix + HIDDEN) * 2
    assert frozen.output_matrix_gradient == 0


@pytest.mark.parametrize("size, gathers_frozen", [(1, False), (2, True)])
def test_only_adapters_are_gathered_if_each_rank_has_the_frozen_weights(
    model, size, gathers_frozen
):
    rank = 4
    pairs = [f"model.lora.rank={rank}", f"engine.fsdp_size={size}"]
    result = estimate(model, *pairs, num_ranks=2)
    in_layer = rank * WIDTHS
    in_root = 0
    if gathers_frozen:
        in_layer += LAYER
        in_root = ROOT
    assert result.gathered_weights == (in_root + 2 * in_layer) * 2
    frozen_bytes = (NUM_LAYERS * LAYER + ROOT) * 2
    assert result.parameters == (frozen_bytes + NUM_LAYERS * rank * WIDTHS * 4) / size


@pytest.mark.parametrize("pairs", [(), FEW_TOKENS], ids=["at the start", "at the end"])
def test_without_resharding_all_weights_stay_gathered(tmp_path, pairs):
    model = make_model(tmp_path / "model", "llama", vocab_size=4096)
    zero2 = "engine.reshard_after_forward=false"
    result = estimate(model, zero2, *pairs, num_ranks=2)
    assert result.is_after_backward == (pairs == FEW_TOKENS)
    root = 2 * 4096 * HIDDEN + HIDDEN
    assert result.gathered_weights == (root + NUM_LAYERS * LAYER) * 2


def test_states_in_host_memory_are_marked_and_do_not_count(model):
    plain = estimate(model, num_ranks=2)
    on_host = estimate(model, "engine.cpu_offload=true", num_ranks=2)
    assert {"parameters, host", "gradients, host", "optimizer, host"} < on_host.rows().keys()
    states = plain.parameters + plain.gradients + plain.optimizer
    assert on_host.device_total == plain.device_total - states


def test_with_cpu_offload_sums_of_replicas_wait_beside_the_gradients(tmp_path):
    """Weights on the host do not wait for the last micro-batch; FSDP keeps the sums of layers."""
    model = make_model(tmp_path / "model", "llama", vocab_size=4096)
    pairs = ["engine.cpu_offload=true", "engine.fsdp_size=2", *FEW_TOKENS]
    result = estimate(model, *pairs, num_ranks=4)
    assert result.is_after_backward
    in_root = 2 * 4096 * HIDDEN + HIDDEN
    in_layers = NUM_LAYERS * LAYER
    assert result.unreduced_gradients == in_root * (2 + 4) + in_layers / 2 * 4
    assert result.gradients == (in_root + in_layers) / 2 * 4


@pytest.mark.parametrize("setting", [(), ("engine.sync_each_micro_batch=false",)])
def test_sums_of_replicas_in_the_dtype_of_the_weights_are_the_gradients(tmp_path, setting):
    """Only sums in another dtype, here in fp32 for weights in bf16, wait beside the gradients."""
    model = make_model(tmp_path / "model", "llama", vocab_size=4096)
    pairs = ["engine.fsdp_size=2", *FEW_TOKENS, *setting]
    same_dtype = estimate(model, *pairs, num_ranks=4)
    other_dtype = estimate(model, *pairs, BF16_WEIGHTS, num_ranks=4)
    assert same_dtype.is_after_backward
    assert other_dtype.is_after_backward
    in_root = 2 * 4096 * HIDDEN + HIDDEN
    being_reduced = in_root * (2 + 4)
    assert same_dtype.unreduced_gradients == being_reduced
    assert other_dtype.unreduced_gradients == being_reduced + NUM_LAYERS * LAYER / 2 * 4


# -- the optimizer ---------------------------------------------------------------------------------


def test_muon_keeps_one_moment_of_matrices_in_layers(model):
    result = estimate(model, "optim.name=muon")
    matrices = NUM_LAYERS * (ATTENTION + MLP)
    others = ROOT + NUM_LAYERS * NORMS
    assert result.rows()["optimizer"] == matrices * 4 + others * 2 * 4


def test_muon_keeps_both_moments_of_experts(mixture):
    """They are stacked in parameters with three dimensions, which AdamW updates."""
    one_moment = 0
    two_moments = 0
    for name, shape in shapes_in_files(mixture).items():
        number = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if ".layers." in name and len(shape) == 2 and ".experts." not in name:
            one_moment += number
        else:
            two_moments += number
    assert estimate(mixture, "optim.name=muon").optimizer == one_moment * 4 + two_moments * 8


@pytest.mark.parametrize(
    "pairs, bytes_per_number",
    [
        ((), 4 + 4),
        ((BF16_WEIGHTS,), 2 + 2),
        ((BF16_WEIGHTS, "optim.state_dtype=float32"), 4 + 4),
        (("optim.state_dtype=bfloat16",), 2 + 2),
    ],
)
def test_moments_have_the_dtype_of_the_weights_or_their_own(model, pairs, bytes_per_number):
    number = NUM_LAYERS * LAYER + ROOT
    assert estimate(model, *pairs).optimizer == number * bytes_per_number


# -- roles -----------------------------------------------------------------------------------------


def test_a_model_that_is_not_trained_has_no_terms_of_training(model):
    teacher = [f"distill.teacher={model}", "distill.top_k=0"]
    trained = estimate(model, *teacher, num_ranks=2)
    reference = estimate(model, *teacher, num_ranks=2, is_trained=False)
    only_in_training = (
        "gradients",
        "optimizer",
        "unreduced_gradients",
        "output_matrix_gradient",
        "teacher_matrix",
        "teacher_outputs",
    )
    for term in only_in_training:
        assert getattr(trained, term) > 0, term
        assert getattr(reference, term) is None, term
    assert reference.parameters == trained.parameters
    assert reference.gathered_weights == trained.gathered_weights
    assert reference.chunk_logits == trained.chunk_logits


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pairs, expected",
    [
        ((), (NUM_LAYERS * LAYER + ROOT) * (4 + 8)),
        (("optim.state_dtype=bfloat16",), (NUM_LAYERS * LAYER + ROOT) * (4 + 4)),
        # Frozen weights are saved, but have no moments.
        (
            ("model.freeze=[mlp]",),
            (NUM_LAYERS * LAYER + ROOT) * 4 + (NUM_LAYERS * (LAYER - MLP) + ROOT) * 8,
        ),
        # Beside adapters, they are not saved.
        (("model.lora.rank=4",), NUM_LAYERS * 4 * WIDTHS * (4 + 8)),
    ],
    ids=["whole", "bf16 moments", "frozen", "lora"],
)
def test_a_checkpoint_holds_weights_and_moments(model, pairs, expected):
    assert FSDPEngine.checkpoint_bytes(make_config(model, *pairs)) == expected


def test_a_checkpoint_of_a_critic_has_a_value_head_for_an_output_matrix(model):
    whole = FSDPEngine.checkpoint_bytes(make_config(model))
    critic = FSDPEngine.checkpoint_bytes(make_config(model), Head.VALUES)
    assert whole - critic == (MATRIX - HIDDEN) * (4 + 8)
