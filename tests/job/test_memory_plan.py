"""The estimate of a run's memory beside the device's, and the advice when it does not fit."""

import sys

import pytest
import torch
from omegaconf import OmegaConf

from config import InputError, load
from engines.build import engine_class
from engines.heads import Head
from engines.memory import GIB
from job.hardware import Hardware
from job.heartbeat import Heartbeat, is_out_of_memory
from job.memory_plan import MemoryPlan, candidates, parameters_on_device, resident_bytes
from rl.models import role_configs
from rollout.vllm.capacity import ASLEEP_BYTES, AwakeMemory
from tests.support.models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def sft_config(model, *settings: str):
    needed = [f"model.path={model}", "data.train_files=x", "data.max_length=64"]
    return load("sft.yaml", [*needed, "data.max_tokens_per_micro_batch=4096", *settings])


def ppo_config(model, *settings: str):
    needed = [f"model.path={model}", "data.train_files=x", "algorithm.adv_estimator=gae"]
    lengths = ["data.max_prompt_length=32", "rollout.max_tokens=32"]
    return load("ppo.yaml", [*needed, *lengths, "data.max_tokens_per_micro_batch=4096", *settings])


def make_plan(roles, capacity: float) -> MemoryPlan:
    return MemoryPlan(roles, Hardware(2, "cuda", int(capacity)))


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_parts_are_offloaded_from_a_device_with_memory_of_its_own(model, device_type):
    config = ppo_config(model)
    engine = engine_class(config.model_engine)
    (estimate,) = engine.estimate_memory(config, 2, device_type)
    expected = None
    if device_type == "cuda":
        expected = estimate.parameters + estimate.optimizer
    assert estimate.offloaded == expected


def test_there_is_a_warning_from_95_percent_of_the_device(model):
    roles = {None: sft_config(model)}
    _, num_bytes = make_plan(roles, 0).largest()
    assert not make_plan(roles, 0).warnings(), "a CPU has no memory of its own"
    assert not make_plan(roles, num_bytes / 0.94).warnings()
    (warning,) = make_plan(roles, num_bytes / 0.96).warnings()
    assert f"needs about {num_bytes / GIB:.1f} GiB" in warning
    assert "data.max_tokens_per_micro_batch=2048" in warning


def test_savings_are_what_the_changed_setting_saves_and_the_largest_comes_first(model):
    plan = make_plan({None: sft_config(model)}, GIB)
    before = plan.estimate(None, sft_config(model)).device_total
    savings = plan.savings()
    assert len(savings) >= 3
    for saving in savings:
        after = plan.estimate(None, sft_config(model, saving.setting)).device_total
        assert before - after == pytest.approx(saving.num_bytes)
    sizes = [saving.num_bytes for saving in savings]
    assert sizes == sorted(sizes, reverse=True)
    settings = {saving.setting.split("=")[0] for saving in savings}
    assert "engine.activation_checkpointing" in settings
    spared = make_plan({None: sft_config(model, "engine.activation_checkpointing=true")}, GIB)
    assert all("activation_checkpointing" not in saving.setting for saving in spared.savings())


def test_another_role_counts_unless_it_waits_in_host_memory(model):
    kept = role_configs(ppo_config(model, "offload.optimizer=false", "offload.parameters=false"))
    moved = role_configs(ppo_config(model))
    _, with_critic = make_plan(kept, GIB).largest()
    role, alone = make_plan(moved, GIB).largest()
    assert f" for the {role}, by the estimate" in make_plan(moved, GIB).describe()
    other = "critic" if role == "actor" else "actor"
    estimate = make_plan(moved, GIB).estimate(other, moved[other])
    assert with_critic - alone == estimate.parameters + estimate.optimizer
    settings = {saving.setting for saving in make_plan(kept, GIB).savings()}
    assert {"offload.parameters=true", "offload.optimizer=true"} < settings
    assert "rollout.gpu_memory_utilization below 0.6" in make_plan(kept, GIB).advice()


def test_a_role_saves_nothing_by_leaving_while_it_computes(model):
    """Each role that waits is counted, and not the one that needs the most memory."""
    config = ppo_config(model, "offload.optimizer=false", "algorithm.use_kl_loss=true")
    plan = make_plan(role_configs(config), GIB)
    for largest, other in (("actor", "critic"), ("critic", "actor")):
        (saving,) = plan.offload_savings(largest)
        assert saving.setting == "offload.optimizer=true"
        assert saving.num_bytes == plan.estimate(other, plan.roles[other]).optimizer


