"""Limits of lengths and batches, and terms of memory, that both engines share."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from transformers import LlamaConfig

from config import InputError, load
from engines.context_parallel import check_batch_size, check_micro_batch_cap, sequence_limit
from engines.memory import Estimate
from engines.memory_terms import (
    keys_per_token,
    root_and_layer,
    teacher_matrix_bytes,
    teacher_outputs_bytes,
)
from engines.model.freeze import check_something_is_trained
from tests.support.models import make_model

NEEDED = ["model.path=m", "data.train_files=t"]
MEGATRON = "model_engine=megatron"
AUTO = "engine.context_parallel_size=auto"
TOKENS = "data.max_tokens_per_micro_batch=100"
KEYS_OF_TWO_HEADS = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)


def make_config(*pairs: str, script: str = "sft"):
    return load(f"{script}.yaml", [*NEEDED, *pairs])


@pytest.mark.parametrize(
    "pairs, world_size, limit, reason",
    [
        ([], 8, 100, ""),
        (["engine.context_parallel_size=2"], 8, 100, ""),
        ([AUTO], 1, 100, " on each of 1 ranks"),
        ([AUTO], 7, 400, " on each of 4 ranks"),
        ([AUTO], 8, 800, " on each of 8 ranks"),
        ([AUTO, MEGATRON, "engine.tensor_model_parallel_size=2"], 8, 400, " on each of 4 ranks"),
        ([AUTO, MEGATRON, "engine.pipeline_model_parallel_size=4"], 8, 200, " on each of 2 ranks"),
    ],
)
def test_the_longest_sequence_fills_the_largest_group_of_ranks(pairs, world_size, limit, reason):
    found = sequence_limit(make_config(TOKENS, *pairs), world_size)
    assert found == (limit, f"data.max_tokens_per_micro_batch=100{reason}")


def test_every_data_parallel_rank_has_a_sequence():
    config = make_config("data.train_batch_size=4")
    check_batch_size(config, 4)
    with pytest.raises(InputError, match="^data.train_batch_size=4 is less than the 5 data-par"):
        check_batch_size(config, 5)
    check_batch_size(make_config("data.train_batch_size=4", AUTO), 5)
    responses = make_config("data.train_batch_size=2", "rollout.n=3", script="ppo")
    check_batch_size(responses, 6)
    with pytest.raises(InputError, match="^data.train_batch_size=2 x rollout.n=3 is less than"):
        check_batch_size(responses, 7)


def test_a_full_micro_batch_is_not_padded_beyond_the_cap():
    check_micro_batch_cap(make_config(TOKENS), 4)
    with pytest.raises(InputError, match="_micro_batch=100 must be a multiple of 8: this layout"):
        check_micro_batch_cap(make_config(TOKENS), 8)


# -- memory ----------------------------------------------------------------------------------------

OFFLOADED = {"parameters": True, "optimizer": True, "reference": False}
ESTIMATE = Estimate(
    parameters=1,
    gradients=2,
    optimizer=4,
    activations=8,
    chunk_logits=16,
    output_matrix_gradient=32,
    unreduced_gradients=64,
    teacher_matrix=128,
    teacher_outputs=256,
)


@pytest.mark.parametrize(
    "offload, device_type, is_trained, offloaded",
    [
        (OFFLOADED, "cuda", True, 1 + 4),
        (OFFLOADED | {"parameters": False}, "cuda", True, 4),
        (OFFLOADED, "cpu", True, None),
        (OFFLOADED, "cuda", False, None),
        (OFFLOADED | {"reference": True}, "cuda", False, 1),
    ],
)
def test_a_role_waits_in_host_memory_with_what_it_has(offload, device_type, is_trained, offloaded):
    config = OmegaConf.create({"offload": offload})
    estimate = ESTIMATE.for_role(config, device_type, is_trained)
    assert estimate.offloaded == offloaded
    in_training = 2 + 4 + 32 + 64 + 128 if is_trained else 0
    assert estimate.device_total == 1 + 8 + 16 + in_training
    assert estimate.teacher_outputs == (256 if is_trained else None)


def test_what_never_leaves_the_host_is_not_offloaded():
    on_host = replace(ESTIMATE, is_on_host=True)
    config = OmegaConf.create({"offload": OFFLOADED})
    assert on_host.for_role(config, "cuda", True).offloaded == 0
    assert ESTIMATE.for_role(OmegaConf.create({}), "cuda", True).offloaded is None


@pytest.mark.parametrize(
    "pairs, num_shares",
    [
        ([], 8),
        (["engine.context_parallel_size=2"], 4),
        ([MEGATRON, "engine.tensor_model_parallel_size=4"], 2),
        ([MEGATRON, "engine.pipeline_model_parallel_size=2"], 4),
        # A dry run may have fewer ranks than the layout needs.
        ([MEGATRON, "engine.tensor_model_parallel_size=16"], 1),
    ],
)
def test_a_rank_keeps_a_teachers_outputs_for_its_share_of_the_responses(pairs, num_shares):
    settings = ["data.train_batch_size=6", "rollout.n=4", "rollout.max_tokens=70"]
    settings += ["data.max_prompt_length=30", "algorithm.distill.teacher=there"]
    config = make_config(*settings, "algorithm.distill.top_k=5", *pairs, script="ppo")
    num_tokens = 6 * 4 * (30 + 70) / num_shares
    assert teacher_outputs_bytes(config, 8) == num_tokens * (5 * 4 + 6 * 4)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> Path:
    """Return a directory with two models of different widths and vocabularies."""
    folder = tmp_path_factory.mktemp("teachers")
    make_model(folder / "wide", "llama", hidden_size=64, vocab_size=97)
    make_model(folder / "narrow", "llama", hidden_size=32, vocab_size=128)
    return folder


def distilling(*pairs: str):
    settings = ["data.train_batch_size=6", "rollout.n=4", "rollout.max_tokens=70"]
    settings += ["data.max_prompt_length=30", "engine.compute_dtype=bfloat16"]
    return make_config(*settings, "algorithm.distill.top_k=0", *pairs, script="ppo")


def test_hidden_states_of_several_teachers_are_as_wide_as_the_widest(teachers):
    names = f"{{a: {teachers / 'wide'}, b: {teachers / 'narrow'}}}"
    config = distilling(f"algorithm.distill.teachers={names}")
    assert teacher_outputs_bytes(config, 3) == 6 * 4 * (30 + 70) / 3 * 64 * 2
    assert teacher_matrix_bytes(config) == (97 * 64 + 128 * 32) * 2


def test_a_student_that_teaches_itself_has_a_second_output_matrix(teachers):
    config = distilling("algorithm.distill.teacher=self", f"model.path={teachers / 'narrow'}")
    assert teacher_outputs_bytes(config, 1) == 6 * 4 * (30 + 70) * 32 * 2
    assert teacher_matrix_bytes(config) == 128 * 32 * 2
    top_k = distilling("algorithm.distill.teacher=self", "algorithm.distill.top_k=3")
    assert teacher_matrix_bytes(top_k) is None


def test_episodes_are_as_long_as_all_of_their_turns(teachers):
    pairs = ["algorithm.distill.teacher=there", "algorithm.distill.top_k=2"]
    config = distilling(*pairs, "rollout.max_episode_tokens=500")
    assert teacher_outputs_bytes(config, 1) == 6 * 4 * 500 * (2 * 4 + 3 * 4)


@pytest.mark.parametrize(
    "cp_size, longest, num_ranks, num_keys",
    [
        ("auto", 100, 8, 1),
        ("auto", 101, 8, 2.5),
        ("auto", 200, 8, 2.5),
        ("auto", 201, 8, 4.5),
        ("auto", 400, 8, 4.5),
        ("auto", 400, 3, 2.5),  # of three ranks, two can form a group
        ("auto", 400, 1, 1),
        (2, 100, 8, 2.5),
        (1, 100, 8, 1),
    ],
)
def test_ranks_keep_the_keys_that_their_group_gathers(cp_size, longest, num_ranks, num_keys):
    pairs = [f"engine.context_parallel_size={cp_size}", f"data.max_length={longest}"]
    config = make_config(TOKENS, *pairs)
    assert keys_per_token(config, KEYS_OF_TWO_HEADS, num_ranks, lambda size: True) == num_keys


@pytest.mark.parametrize("cp_size, num_keys", [(1, 1), (2, 1), (4, 2), (8, 4)])
def test_heads_of_keys_are_repeated_for_more_ranks_than_there_are_heads(cp_size, num_keys):
    config = make_config(TOKENS, f"engine.context_parallel_size={cp_size}")
    assert keys_per_token(config, KEYS_OF_TWO_HEADS, 8, lambda size: False) == num_keys


def test_only_the_given_parameters_of_layers_are_counted():
    layers = [nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(3, 4)]
    root = nn.Parameter(torch.zeros(7))
    everything = [root, *nn.ModuleList(layers).parameters()]
    assert root_and_layer(everything, layers) == (7, 3 * 5 + 5)
    matrices = [root, *(layer.weight for layer in layers[::2])]
    assert root_and_layer(matrices, layers) == (7, 3 * 4)
    assert root_and_layer([root], []) == (7, 0)


# -- frozen parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trained, pairs, message",
    [
        (["norm", "mtp_layers"], ["model.mtp.detach_encoder=true"], None),
        (["norm"], ["model.mtp.detach_encoder=true"], "nothing to train for the loss of the MTP"),
        (["norm"], [], None),
        ([], [], "leaves nothing to train"),
    ],
)
def test_every_loss_has_something_to_train(trained, pairs, message):
    hf = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("norm", "mtp_layers")})
    for name, module in hf.items():
        module.requires_grad_(name in trained)
    config = make_config("model.freeze=[x]", *pairs)
    if message is None:
        check_something_is_trained(config, hf)
        return
    with pytest.raises(InputError, match=message):
        check_something_is_trained(config, hf)
