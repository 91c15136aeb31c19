"""Limits of lengths and batches, and terms of memory, that both engines share."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf
from torch import nn

from config import InputError, load
from engines.context_parallel import check_batch_size, check_micro_batch_cap, sequence_limit
from engines.memory import Estimate
from engines.memory_terms import teacher_outputs_bytes
from engines.model.freeze import check_something_is_trained

NEEDED = ["model.path=m", "data.train_files=t"]
MEGATRON = "model_engine=megatron"
AUTO = "engine.context_parallel_size=auto"
TOKENS = "data.max_tokens_per_micro_batch=100"


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
    ],
)
def test_a_rank_keeps_a_teachers_outputs_for_its_share_of_the_responses(pairs, num_shares):
    settings = ["data.train_batch_size=6", "rollout.n=4", "rollout.max_tokens=70"]
    settings += ["data.max_prompt_length=30", "algorithm.distill.teacher=there"]
    config = make_config(*settings, "algorithm.distill.top_k=5", *pairs, script="ppo")
    num_tokens = 6 * 4 * (30 + 70) / num_shares
    assert teacher_outputs_bytes(config, 8) == num_tokens * (5 * 4 + 6 * 4)


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