def test_a_critic_is_estimated_with_the_head_of_a_critic(model):
    roles = role_configs(ppo_config(model))
    plan = make_plan(roles, GIB)
    kind = engine_class("fsdp")
    for role, head in (("actor", Head.LOG_PROBS), ("critic", Head.VALUES)):
        (expected,) = kind.estimate_memory(roles[role], 2, "cuda", head, True)
        assert plan.estimate(role, roles[role]) == expected
    assert plan.estimate("actor", roles["actor"]) != plan.estimate("critic", roles["actor"])
    (expected,) = kind.estimate_memory(roles["actor"], 2, "cuda", Head.LOG_PROBS, False)
    assert plan.estimate("reference", roles["actor"]) == expected


def test_the_savings_of_all_roles_with_one_setting_are_added_up(model):
    settings = ["offload.reference=false", "algorithm.use_kl_loss=true"]
    plan = make_plan(role_configs(ppo_config(model, *settings, f"reward.model.path={model}")), GIB)
    (saving,) = plan.offload_savings("actor")
    frozen = [plan.estimate(role, plan.roles[role]) for role in ("reference", "reward model")]
    assert saving.setting == "offload.reference=true"
    assert saving.num_bytes == sum(estimate.parameters for estimate in frozen)


def test_the_stage_of_a_pipeline_that_needs_the_most_memory_counts(model):
    """Mostly the first, which holds the activations of the most micro-batches; here the last."""
    settings = ["model_engine=megatron", "engine.pipeline_model_parallel_size=2"]
    settings += ["engine.recompute=full", "engine.log_prob_chunk_size=4096"]
    config = sft_config(model, *settings)
    kind = engine_class("megatron")
    first, last = kind.estimate_memory(config, 2, "cuda", Head.LOG_PROBS, True)
    assert last.device_total > first.device_total
    assert make_plan({None: config}, GIB).largest() == (None, last.device_total)


@pytest.mark.parametrize(
    "script, pairs, settings",
    [
        ("sft", [], {"engine.activation_checkpointing", "engine.cpu_offload"}),
        ("sft", ["engine.cpu_offload=true"], {"engine.activation_checkpointing"}),
        ("sft", ["model_engine=megatron"], {"engine.recompute"}),
        ("sft", ["model_engine=megatron", "engine.recompute=full"], set()),
        ("ppo", ["engine.activation_checkpointing=true"], set()),
        (
            "sft",
            ["engine.float8=tensorwise", "engine.float8_cache_weights=true"],
            {"engine.activation_checkpointing", "engine.float8_cache_weights"},
        ),
        (
            "sft",
            ["engine.float8=tensorwise", "engine.float8_all_gather=true"],
            {"engine.activation_checkpointing"},
        ),
    ],
)
def test_only_settings_that_the_run_does_not_have_are_proposed(model, script, pairs, settings):
    config = (sft_config if script == "sft" else ppo_config)(model, *pairs)
    always = {"data.max_tokens_per_micro_batch", "engine.log_prob_chunk_size"}
    proposed = candidates(config)
    assert proposed.keys() == settings | always
    assert proposed["data.max_tokens_per_micro_batch"] == "2048"
    short = OmegaConf.merge(config, {"data": {"max_tokens_per_micro_batch": 100}})
    assert candidates(short)["data.max_tokens_per_micro_batch"] == "64", "the longest row fits"


@pytest.mark.parametrize("num_tokens, proposed", [(1000, "500"), (200, "128"), (128, "128")])
def test_a_proposed_micro_batch_holds_both_answers_of_a_pair(model, num_tokens, proposed):
    needed = [f"model.path={model}", "data.train_files=x", "data.max_length=64"]
    config = load("dpo.yaml", [*needed, f"data.max_tokens_per_micro_batch={num_tokens}"])
    assert candidates(config)["data.max_tokens_per_micro_batch"] == proposed


def test_vllm_asleep_counts_while_the_actor_computes(model):
    config = ppo_config(model, "algorithm.adv_estimator=grpo")
    plan = make_plan({"actor": config}, GIB)
    _, num_bytes = plan.largest()
    assert num_bytes == plan.estimate("actor", config).device_total + ASLEEP_BYTES
    on_cpu = MemoryPlan({"actor": config}, Hardware(2, "cpu", 0))
    _, num_bytes = on_cpu.largest()
    assert num_bytes == on_cpu.estimate("actor", config).device_total


def test_weights_that_do_not_fit_into_vllms_share_are_a_mistake(model):
    """As long as one response fits, there is no warning."""
    settings = ["rollout.gpu_memory_utilization=0.5", "algorithm.adv_estimator=grpo"]
    config = ppo_config(model, *settings)
    awake = AwakeMemory.of(config, 0)
    roles = role_configs(config)
    with pytest.raises(InputError, match="weights take .*: raise rollout.gpu_memory_util"):
        make_plan(roles, 2 * awake.weights).generation_warnings()
    (warning,) = make_plan(roles, 2 * awake.weights + awake.longest_sequence).generation_warnings()
    assert "one response of the greatest length" in warning
    assert not make_plan(roles, 100 * GIB).generation_warnings()


