"""Stages of a step that only some runs have, with engines that only record their calls."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from config import InputError
from data.prompts import Prompt
from engines.heads import Head
from engines.teacher import NUMBER
from rl import roles as roles_module, updates
from tests.rl.recording import RecordingRollout, make_share
from tests.support.ranks import on_ranks
from tests.support.samples import make_samples, whole


def test_a_reward_model_is_built_frozen_with_a_value_head(make_roles, monkeypatch):
    built = []
    monkeypatch.setattr(roles_module, "RewardModel", lambda *values: built.append(values) or "it")
    settings = ["reward.model.path=judge", "offload.reference=true"]
    roles = make_roles(6, *settings, device="cuda")
    assert roles.reward_model == "it"
    ((config, engine, offloaded),) = built
    assert config is roles.config
    assert engine.config.model.path == "judge"
    assert (engine.options["head"], engine.options["optimize"]) == (Head.VALUES, False)
    assert offloaded == ["parameters"]
    assert "parameters" not in engine.on_device


def test_an_adapter_is_probed_around_its_way_to_vllm(make_roles):
    """The trainer computes while its parameters are on the device, and vLLM when it is awake."""
    roles = make_roles(6, device="cuda")
    roles.actor.onload()
    rollout = roles.rollout = RecordingRollout({"actor": roles.actor})
    rollout.adapter = "adapter"
    probed = []

    def record_trainer(actor):
        probed.append((actor, set(actor.on_device), [*rollout.held]))

    def check_vllm(checked):
        probed.append((checked, set(roles.actor.on_device), [*rollout.held]))

    roles.probe = SimpleNamespace(record_trainer=record_trainer, check_vllm=check_vllm)
    roles.wake()
    assert probed == [
        (roles.actor, {"parameters"}, ["weights"]),
        (rollout, set(), ["weights", "kv_cache"]),
    ]
    assert rollout.calls == ["adapter"]


def test_stages_without_their_model_do_nothing(make_roles):
    roles = make_roles(6, "algorithm.adv_estimator=grpo")
    share = make_share()
    roles.compute_log_probs(share, 0)
    roles.compute_values(share)
    assert share.batch.fields == {}
    assert roles.update_critic(share, 0) == {}
    samples = make_samples([1], [1.0], [0])
    assert roles.score(samples) is samples


@pytest.mark.parametrize("used, metric", [(None, "perf/memory_peak_gib"), (3.5, "perf/memory_tr")])
def test_memory_is_that_of_all_processes_on_a_device(make_roles, monkeypatch, used, metric):
    monkeypatch.setattr(roles_module, "used_gib", lambda device: used)
    ((name, value), *_) = make_roles(6).memory().items()
    assert name.startswith(metric)
    assert used in (None, value)


def test_a_policy_is_exported_under_the_name_of_its_base(make_roles, monkeypatch, tmp_path):
    exported = []
    monkeypatch.setattr(roles_module, "export_hf", lambda *values: exported.append(values))
    roles = make_roles(6)
    roles.tokenizer = "tokenizer"
    roles.export(tmp_path, "org/model")
    assert exported == [(roles.actor, "tokenizer", tmp_path, "org/model")]


@pytest.mark.parametrize("has_prompts", [False, True])
def test_a_step_is_divided_with_the_prompts_that_teachers_see(make_roles, monkeypatch, has_prompts):
    divided = []
    monkeypatch.setattr(roles_module, "divide", lambda *values: divided.append(values) or "share")
    settings = ["algorithm.distill.teachers={a: x, b: y}", "algorithm.distill.teacher_key=t"]
    if has_prompts:
        settings.append("data.teacher_prompt_key=hint")
    roles = make_roles(6, *settings, "algorithm.ppo_mini_batch_size=1", "data.train_batch_size=2")
    samples = make_samples([1, 2], [1.0, 0.0], [0, 1])
    prompts = [Prompt([], "", {"t": name}, teacher_ids=[9]) for name in "ba"]
    samples = replace(samples, prompts=prompts)
    assert roles.divide(samples) == "share"
    ((whole, mini_batches, actor, _, seen_by_teacher),) = divided
    assert whole is samples
    assert actor is roles.actor
    assert mini_batches.tolist() == [0, 1]
    assert samples.batch.fields[NUMBER].tolist() == [1] * 3 + [0] * 4
    if not has_prompts:
        assert seen_by_teacher is None
        return
    assert seen_by_teacher.batch.lengths == [2, 3]
    assert torch.equal(seen_by_teacher.batch.fields[NUMBER], torch.tensor([1, 1, 0, 0, 0]))


@pytest.mark.parametrize("is_partial", [False, True])
def test_a_step_draws_from_batches_or_from_open_groups(make_roles, monkeypatch, is_partial):
    """The sampler of open groups is started once."""
    settings = ["data.train_batch_size=2"]
    if is_partial:
        settings += ["rollout.partial.enable=true", "algorithm.rollout_is=token"]
    roles = make_roles(6, *settings)
    started = []
    sources = []
    ledger = SimpleNamespace(next_group=6)

    def start(*values):
        started.append(values)
        return SimpleNamespace(ledger=ledger)

    def collect(config, source, group):
        sources.append(source)
        return "samples"

    monkeypatch.setattr(roles, "start_partial", start)
    monkeypatch.setattr(roles_module.collecting, "collect", collect)
    for step in (3, 4):
        following = 3 if is_partial else 5
        assert roles.collect("rows", range, 5, step) == ("samples", following)
    if not is_partial:
        assert started == []
        return
    assert started == [("rows", range, 3)]
    assert [source.version for source in sources] == [2, 3]
    assert sources[0].profiler is roles.profiler


def check_gaps_of_rank(gaps: list[list[float]]) -> str:
    """Check responses whose log-probabilities in vLLM are lower by gaps[rank], and return errors.

    Their prompts differ, too, which does not count.
    """
    own = gaps[dist.get_rank()]
    samples = make_samples([len(own)], [1.0], [0])
    share = whole(samples)
    mask = share.batch.fields["loss_mask"]
    trainers = torch.full_like(mask, -100.0)
    trainers[mask > 0] = torch.tensor([-1.0 + gap for gap in own])
    try:
        updates.check_fp8_kv_cache(share, trainers, None)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "gaps, message",
    [
        ([[0.5, -0.5], [0.5]], ""),
        ([[0.75], [0.25, 0.25, 0.25, -0.25]], ""),
        ([[0.75, -0.75, 0.75], [0.0]], "by 0.56 nats on average"),
        ([[math.nan], [0.0]], "by nan nats on average"),
        ([[], [0.1]], ""),
        ([[], []], ""),
    ],
)
def test_a_kv_cache_in_fp8_is_judged_by_the_mean_over_the_tokens_of_all_ranks(
    tmp_path, gaps, message
):
    """Differences of either sign count, and one that is no number is too large."""
    for error in on_ranks(2, tmp_path, check_gaps_of_rank, gaps):
        assert message in error
        assert bool(error) == bool(message)