def test_generation_has_a_warning_from_95_percent_of_the_device(model):
    """With a KV cache of a fixed size, generation needs equally much on every device."""
    config = ppo_config(model, "algorithm.adv_estimator=grpo", "rollout.kv_cache_gib=3")
    roles = role_configs(config)
    num_bytes = make_plan(roles, GIB).generation_bytes()
    assert not make_plan(roles, num_bytes / 0.94).generation_warnings()
    (warning,) = make_plan(roles, num_bytes / 0.96).generation_warnings()
    assert f"generation needs about {num_bytes / GIB:.1f} GiB" in warning
    assert "set rollout.kv_cache_gib to a smaller value" in warning
    assert warning in make_plan(roles, num_bytes / 0.96).warnings()


def test_what_stays_on_the_device_beside_vllm_is_counted(model):
    settings = ["algorithm.adv_estimator=grpo", "rollout.gpu_memory_utilization=0.9"]
    moved = make_plan(role_configs(ppo_config(model, *settings)), 100 * GIB)
    kept_settings = [*settings, "offload.parameters=false", "offload.optimizer=false"]
    kept = make_plan(role_configs(ppo_config(model, *kept_settings)), 100 * GIB)
    estimate = kept.estimate("actor", kept.config)
    difference = kept.generation_bytes() - moved.generation_bytes()
    assert difference == pytest.approx(estimate.parameters + estimate.optimizer)
    (warning,) = make_plan(kept.roles, 20 * GIB).generation_warnings()
    lower = "rollout.gpu_memory_utilization to a smaller value or offload.parameters=true"
    assert f"set {lower}" in warning


def test_the_weights_that_vllm_receives_count_twice_while_the_actor_has_them(model):
    """A KV cache that is as small as possible needs less than the actor's parameters."""
    pairs = ["algorithm.adv_estimator=grpo", "rollout.kv_cache_gib=1e-6"]
    plan = make_plan(role_configs(ppo_config(model, *pairs)), GIB)
    awake = AwakeMemory.of(plan.config, GIB)
    parameters = parameters_on_device(plan.estimate("actor", plan.config))
    assert awake.weights + parameters > awake.total
    assert plan.generation_bytes() == awake.weights + parameters + ASLEEP_BYTES


@pytest.mark.parametrize("kv_cache_gib", [1e-6, 1])
def test_frozen_weights_that_vllm_shares_are_counted_once(model, kv_cache_gib):
    """A small KV cache needs less than what the actor keeps beside the shared weights."""
    pairs = ["algorithm.adv_estimator=grpo", f"rollout.kv_cache_gib={kv_cache_gib}"]
    pairs += ["model.lora.rank=4", "engine.fsdp_size=1", "offload.parameters=false"]
    plan = make_plan(role_configs(ppo_config(model, *pairs)), GIB)
    awake = AwakeMemory.of(plan.config, GIB)
    estimate = plan.estimate("actor", plan.config)
    resident = resident_bytes(estimate)
    assert resident >= estimate.parameters > awake.weights
    expected = max(estimate.parameters, awake.total - awake.weights + resident)
    assert plan.generation_bytes() == pytest.approx(expected + ASLEEP_BYTES)


def test_parameters_in_host_memory_take_none_of_the_device(model):
    estimate = make_plan({}, GIB).estimate(None, sft_config(model, "engine.cpu_offload=true"))
    assert estimate.parameters > 0
    assert parameters_on_device(estimate) == 0
    assert resident_bytes(estimate) == 0


def test_an_error_outside_of_steps_names_the_stage_alone(model):
    plan = make_plan({None: sft_config(model)}, GIB)
    expected = f"rank 1 ran out of device memory in stage start: {plan.describe()}. {plan.advice()}"
    assert plan.explain(1, "start", None) == expected


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:163"),
    ],
    ids=["torch", "vllm"],
)
def test_a_rank_without_memory_ends_with_one_line(error, model, tmp_path, capfd):
    heartbeat = Heartbeat(tmp_path / "heartbeat", 3, 1, 30.0, lambda: 0.0)
    try:
        heartbeat.explain_out_of_memory = make_plan({None: sft_config(model)}, GIB).explain
        heartbeat.enter("train_batch", 7)
        sys.excepthook(type(error), error, None)
    finally:
        heartbeat.close()
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: rank 3 ran out of device memory in stage train_batch of step 7")
    assert "the device has 1.0 GiB" in line
    assert "To lower it, set " in line


def test_an_error_of_another_kind_keeps_its_traceback():
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert not is_out_of_memory(OSError("out of memory"))


def test_the_advice_names_the_size_of_the_kv_cache(model):
    with_size = make_plan(role_configs(ppo_config(model, "rollout.kv_cache_gib=3")), GIB)
    assert "rollout.kv_cache_gib below 3" in with_size.advice()
    assert "kv_cache_gib" not in make_plan(role_configs(ppo_config(model)), GIB).advice()
